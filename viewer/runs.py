"""Read a run's directory as it is: complete, still growing, killed, damaged, or written by an older version.

Whatever can be missing is missing here, too; a line that cannot be read is counted and left out. No file outside the
directory is read, also not through a link inside it.
"""

from collections.abc import Iterable
from pathlib import Path

from viewer.growing import Rows, StepIndex, find_file, parse


class RunError(Exception):
    """Something that the user can correct; shown as one sentence, without a traceback."""


def printable(text: object) -> str:
    """Without what could control a terminal or is no text: a directory's name can hold anything."""
    return "".join(character if character.isprintable() else "\ufffd" for character in str(text))


def number(value: object) -> int | float | None:
    """`value` if it is a number that is finite and not absurd, else None.

    >>> [number(value) for value in (1, 0.5, float("nan"), 10**400, True, "1")]
    [1, 0.5, None, None, None, None]
    """
    return value if type(value) in (int, float) and -1e300 < value < 1e300 else None


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
            inside = sorted(path.parent.name for path in self.directory.glob("*/config.json"))
            hint = f"; did you mean {directory}/{inside[0]}?" if inside else ""
            raise RunError(f"{directory} is no run's directory: it has neither config.json nor metrics.jsonl{hint}")
        self._open_files()

    def _open_files(self) -> None:
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
            for file in (self.samples, self.tokens, self.metrics, self.diagnosis):  # what is written last comes first:
                file.update()  # the metrics of every step that has samples are there
        except OSError as error:
            raise RunError(f"{error.filename or self.directory} cannot be read: {error.strerror}") from None

    def _read(self, name: str) -> dict | None:
        path = find_file(self.directory, name)
        return None if path is None else parse(path.read_bytes())
