"""How far make_questions.py has come: complete lines in the output, and beside it a small file that says how far.

`my_questions.jsonl.progress.json` exists as long as `my_questions.jsonl` is not finished. After a kill, what the output
holds beyond the number of bytes that it names is made again.
"""

import json
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from common.errors import UserError

from common.plumbing.checks import flag, local_path
from common.plumbing.config import shown
from common.plumbing.files import crc32, flush_to_disk, replace_file
from common.plumbing.terminal import printable


@dataclass
class State:
    """What the progress file holds."""

    settings: dict
    num_asked: int = 0  # units that need not be asked about again
    num_rows: int = 0
    num_bytes: int = 0  # of the output, with a checksum
    crc32: int = 0
    discarded: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)


class Progress:
    def __init__(self, output: Path, state: State):
        self._output, self._state = output, state

    @property
    def num_asked(self) -> int:
        return self._state.num_asked

    @property
    def num_rows(self) -> int:
        return self._state.num_rows

    @property
    def discarded(self) -> Counter[str]:
        return Counter(self._state.discarded)

    @property
    def kinds(self) -> Counter[str]:
        return Counter(self._state.kinds)

    def rows(self) -> Iterator[dict]:
        """All questions that have been made."""
        with self._output.open(encoding="utf-8") as file:
            yield from map(json.loads, file)

    def add(self, rows: list[dict], num_asked: int, discarded: Counter[str], kinds: Counter[str]) -> None:
        """Write rows, and that `num_asked` more units have been asked about: both, or after a kill none."""
        state = self._state
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        if content:
            with self._output.open("ab") as file:
                file.write(content)
            flush_to_disk(self._output)
        state.num_asked += num_asked
        state.num_rows += len(rows)
        state.num_bytes += len(content)
        state.crc32 = zlib.crc32(content, state.crc32)
        state.discarded, state.kinds = dict(self.discarded + discarded), dict(self.kinds + kinds)
        self.write()

    def write(self) -> None:
        replace_file(progress_file(self._output), json.dumps(asdict(self._state), indent=1).encode())

    def finish(self) -> None:
        progress_file(self._output).unlink()

    def abandon(self) -> None:
        """Leave nothing, as there is nothing to leave."""
        self._output.unlink()
        self.finish()


def progress_file(output: Path) -> Path:
    return output.with_name(output.name + ".progress.json")


@contextmanager
def open_progress(output: Path, settings: dict) -> Iterator[Progress]:
    """A new output, or one that was begun with the same settings; nobody else writes it within the block.

    Raises:
        UserError: there is a finished output, or one of other settings, or another process writes it, or it cannot be
            written.
    """
    local_path(str(output), "--output")
    if output.exists() and not output.is_file():
        raise UserError(f"--output {shown(output)} is {'a directory' if output.is_dir() else 'no file'}")
    if not output.parent.is_dir():
        raise UserError(f"--output {shown(output)} cannot be made: there is no directory {shown(output.parent)}")
    lock = FileLock(output.with_name(output.name + ".lock"), blocking=False)
    try:
        lock.acquire()
        try:
            yield _open(output, json.loads(json.dumps(settings)))
        finally:
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()
    except Timeout:
        raise UserError(f"--output {shown(output)} is in use: another process is making these questions") from None
    except OSError as error:
        raise UserError(f"--output {shown(output)} cannot be written ({error.strerror})") from error


def _open(output: Path, settings: dict) -> Progress:
    path = progress_file(output)
    if not path.exists():
        if output.exists():
            raise UserError(f"--output {shown(output)} exists already: choose another name, or remove it")
        progress = Progress(output, State(settings))
        progress.write()  # before the output, which alone would be a finished one
        output.touch()
        return progress
    anew = f"or remove it and {shown(path)} to begin anew"
    try:
        state = State(**json.loads(path.read_bytes()))
        differing = [name for name in settings if state.settings.get(name) != settings[name]]
        before = {name: state.settings.get(name) for name in differing}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{shown(path)} is damaged: remove it and {shown(output)} to begin anew") from None
    if differing:
        name = differing[0]
        what = f"the {name}" if name.startswith("content") else flag(name)
        then, now = (printable(str(value), 60) for value in (before[name], settings[name]))
        raise UserError(
            f"{what} was {then} when {shown(output)} was begun, and is {now} now: give the same to go on, {anew}"
        )
    if state.num_bytes and (not output.exists() or crc32(output, state.num_bytes) != state.crc32):
        raise UserError(f"{shown(output)} has been changed since it was begun: restore it, {anew}")
    with output.open("ab") as file:
        file.truncate(state.num_bytes)  # what was written just before a kill
    return Progress(output, state)


def listed(counts: Counter[str]) -> str:
    """
    >>> listed(Counter(cloze=3, term=40))
    'term 40, cloze 3'
    """
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
