"""Files on the disk: writing that a kill cannot leave half done."""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Give a file a new content, completely or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


def flush_to_disk(path: Path) -> None:
    """Wait until the disk holds the file, or the directory's list of names."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no directory
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)
