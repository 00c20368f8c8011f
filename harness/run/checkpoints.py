"""Checkpoints that survive a kill: written under another name, flushed to disk, then renamed.

checkpoints/step_N/  the policy as a Hugging Face directory (with LoRA: its adapter)
                     critic.safetensors the trained weights of its critic, if it has one
                     optimizer.pt       readable by `torch.load(weights_only=True)`
                     checkpoint.json    the step, the number of processes, the size of every other file, and the lengths
                                        of the run's logs; a resumed run truncates its logs to them

Random number generators have no state to save: randomness is keyed by step (keyed.py).
"""

import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from common.errors import UserError
from common.parallel import gather, world_size
from common.policy import Policy

from harness.base.files import flush_to_disk
from harness.base.ranks import has_lost_others, on_main
from harness.base.terminal import say
from harness.logs.metrics import read_lines
from harness.models.saving import load_weights, save_policy

MANIFEST = "checkpoint.json"
METRICS, SAMPLES, BEFORE = "metrics.jsonl", "samples.jsonl", "before.json"
TOKENS, DIAGNOSIS = "tokens.jsonl", "diagnosis.jsonl"
LOGS = (METRICS, SAMPLES, BEFORE, TOKENS, DIAGNOSIS)  # in a run's directory


class Checkpoint(NamedTuple):
    step: int
    path: Path
    logs: dict[str, int]  # sizes of the run's logs when it was written


def write_checkpoint(
    run: Path, step: int, policy: Policy, optimizer: torch.optim.Optimizer, keep: int, accelerator=None
) -> None:
    """Write `checkpoints/step_<step>`, completely or not at all, and keep the newest `keep`; all processes call it."""
    from safetensors import SafetensorError

    directory = run / "checkpoints"
    target, partial = directory / f"step_{step}", directory / f"step_{step}.partial"
    try:
        on_main(lambda: (shutil.rmtree(partial, ignore_errors=True), partial.mkdir(parents=True)))
        if accelerator is None:
            save_policy(policy, partial)
            on_main(lambda: torch.save(optimizer.state_dict(), partial / "optimizer.pt"))
        else:
            accelerator.save_state(str(partial))
            gather(None)  # wait until all processes have written their part
        on_main(lambda: _complete(run, partial, target, step))
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save turns a full disk into a RuntimeError
        if has_lost_others(error):
            raise
        shutil.rmtree(partial, ignore_errors=True)
        finished = _finished(directory)
        newest = f"The last complete one is of step {finished[0][0]}" if finished else "There is no earlier one"
        raise UserError(
            f"the checkpoint of step {step} could not be written to {directory} ({error}); is the disk full? {newest}"
        ) from error
    old = [*(path for _, path in _finished(directory)[keep:]), *directory.glob("step_*.partial")]
    on_main(lambda: [shutil.rmtree(path) for path in old])


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


def read_checkpoint(path: Path, policy: Policy, optimizer: torch.optim.Optimizer, accelerator=None) -> None:
    """Restore policy and optimizer; Accelerate cannot always read files of another number of processes or shards."""
    states = [path / name for name in ("optimizer.pt", "optimizer.bin") if (path / name).exists()]  # .bin: older runs
    if accelerator is None and states:
        load_weights(policy, path)
        optimizer.load_state_dict(torch.load(states[0], weights_only=True, map_location=policy.device))
        return
    try:
        if accelerator is None:
            raise ValueError("it holds shards")
        accelerator.load_state(str(path))
    except Exception as error:  # DeepSpeed and torch's distributed checkpoints raise many kinds of errors
        if has_lost_others(error):
            raise
        processes = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["processes"]
        raise UserError(
            f"{path} cannot be continued by these processes ({' '.join(str(error).split())[:300]}): start as many, and "
            f"sharded in the same way, as those that wrote it ({processes})"
        ) from error


def _finished(directory: Path) -> list[tuple[int, Path]]:
    """Step and path of every finished checkpoint, newest first."""
    numbered = [(path.name.removeprefix("step_"), path) for path in directory.glob("step_*")]
    return sorted(((int(number), path) for number, path in numbered if number.isdecimal()), reverse=True)
