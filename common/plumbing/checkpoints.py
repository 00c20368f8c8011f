"""Checkpoints that survive a kill: written under another name, flushed to the disk, then renamed.

checkpoints/step_N/  the policy as a Hugging Face directory (with LoRA: its adapter)
                     optimizer.pt       what `torch.load(weights_only=True)` reads
                     checkpoint.json    the step, the number of processes, and the size and CRC-32 of every other file
                                        and of the run's logs

No state of any random number generator is needed: randomness is keyed by step (keyed.py).
"""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from common.errors import UserError
from common.parallel import gather, world_size
from common.policy import Policy

from common.plumbing.files import crc32, flush_to_disk
from common.plumbing.ranks import has_lost_others, on_main
from common.plumbing.saving import load_weights, save_policy
from common.plumbing.terminal import say

MANIFEST = "checkpoint.json"
LEFT_OVER = ("step_*.partial", "step_*.corrupt")  # what is removed as soon as there is a new complete checkpoint


class Checkpoint(NamedTuple):
    step: int
    path: Path
    logs: dict[str, tuple[int, int]]  # size and CRC-32 of the run's logs when it was written


def write_checkpoint(
    directory: Path,
    step: int,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    keep: int = 2,
    logs: dict[str, tuple[int, int]] | None = None,
    accelerator=None,
) -> Path:
    """Write `directory/step_<step>`, completely or not at all, and then remove all but the newest `keep`.

    All processes call it together.

    Args:
        logs: size and CRC-32 of the run's logs, which are brought back to them when the run is resumed.

    Raises:
        UserError: it could not be written, because the disk is full for example; older ones are left as they were.
    """
    from safetensors import SafetensorError

    target, partial = directory / f"step_{step}", directory / f"step_{step}.partial"
    try:
        on_main(lambda: _make_empty(partial))
        if accelerator is None:
            save_policy(policy, partial)
            on_main(lambda: torch.save(optimizer.state_dict(), partial / "optimizer.pt"))
        else:
            accelerator.save_state(str(partial))
            gather(None)  # wait until all processes have written their part
        on_main(lambda: _complete(partial, target, step, logs or {}))
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save turns a full disk into a RuntimeError
        if has_lost_others(error):
            raise
        shutil.rmtree(partial, ignore_errors=True)
        newest = [found for found, _ in _all_checkpoints(directory) if found < step][:1]
        raise UserError(
            f"the checkpoint of step {step} could not be written to {directory} ({error}); is the disk full? "
            + (f"The last complete one is that of step {newest[0]}" if newest else "There is no earlier one")
        ) from error
    on_main(lambda: _remove_old(directory, step, keep))
    return target


def _make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _complete(partial: Path, target: Path, step: int, logs: dict[str, tuple[int, int]]) -> None:
    """Write the manifest, wait for the disk, and rename."""
    paths = sorted(path for path in partial.rglob("*") if path.is_file())
    files = {path.relative_to(partial).as_posix(): [path.stat().st_size, crc32(path)] for path in paths}
    manifest = {"step": step, "processes": world_size(), "files": files, "logs": logs}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    for path in (*partial.rglob("*"), partial):
        flush_to_disk(path)
    shutil.rmtree(target, ignore_errors=True)  # there is one only if it was found to be corrupt
    partial.rename(target)
    flush_to_disk(target.parent)


def _remove_old(directory: Path, step: int, keep: int) -> None:
    # a run resumes from the newest complete one: those of later steps are corrupt, and do not count
    old = [path for found, path in _all_checkpoints(directory) if found <= step][keep:]
    for path in (*old, *(path for pattern in LEFT_OVER for path in directory.glob(pattern))):
        shutil.rmtree(path)


def newest_checkpoint(directory: Path) -> Checkpoint | None:
    """The newest complete checkpoint. Corrupt ones are renamed to `step_<N>.corrupt`, with a sentence."""
    for path in sorted(directory.glob("step_*.partial")):
        say(f"{path} was not finished when the run was stopped; it is ignored")
    for step, path in _all_checkpoints(directory):
        try:
            return Checkpoint(step, path, _read_manifest(path).get("logs", {}))
        except _CorruptError as fault:
            say(f"{path} is corrupt ({fault}); it is ignored")
            shutil.rmtree(f"{path}.corrupt", ignore_errors=True)
            path.rename(f"{path}.corrupt")
    return None


def read_checkpoint(path: Path, policy: Policy, optimizer: torch.optim.Optimizer, accelerator=None) -> None:
    """Restore the state of the policy and of the optimizer.

    Raises:
        UserError: Accelerate cannot read what it has written for another number of processes or another sharding.
    """
    if accelerator is not None:
        try:
            accelerator.load_state(str(path))
        except Exception as error:  # of DeepSpeed or of torch's distributed checkpoints, of many kinds
            if has_lost_others(error):
                raise
            raise UserError(
                f"{path} cannot be continued by these processes ({' '.join(str(error).split())[:300]}): start as "
                f"many, and sharded in the same way, as those that wrote it ({_read_manifest(path)['processes']})"
            ) from error
        return
    load_weights(policy, path)
    optimizer.load_state_dict(torch.load(path / "optimizer.pt", weights_only=True, map_location=policy.device))


def _all_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Step and path of every finished checkpoint, including corrupt ones, the newest first."""
    numbered = [(path.name.removeprefix("step_"), path) for path in directory.glob("step_*")]
    return sorted(((int(number), path) for number, path in numbered if number.isdecimal()), reverse=True)


class _CorruptError(Exception):
    """What is wrong with a checkpoint."""


def _read_manifest(path: Path) -> dict:
    """
    Raises:
        _CorruptError: it cannot be read, or a file of the checkpoint is not what it says.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, (size, crc) in manifest["files"].items():
            if (path / name).stat().st_size != size:
                raise _CorruptError(f"{name} is not as long as it was written")
            if crc32(path / name) != crc:
                raise _CorruptError(f"{name} is not what was written")
        dict(manifest.get("logs", {}))
    except FileNotFoundError as error:
        raise _CorruptError(f"{Path(error.filename).name} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _CorruptError(f"{MANIFEST} cannot be read: {error}") from error
    return manifest
