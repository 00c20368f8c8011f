"""What a run keeps of its policy. Checkpoints survive a kill: written under another name, flushed, then renamed.

checkpoints/step_N/  the policy as a Hugging Face directory (with LoRA: its adapter)
                     critic.safetensors the trained weights of its critic, if it has one
                     optimizer.pt       readable by `torch.load(weights_only=True)`
                     kept.pt            likewise: what else later steps depend on, see `Run.restore`
                     checkpoint.json    the step, the number of processes, the size of every other file, and the lengths
                                        of the run's logs; a resumed run truncates its logs to them

Random number generators have no state to save: randomness is keyed by step (keyed.py).
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from common.errors import UserError
from common.parallel import gather, world_size
from common.policy import Policy

from harness.base.config import DTYPES, PolicyConfig
from harness.base.files import flush_to_disk, read_lines
from harness.base.ranks import has_lost_others, on_main
from harness.base.terminal import printable, say
from harness.models.saving import load_weights, save_base, save_merged, save_policy

MANIFEST, KEPT = "checkpoint.json", "kept.pt"
METRICS, SAMPLES, BEFORE = "metrics.jsonl", "samples.jsonl", "before.json"
TOKENS, DIAGNOSIS = "tokens.jsonl", "diagnosis.jsonl"
LOGS = (METRICS, SAMPLES, BEFORE, TOKENS, DIAGNOSIS)  # in a run's directory


class Checkpoint(NamedTuple):
    step: int
    path: Path
    logs: dict[str, int]  # sizes of the run's logs when it was written


class Checkpoints:
    """Keeps the policy of the run in a directory: checkpoints/ to resume from, best/ and final/ to use.

    `history`: the metrics of a resumed run. `accelerator` writes and reads checkpoints in which each process has its
    shard; None: each process has all weights.
    """

    def __init__(
        self, run: Path, config: PolicyConfig, history: tuple[dict, ...], tell: Callable[[str], None], accelerator=None
    ):
        self._run, self._config, self._tell, self._accelerator = run, config, tell, accelerator
        self.best = _best_of(history, getattr(config, "keep_best", None))
        self._kept = None  # with `state_dict` and `load_state_dict`
        # The results of the newest complete step, as long as nothing has changed them
        self._newest: tuple[int, Policy, torch.optim.Optimizer] | None = None

    def restore(self, step: int, policy: Policy, optimizer: torch.optim.Optimizer, accelerator=None, kept=None) -> None:
        """Read the checkpoint of a step, if it is not 0, into policy and optimizer, with the accelerator if given."""
        self._accelerator, self._kept = accelerator or self._accelerator, kept
        if step:
            self._read(self._run / "checkpoints" / f"step_{step}", policy, optimizer)

    def add(self, step: int, policy: Policy, optimizer: torch.optim.Optimizer, metrics: dict[str, float]) -> None:
        """A step is complete: it can be written, and is kept in best/ if its metrics are the best so far."""
        self._keep_best(step, policy, metrics)
        self._newest = (step, policy, optimizer)

    def begin_update(self) -> None:
        """From now on the policy is between two steps."""
        self._newest = None

    def _keep_best(self, step: int, policy: Policy, metrics: dict[str, float]) -> None:
        """Write best/ if no earlier step has as high a value of the metric of `--keep-best`."""
        name = getattr(self._config, "keep_best", None)
        if name is None or (every := self._config.eval_every) == 0 or step % every:
            return
        if (value := metrics.get(name)) is None:
            if step == every:
                self._tell(
                    f"--keep-best {printable(name, 60)}: step {step} has no such metric; metrics.jsonl has all names"
                )
            return
        if self.best is not None and value <= self.best["value"]:
            return
        self.best = {"step": step, "metric": name, "value": value}
        best, partial = self._run / "best", self._run / "best.partial"
        on_main(lambda: shutil.rmtree(partial, ignore_errors=True))
        self._save(policy, partial)
        on_main(lambda: (shutil.rmtree(best, ignore_errors=True), partial.rename(best)))
        self._tell(f"step {step}: {name} {value:.4g} is the highest so far: kept in {best}")

    def is_due(self, step: int, is_last: bool) -> bool:
        every = self._config.checkpoint_every
        return bool(every) and (step % every == 0 or is_last)

    def write(self) -> None:
        """Write a checkpoint of the newest complete step, completely or not at all; all processes call it.

        Nothing is written if there is no such step, or if it has a checkpoint. The newest --keep-checkpoints stay.
        """
        if self._newest is None:
            return
        from safetensors import SafetensorError

        step, policy, optimizer = self._newest
        directory = self._run / "checkpoints"
        target, partial = directory / f"step_{step}", directory / f"step_{step}.partial"
        on_main(lambda: save_base(self._config, policy, self._run / "base"))
        try:
            on_main(lambda: (shutil.rmtree(partial, ignore_errors=True), partial.mkdir(parents=True)))
            if self._accelerator is None:
                save_policy(policy, partial)
                on_main(lambda: torch.save(optimizer.state_dict(), partial / "optimizer.pt"))
                if self._kept is not None:
                    on_main(lambda: torch.save(self._kept.state_dict(), partial / KEPT))
            else:
                self._accelerator.save_state(str(partial))
                gather(None)  # wait until all processes have written their part
            on_main(lambda: _complete(self._run, partial, target, step))
        except (OSError, RuntimeError, SafetensorError) as error:  # torch.save turns a full disk into a RuntimeError
            if has_lost_others(error):
                raise
            shutil.rmtree(partial, ignore_errors=True)
            finished = _finished(directory)
            newest = f"The last complete one is of step {finished[0][0]}" if finished else "There is no earlier one"
            raise UserError(
                f"the checkpoint of step {step} could not be written to {directory} ({error}); is the disk full? "
                f"{newest}"
            ) from error
        old = [path for _, path in _finished(directory)[self._config.keep_checkpoints :]]
        old += directory.glob("step_*.partial")
        on_main(lambda: [shutil.rmtree(path) for path in old])
        self._newest = None

    def save_final(self, policy: Policy) -> Path:
        """Write final/, and what --save-merged asks for."""
        path, dtype = self._run / "final", DTYPES[self._config.dtype]
        self._save(policy, path)
        if self._config.save_merged:
            on_main(lambda: save_merged(path, self._run / "final_merged", policy.tokenizer, dtype))
        return path

    def _save(self, policy: Policy, path: Path) -> None:
        on_main(lambda: save_base(self._config, policy, self._run / "base"))
        save_policy(policy, path)

    def _read(self, path: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Read a checkpoint; Accelerate cannot always read files of another number of processes or shards."""
        names = ("optimizer.pt", "optimizer.bin")  # the second one in older runs
        states = [path / name for name in names if (path / name).exists()]
        if self._accelerator is None and states:
            load_weights(policy, path)
            optimizer.load_state_dict(torch.load(states[0], weights_only=True, map_location=policy.device))
            if self._kept is not None:
                self._kept.load_state_dict(torch.load(path / KEPT, weights_only=True, map_location=policy.device))
            return
        try:
            if self._accelerator is None:
                raise ValueError("it holds shards")
            self._accelerator.load_state(str(path))
        except Exception as error:  # DeepSpeed and torch's distributed checkpoints raise many kinds of errors
            if has_lost_others(error):
                raise
            processes = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["processes"]
            raise UserError(
                f"{path} cannot be continued by these processes ({' '.join(str(error).split())[:300]}): start as many, "
                f"and sharded in the same way, as those that wrote it ({processes})"
            ) from error


def _complete(run: Path, partial: Path, target: Path, step: int) -> None:
    """Write the manifest, wait until everything is on disk, and rename."""
    logs = [run / name for name in LOGS if (run / name).exists()]
    paths = sorted(path for path in partial.rglob("*") if path.is_file())
    manifest = {
        "step": step,
        "processes": world_size(),
        "sizes": {path.relative_to(partial).as_posix(): path.stat().st_size for path in paths},
        "logs": {path.name: path.stat().st_size for path in logs},
    }
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    for path in (*logs, *partial.rglob("*"), partial):  # the logs, too: a checkpoint must not be newer than the logs
        flush_to_disk(path)
    partial.rename(target)
    flush_to_disk(target.parent)


def newest_checkpoint(directory: Path) -> Checkpoint | None:
    """The newest finished checkpoint of a run; None if there is none, UserError if any of its files is incomplete."""
    for path in sorted(directory.glob("step_*.partial")):
        say(f"{path} was not finished when the run was stopped; it is ignored")
    if not (finished := _finished(directory)):
        return None
    step, path = finished[0]
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    for name, size in manifest["sizes"].items():
        if _size(path / name) != size:
            raise UserError(
                f"{path / name} is not as it was written: restore it, or remove {path} to resume from an earlier step"
            )
    return Checkpoint(step, path, manifest["logs"])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def restore_logs(run: Path, checkpoint: Checkpoint) -> list[dict]:
    """Truncate the logs, which are longer after a kill, to the checkpoint; returns the rows of metrics.jsonl."""
    for name, size in checkpoint.logs.items():
        if _size(run / name) < size:
            raise UserError(
                f"{run / name} is shorter than it was: restore it from a copy: {run} cannot be resumed after step "
                f"{checkpoint.step} without it"
            )
    for name in LOGS:
        if name in checkpoint.logs:
            os.truncate(run / name, checkpoint.logs[name])
        else:
            (run / name).unlink(missing_ok=True)
    return read_lines(run / METRICS)


def _finished(directory: Path) -> list[tuple[int, Path]]:
    """Step and path of every finished checkpoint, newest first."""
    numbered = [(path.name.removeprefix("step_"), path) for path in directory.glob("step_*")]
    return sorted(((int(number), path) for number, path in numbered if number.isdecimal()), reverse=True)


def _best_of(history: tuple[dict, ...], metric: str | None) -> dict | None:
    """The first of the steps with the highest value of a metric, which best/ holds; None if no step has it."""
    steps = [row for row in history if metric in row and "time/step" in row]  # not the evaluations before and after
    best = max(steps, key=lambda row: row[metric], default=None)
    return None if best is None else {"step": best["step"], "metric": metric, "value": best[metric]}
