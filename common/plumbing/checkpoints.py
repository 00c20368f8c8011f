"""Checkpoints that survive a kill: written under another name, flushed to the disk, then renamed.

checkpoints/step_N/  the policy as a Hugging Face directory (with LoRA: its adapter)
                     optimizer.pt       what `torch.load(weights_only=True)` reads
                     checkpoint.json    the step, and the size and CRC-32 of every other file

No state of any random number generator is needed: randomness is keyed by step (keyed.py).
"""

import json
import os
import shutil
import zlib
from pathlib import Path

import torch

from common.errors import UserError
from common.policy import Policy

from common.plumbing.saving import load_weights, save_policy
from common.plumbing.terminal import say

MANIFEST = "checkpoint.json"


def write_checkpoint(
    directory: Path, step: int, policy: Policy, optimizer: torch.optim.Optimizer, keep: int = 2
) -> Path:
    """Write `directory/step_<step>`, completely or not at all, and then remove all but the newest `keep`.

    Raises:
        UserError: it could not be written, because the disk is full for example; older ones are left as they were.
    """
    from safetensors import SafetensorError

    target, partial = directory / f"step_{step}", directory / f"step_{step}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_policy(policy, partial)
        torch.save(optimizer.state_dict(), partial / "optimizer.pt")
        files = {path.name: [path.stat().st_size, _crc(path)] for path in sorted(partial.iterdir())}
        (partial / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=2), encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            flush_to_disk(path)
        shutil.rmtree(target, ignore_errors=True)  # there is one only if it was found to be corrupt
        partial.rename(target)
        flush_to_disk(directory)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save turns a full disk into a RuntimeError
        shutil.rmtree(partial, ignore_errors=True)
        newest = [found for found, _ in _all_checkpoints(directory) if found < step][:1]
        raise UserError(
            f"the checkpoint of step {step} could not be written to {directory} ({error}); is the disk full? "
            + (f"The last complete one is that of step {newest[0]}" if newest else "There is no earlier one")
        ) from error
    # a run resumes from the newest complete one: those of later steps are corrupt, and do not count
    for path in [path for found, path in _all_checkpoints(directory) if found <= step][keep:]:
        shutil.rmtree(path)
    return target


def newest_checkpoint(directory: Path) -> tuple[int, Path] | None:
    """Step and path of the newest complete checkpoint; corrupt ones are ignored, with a sentence."""
    for path in sorted(directory.glob("step_*.partial")):
        say(f"{path} was not finished when the run was stopped; it is ignored")
    for step, path in _all_checkpoints(directory):
        fault = _find_fault(path)
        if fault is None:
            return step, path
        say(f"{path} is corrupt ({fault}); it is ignored")
    return None


def read_checkpoint(path: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Restore the state of the policy and of the optimizer."""
    load_weights(policy, path)
    optimizer.load_state_dict(torch.load(path / "optimizer.pt", weights_only=True, map_location=policy.device))


def flush_to_disk(path: Path) -> None:
    """Wait until the disk holds the file, or the directory's list of names."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no directory
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _all_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Step and path of every finished checkpoint, including corrupt ones, the newest first."""
    numbered = [(path.name.removeprefix("step_"), path) for path in directory.glob("step_*")]
    return sorted(((int(number), path) for number, path in numbered if number.isdecimal()), reverse=True)


def _find_fault(path: Path) -> str | None:
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, (size, crc) in files.items():
            if (path / name).stat().st_size != size:
                return f"{name} is not as long as it was written"
            if _crc(path / name) != crc:
                return f"{name} is not what was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    return None


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            crc = zlib.crc32(block, crc)
    return crc
