"""Writing files so that a kill cannot leave them half written, and reading rows that one has cut off."""

import errno
import json
import math
import os
from pathlib import Path

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # on the disk, in the user's quota, in a file of limited size


def replace_file(path: Path, content: bytes) -> None:
    """Replace the content of a file, completely or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a directory
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)


def read_lines(path: Path) -> list[dict]:
    """The rows of a run's JSONL file, up to a line that a kill cut off; none if there is no file."""
    rows = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def finite(value: object) -> object:
    """Copy `value` with None in place of every number that is not finite."""
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, list):
        is_plain = all(type(entry) is int or (type(entry) is float and entry - entry == 0) for entry in value)
        return value if is_plain else [finite(entry) for entry in value]  # lists of tokens are long
    return None if isinstance(value, float) and not math.isfinite(value) else value
