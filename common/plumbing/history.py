"""What a resumed run keeps of its own files: what they held when its checkpoint was written.

A checkpoint records the size and the CRC-32 of each of these files. A file that still begins with those bytes is
truncated to them. Of any other, what can be read is kept, what is lost is said, and a copy is put into `damaged/`.
"""

import json
import os
import shutil
from pathlib import Path

from common.plumbing.files import crc32, flush_to_disk, replace_file
from common.plumbing.terminal import say

METRICS, SAMPLES, BEFORE = "metrics.jsonl", "samples.jsonl", "before.json"
TOKENS, DIAGNOSIS = "tokens.jsonl", "diagnosis.jsonl"
LOGS = (METRICS, SAMPLES, BEFORE, TOKENS, DIAGNOSIS)
EVENTS = "events.out.tfevents.*"  # TensorBoard's, which a resumed run writes anew from metrics.jsonl


def flush_logs(directory: Path) -> dict[str, tuple[int, int]]:
    """Wait until the disk holds a run's files, so that no checkpoint is newer than they are: their sizes and CRC-32."""
    paths = [directory / name for name in LOGS if (directory / name).exists()]
    for path in paths:
        flush_to_disk(path)
    return {path.name: (path.stat().st_size, crc32(path)) for path in paths}


def restore_logs(directory: Path, step: int, recorded: dict[str, tuple[int, int]]) -> list[dict]:
    """Bring a run's files back to what they held after `step`, and return the rows of metrics.jsonl.

    Args:
        step: of the checkpoint that the run continues from.
        recorded: what `flush_logs` gave when it was written; empty for a checkpoint of an older version.
    """
    readable: dict[str, bytes] = {}  # of the files that are not what was written
    faults: dict[str, str] = {}
    for name in LOGS:
        path = directory / name
        if recorded and name not in recorded:
            path.unlink(missing_ok=True)  # the checkpoint is older
        elif name in recorded and not path.exists():
            readable[name], faults[name] = b"", "is missing"
        elif name in recorded and not _begins_with(path, *recorded[name]):
            readable[name], fault = _salvage(path, step)
            faults[name] = fault or "is not what was written"
        elif name not in recorded and path.exists():
            readable[name], faults[name] = _salvage(path, step)
    if any(faults.values()):
        copies = _set_aside(directory)
        for name, fault in faults.items():
            if fault:
                say(f"{directory / name} {fault}; what can be read is kept, and what there was is in {copies}")
    for name, content in readable.items():
        if name == BEFORE and faults[name]:
            (directory / name).unlink(missing_ok=True)  # the evaluation is repeated
        else:
            replace_file(directory / name, content)
    for name in recorded.keys() - readable.keys():
        os.truncate(directory / name, recorded[name][0])
    rows = [json.loads(line) for line in (directory / METRICS).read_bytes().splitlines()]
    if missing := sorted({*range(1, step + 1)} - {row["step"] for row in rows}):
        say(f"the curve and the summary will lack {_numbered('step', missing)}")
    return rows


def remove_logs(directory: Path) -> None:
    """Remove a run's files before it is started again from step 0, because it has no complete checkpoint.

    Copies are kept where there are steps of corrupt checkpoints: on a GPU they can come out differently.
    """
    if any((directory / "checkpoints").glob("step_*")):
        say(f"copies of what the run has logged so far are in {_set_aside(directory)}")
    for name in LOGS:
        (directory / name).unlink(missing_ok=True)


def _begins_with(path: Path, size: int, crc: int) -> bool:
    return path.exists() and path.stat().st_size >= size and crc32(path, size) == crc


def _salvage(path: Path, step: int) -> tuple[bytes, str]:
    """The lines of steps up to `step` that can be read, and what is wrong with the file, if anything."""
    if path.name == BEFORE:
        return path.read_bytes(), ""
    kept, unreadable, last = [], [], -1
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            at = json.loads(line)["step"]
            is_next = at > last if path.name == METRICS else at >= last  # the last evaluation repeats a step
        except (ValueError, KeyError, TypeError, RecursionError):
            if line.endswith(b"\n"):  # else a kill has cut it off
                unreadable.append(number)
            continue
        if is_next and at <= step:
            kept.append(line)
            last = at
    return b"".join(kept), f"is damaged: {_numbered('line', unreadable)} cannot be read" if unreadable else ""


def _numbered(what: str, numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}"


def _set_aside(directory: Path) -> Path:
    """Copy a run's files as they are into its `damaged/`, or `damaged-2/`, ..."""
    number = 1
    while (copies := directory / f"damaged{'' if number == 1 else f'-{number}'}").exists():
        number += 1
    copies.mkdir()
    try:
        for path in (*(directory / name for name in LOGS), *directory.glob(EVENTS)):
            if path.exists():
                shutil.copy2(path, copies)
    except OSError:
        shutil.rmtree(copies)
        raise
    return copies
