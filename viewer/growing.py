"""Files of lines that grow while they are read: what was read once is not read again."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

LONGEST_LINE = 1 << 25  # bytes; what is longer is no line of a run, and would take a lot of memory
_STEP = re.compile(rb'\{"step": ?(\d{1,15})[,}]')  # how a line begins; 15 digits are exact in JavaScript, too


def parse(line: bytes) -> dict | None:
    """A JSON object, or None for anything else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def step_of(row: dict) -> int | None:
    """The step of a line: a natural number of at most 15 digits."""
    step = row.get("step")
    return step if type(step) is int and 0 <= step < 10**15 else None


def find_file(directory: Path, name: str) -> Path | None:
    """A file in the directory, or None: there is none, or it is a link to another place, or no plain file."""
    path = directory / name
    try:
        resolved = path.resolve(strict=True)
        return path if resolved.is_relative_to(directory) and resolved.is_file() else None
    except (OSError, RuntimeError):
        return None


class GrowingFile:
    """A file of lines that is read as far as it is written; the next `update` reads only what is new.

    A subclass says what a line gives, in `take`, and forgets it in `clear`: the file has been truncated or replaced.
    """

    def __init__(self, directory: Path, name: str):
        self._directory, self._name = directory, name
        self._restart()

    def clear(self) -> None:
        raise NotImplementedError

    def take(self, offset: int, line: bytes) -> bool:
        """Take a complete line that begins at `offset`; whether it could be read."""
        raise NotImplementedError

    def open_bytes(self) -> BinaryIO | None:
        """None if there is no such file in the directory; it can go while it is looked for."""
        path = find_file(self._directory, self._name)
        try:
            return None if path is None else path.open("rb")
        except FileNotFoundError:
            return None

    def update(self) -> None:
        file = self.open_bytes()
        if file is None:
            self._restart()
            return
        with file:
            if not self._continues(file):
                self._restart()
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self.size)
            for line, length, is_complete in _lines(file):
                self.torn = not is_complete and (line is None or parse(line) is None)
                if self.torn:  # still being written, or the end that a kill has left
                    return
                if line is None or (line.strip() and not self.take(self.size, line)):
                    self.damaged += 1
                self.size += length
                self._tail = line or b""  # all of it: with its step, it differs from every other

    def _continues(self, file: BinaryIO) -> bool:
        """Whether the file still begins with what has been read."""
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self.size:
            return False
        file.seek(self.size - len(self._tail))
        return file.read(len(self._tail)) == self._tail

    def _restart(self) -> None:
        self._inode, self._tail = None, b""
        self.size = self.damaged = 0  # bytes that were read; lines in them that could not be
        self.torn = False  # whether an incomplete line follows
        self.clear()


def _lines(file: BinaryIO) -> Iterator[tuple[bytes | None, int, bool]]:
    """Each line, None if it is too long, with its length in bytes, and whether it ends with a line break."""
    while line := file.readline(LONGEST_LINE):
        length, end = len(line), line
        while not end.endswith(b"\n") and (end_of_more := file.readline(LONGEST_LINE)):
            line, length, end = None, length + len(end_of_more), end_of_more
        yield line, length, end.endswith(b"\n")


class Rows(GrowingFile):
    """All lines of a JSONL file as objects."""

    def clear(self) -> None:
        self.rows: list[dict] = []

    def take(self, offset: int, line: bytes) -> bool:
        row = parse(line)
        if row is not None:
            self.rows.append(row)
        return row is not None


class StepIndex(GrowingFile):
    """Where the lines of each step are in samples.jsonl, which can have hundreds of megabytes."""

    def clear(self) -> None:
        self._places: dict[int, list[list[int]]] = {}  # by step: first byte, byte after the last one, number of lines

    def take(self, offset: int, line: bytes) -> bool:
        match = _STEP.match(line)
        step = int(match[1]) if match else step_of(parse(line) or {})
        if step is None:
            return False
        places, end = self._places.setdefault(step, []), offset + len(line)
        if places and places[-1][1] == offset:
            places[-1][1:] = end, places[-1][2] + 1
        else:
            places.append([offset, end, 1])
        return True

    @property
    def steps(self) -> list[int]:
        return sorted(self._places)

    def num_rows(self, step: int) -> int:
        return sum(place[2] for place in self._places[step])

    def num_bytes(self, step: int) -> int:
        return sum(place[1] - place[0] for place in self._places[step])

    def read(self, step: int) -> list[dict]:
        """The rows of a step that can be read; none if there is no such step."""
        file, rows = self.open_bytes(), []
        if file is None:
            return rows
        with file:
            for start, end, _ in self._places.get(step, ()):
                file.seek(start)
                rows += [parse(line) for line in file.read(end - start).split(b"\n") if line.strip()]
        return [row for row in rows if row is not None and step_of(row) == step]
