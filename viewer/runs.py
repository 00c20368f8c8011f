"""Read a run's directory as it is: complete, still growing, killed, damaged, or written by an older version.

Whatever can be missing is missing here, too; a line that cannot be read is counted and left out. No file outside the
directory is read, also not through a link inside it.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

LONGEST_LINE = 1 << 25  # bytes; what is longer is no line of a run, and would take a lot of memory
_STEP = re.compile(rb'\{"step": ?(\d{1,15})[,}]')  # how a line begins; 15 digits are exact in JavaScript, too


class RunError(Exception):
    """Something that the user can correct; shown as one sentence, without a traceback."""


def parse(line: bytes) -> dict | None:
    """A JSON object, or None for anything else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def number(value: object) -> int | float | None:
    """`value` if it is a number that is finite and not absurd, else None.

    >>> [number(value) for value in (1, 0.5, float("nan"), 10**400, True, "1")]
    [1, 0.5, None, None, None, None]
    """
    return value if type(value) in (int, float) and -1e300 < value < 1e300 else None


def step_of(row: dict) -> int | None:
    """The step of a line: a natural number of at most 15 digits."""
    step = row.get("step")
    return step if type(step) is int and 0 <= step < 10**15 else None


def clean(value: object, depth: int = 20) -> object:
    """`value` with None instead of every number in it that is not finite, and of what is nested more deeply."""
    if depth == 0:
        return None
    if isinstance(value, dict):
        return {name: clean(entry, depth - 1) for name, entry in value.items()}
    if isinstance(value, list):
        return [clean(entry, depth - 1) for entry in value]
    return number(value) if type(value) in (int, float) else value


def ranges(steps: Iterable[int], among: Iterable[int] | None = None) -> list[list[int]]:
    """Steps as ranges, from first to last; steps that are neighbours `among` those given are in one range.

    >>> ranges([1, 2, 3, 7])
    [[1, 3], [7, 7]]
    >>> ranges([2, 4, 8], among=[2, 4, 6, 8])
    [[2, 4], [8, 8]]
    """
    place = {step: number for number, step in enumerate(sorted(among))} if among is not None else {}
    found: list[list[int]] = []
    before = None
    for step in sorted(set(steps)):
        here = place.get(step, step)
        if found and here == before + 1:
            found[-1][1] = step
        else:
            found.append([step, step])
        before = here
    return found


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

    @property
    def path(self) -> Path | None:
        """None if there is no such file in the directory."""
        return find_file(self._directory, self._name)

    def update(self) -> None:
        if self.path is None:
            self._restart()
            return
        with self.path.open("rb") as file:
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
                self._tail = (line or b"")[-64:]

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
        if self.path is None:
            return []
        rows = []
        with self.path.open("rb") as file:
            for start, end, _ in self._places.get(step, ()):
                file.seek(start)
                rows += [parse(line) for line in file.read(end - start).split(b"\n") if line.strip()]
        return [row for row in rows if row is not None and step_of(row) == step]


class Run:
    """What a run's directory holds.

    Raises:
        RunError: there is no such directory, or it is not a run's.
    """

    def __init__(self, directory: Path):
        try:
            self.directory = Path(directory).resolve(strict=True)
            names = {path.name for path in self.directory.iterdir()}
        except NotADirectoryError:
            raise RunError(f"{directory} is a file, not the directory of a run") from None
        except FileNotFoundError:
            raise RunError(f"there is no directory {directory}") from None
        except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a null byte, no permission
            raise RunError(f"{directory} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if not names & {"config.json", "metrics.jsonl", "samples.jsonl"}:
            hint = next(
                (f"; did you mean {directory}/{path.parent.name}?" for path in self.directory.glob("*/config.json")), ""
            )
            raise RunError(f"{directory} is no run's directory: it has neither config.json nor metrics.jsonl{hint}")
        self.metrics, self.diagnosis = Rows(self.directory, "metrics.jsonl"), Rows(self.directory, "diagnosis.jsonl")
        self.tokens, self.samples = Rows(self.directory, "tokens.jsonl"), StepIndex(self.directory, "samples.jsonl")

    def update(self) -> None:
        """Read what has been written since the last time.

        Raises:
            RunError: a file cannot be read.
        """
        try:
            self.config = self._read("config.json") or {}
            self.summary = self._read("summary.json")
            self.is_finished = find_file(self.directory, "summary.json") is not None
            for file in (self.metrics, self.diagnosis, self.tokens, self.samples):
                file.update()
        except OSError as error:
            raise RunError(f"{error.filename or self.directory} cannot be read: {error.strerror}") from None

    def _read(self, name: str) -> dict | None:
        path = find_file(self.directory, name)
        return None if path is None else parse(path.read_bytes())


def find_file(directory: Path, name: str) -> Path | None:
    """A file in the directory, or None: there is none, or it is a link to another place, or no plain file."""
    path = directory / name
    try:
        resolved = path.resolve(strict=True)
        return path if resolved.is_relative_to(directory) and resolved.is_file() else None
    except (OSError, RuntimeError):
        return None
