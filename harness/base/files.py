"""Writing files so that a kill cannot leave them half written."""

import os
from pathlib import Path


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
