"""Checkpoints that survive a kill: written under another name, flushed to the disk, then renamed.

checkpoints/step_N/  the policy as a Hugging Face directory (with LoRA: its adapter)
                     optimizer.pt       what `torch.load(weights_only=True)` reads
                     checkpoint.json    the step, the number of processes, the size of every other file, and that of the
                                        run's logs, which a resumed run truncates to it

No state of any random number generator is needed: randomness is keyed by step (keyed.py).
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
    """Write `checkpoints/step_<step>` of a run, completely or not at all, and then remove all but the newest `keep`.

    All processes call it together.

    Raises:
        UserError: it could not be written, because the disk is full for example; older ones are left as they were.
    """
    from safetensors import SafetensorError

    directory = run / "checkpoints"
    target, partial = directory / f"step_{step}", directory / f"step_{step}.partial"
    try:
        on_main(lambda: _make_empty(partial))
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
        newest = [found for found, _ in _finished(directory)][:1]
        raise UserError(
            f"the checkpoint of step {step} could not be written to {directory} ({error}); is the disk full? "
            + (f"The last complete one is that of step {newest[0]}" if newest else "There is no earlier one")
        ) from error
    on_main(lambda: _remove_old(directory, keep))


def _make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _complete(run: Path, partial: Path, target: Path, step: int) -> None:
    """Write the manifest, wait until the disk holds everything, and rename."""
    logs = [run / name for name in LOGS if (run / name).exists()]
    paths = sorted(path for path in partial.rglob("*") if path.is_file())
    manifest = {
        "step": step,
        "processes": world_size(),
        "sizes": {path.relative_to(partial).as_posix(): path.stat().st_size for path in paths},
        "logs": {path.name: path.stat().st_size for path in logs},
    }
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    for path in (*logs, *partial.rglob("*"), partial):  # the logs, too: no checkpoint is newer than they are
        flush_to_disk(path)
    partial.rename(target)
    flush_to_disk(target.parent)


def _remove_old(directory: Path, keep: int) -> None:
    for path in (*(path for _, path in _finished(directory)[keep:]), *directory.glob("step_*.partial")):
        shutil.rmtree(path)


def newest_checkpoint(directory: Path) -> Checkpoint | None:
    """The newest finished checkpoint of a run; None if there is none.

    Raises:
        UserError: it is not complete as it was written.
    """
    for path in sorted(directory.glob("step_*.partial")):
        say(f"{path} was not finished when the run was stopped; it is ignored")
    for step, path in _finished(directory)[:1]:
        remedy = f"restore it, or remove {path} to resume from an earlier step"
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            sizes, logs = dict(manifest["sizes"]), dict(manifest["logs"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            fault = getattr(error, "strerror", None) or error
            raise UserError(f"{path / MANIFEST} cannot be read ({fault}): {remedy}") from error
        for name, size in sizes.items():
            found = (path / name).stat().st_size if (path / name).exists() else None
            if found != size:
                what = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
                raise UserError(f"{path / name} {what}: {remedy}")
        return Checkpoint(step, path, logs)
    return None


def restore_logs(run: Path, checkpoint: Checkpoint) -> list[dict]:
    """Bring a run's logs back to what they held when the checkpoint was written; the rows of metrics.jsonl.

    A kill leaves more than that. Nothing is changed if a log has lost something.

    Raises:
        UserError: a log is shorter than it was, or has a line that cannot be read.
    """
    for name, size in checkpoint.logs.items():
        path = run / name
        content = path.read_bytes()[:size] if path.exists() else b""
        remedy = f"restore it from a copy: {run} cannot be resumed after step {checkpoint.step} without it"
        if len(content) < size:
            raise UserError(f"{path} {'has lost its end' if path.exists() else 'is missing'}: {remedy}")
        for number, line in enumerate(content.splitlines(), start=1):
            try:
                json.loads(line)
            except (ValueError, RecursionError):
                raise UserError(f"line {number} of {path} cannot be read: {remedy}") from None
    remove_logs(run, but=checkpoint.logs)
    for name, size in checkpoint.logs.items():
        os.truncate(run / name, size)
    return read_lines(run / METRICS)


def remove_logs(run: Path, but: dict[str, int] | None = None) -> None:
    """Remove the logs that a run had not begun when its checkpoint was written; all of them if there is none."""
    for name in set(LOGS) - (but or {}).keys():
        (run / name).unlink(missing_ok=True)


def read_checkpoint(path: Path, policy: Policy, optimizer: torch.optim.Optimizer, accelerator=None) -> None:
    """Restore the state of the policy and of the optimizer.

    Raises:
        UserError: Accelerate cannot read what it has written for another number of processes or another sharding.
    """
    if accelerator is None:
        load_weights(policy, path)
        optimizer.load_state_dict(torch.load(path / "optimizer.pt", weights_only=True, map_location=policy.device))
        return
    try:
        accelerator.load_state(str(path))
    except Exception as error:  # of DeepSpeed or of torch's distributed checkpoints, of many kinds
        if has_lost_others(error):
            raise
        processes = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["processes"]
        raise UserError(
            f"{path} cannot be continued by these processes ({' '.join(str(error).split())[:300]}): start as many, and "
            f"sharded in the same way, as those that wrote it ({processes})"
        ) from error


def _finished(directory: Path) -> list[tuple[int, Path]]:
    """Step and path of every finished checkpoint, the newest first."""
    numbered = [(path.name.removeprefix("step_"), path) for path in directory.glob("step_*")]
    return sorted(((int(number), path) for number, path in numbered if number.isdecimal()), reverse=True)
