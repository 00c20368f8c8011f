"""The header of an index by words: what tells it from other files, and a complete one from a part of one."""

import os
import stat
from pathlib import Path

from common.errors import UserError

from common.plumbing.config import shown

APPLICATION = 0x524C5458  # in the header of the file
VERSION = 1  # the same; a change of the tables, or of what is indexed of a text, needs a new one


def check_file(path: Path, rebuild: str) -> None:
    """Refuse what is not a complete index of this version, as the header of an SQLite file tells.

    Raises:
        UserError: naming the file, and how to make it anew.
    """
    try:
        if not is_index(path):
            raise UserError(f"{shown(path)} is not an index of documents: give another --index")
        with path.open("rb") as file:
            header, size = file.read(100), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise UserError(f"there is no index {shown(path)}{again(rebuild)}") from None
    except OSError as error:
        raise UserError(f"the index {shown(path)} cannot be read ({error.strerror})") from error
    page_size, num_pages, version = (int.from_bytes(header[a:b], "big") for a, b in ((16, 18), (28, 32), (60, 64)))
    if page_size * num_pages != size:
        raise UserError(f"the index {shown(path)} is incomplete{again(rebuild)}")
    if version != VERSION:
        raise UserError(f"the index {shown(path)} has version {version} of the format, not {VERSION}{again(rebuild)}")


def is_index(path: Path) -> bool:
    if stat.S_ISFIFO(path.stat().st_mode):  # opening it would wait for a writer
        return False
    with path.open("rb") as file:
        header = file.read(72)
    return header.startswith(b"SQLite format 3\0") and header[68:] == APPLICATION.to_bytes(4, "big")


def again(command: str) -> str:
    return f": build it with {command}" if command else ""
