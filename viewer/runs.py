"""Read a run's directory as it is: complete, still going on, killed, or written by an older version.

Anything in it can be missing; a line that cannot be read is counted and left out.
"""

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

_STEP = re.compile(rb'\{"step": ?(\d+)[,}]')  # how a line begins


class RunError(Exception):
    """A mistake that the user can correct; the user sees a single sentence, without a traceback."""


def printable(text: object) -> str:
    """The text without characters that control a terminal or are no text: a directory's name can hold anything."""
    return "".join(character if character.isprintable() else "\ufffd" for character in str(text))


def number(value: object) -> int | float | None:
    """`value` if it is a number that is finite and not absurd, else None.

    >>> [number(value) for value in (1, 0.5, float("nan"), 10**400, True, "1")]
    [1, 0.5, None, None, None, None]
    """
    return value if type(value) in (int, float) and -1e300 < value < 1e300 else None


def ranges(steps: Iterable[int]) -> list[list[int]]:
    """Steps as ranges, from first to last.

    >>> ranges([1, 2, 3, 7])
    [[1, 3], [7, 7]]
    """
    found: list[list[int]] = []
    for step in sorted(set(steps)):
        if found and step == found[-1][1] + 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    return found


def rolling_means(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and the values before it, at most `window` together."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(window, i + 1) for i in range(len(values))]


def parse(line: bytes) -> dict | None:
    """A JSON object, or None for anything else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def step_of(row: dict) -> int | None:
    step = row.get("step")
    return step if type(step) is int else None


def kinds_of_questions(rows: Iterable[dict]) -> list[str]:
    """The names that describe questions, not answers: their shares are the same in all evaluations, greedy and sampled.

    >>> evaluation = {"eval/greedy/one_hop": 0.3, "eval/sampled/one_hop": 0.3, "eval/greedy/accuracy_one_hop": 0.9}
    >>> kinds_of_questions([evaluation | {"eval/greedy/called": 0.3, "eval/sampled/called": 0.4}])
    ['one_hop']
    """
    found: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("eval/") and number(value) is not None:
                found.setdefault(key.rpartition("/")[2], []).append(value)
    same = [name for name, shares in found.items() if len(shares) > 1 and min(shares) == max(shares)]
    return [name for name in same if 0 < found[name][0] < 1 and f"accuracy_{name}" in found]


class Rows:
    """The lines of a JSONL file as objects; none if there is no such file."""

    def __init__(self, path: Path):
        lines = path.read_bytes().splitlines() if path.exists() else []
        self.rows = [row for row in map(parse, lines) if row is not None]


class StepIndex:
    """Where the lines of each step are in samples.jsonl, which can have hundreds of megabytes."""

    def __init__(self, path: Path):
        self._path = path
        self._places: dict[int, list[tuple[int, int]]] = {}  # by step: where each line begins, and its length
        self.size = self.damaged = 0  # bytes; lines that cannot be read
        self.is_cut_off = False  # whether the last line is not complete: it is being written, or a kill has left it
        if path.exists():
            with path.open("rb") as file:
                for line in file:
                    self._add(line)

    def _add(self, line: bytes) -> None:
        self.is_cut_off = not line.endswith(b"\n") and parse(line) is None
        if self.is_cut_off:
            return
        match = _STEP.match(line)
        step = int(match[1]) if match else step_of(parse(line) or {})
        if step is not None:
            self._places.setdefault(step, []).append((self.size, len(line)))
        elif line.strip():
            self.damaged += 1
        self.size += len(line)

    @property
    def steps(self) -> list[int]:
        return sorted(self._places)

    def num_rows(self, step: int) -> int:
        return len(self._places[step])

    def num_bytes(self, step: int) -> int:
        return sum(length for _, length in self._places[step])

    def read(self, step: int) -> list[dict]:
        """The rows of a step that can be read; none if there is no such step."""
        rows = []
        for start, length in self._places.get(step, ()):
            with self._path.open("rb") as file:
                file.seek(start)
                rows.append(parse(file.read(length)))
        return [row for row in rows if row is not None and step_of(row) == step]


class Run:
    """The content of a run's directory."""

    def __init__(self, directory: Path):
        try:
            self.directory = Path(directory).resolve(strict=True)
            names = {path.name for path in self.directory.iterdir()}
            self.config, self.summary = self._read("config.json") or {}, self._read("summary.json")
            self._read_lines()
        except NotADirectoryError:
            raise RunError(f"{directory} is a file, not the directory of a run") from None
        except FileNotFoundError:
            raise RunError(f"there is no directory {directory}") from None
        except OSError as error:
            raise RunError(f"{error.filename or directory} cannot be read: {error.strerror}") from None
        if not names & {"config.json", "metrics.jsonl", "samples.jsonl"}:
            inside = sorted(path.parent.name for path in self.directory.glob("*/config.json"))
            hint = f"; did you mean {directory}/{inside[0]}?" if inside else ""
            raise RunError(f"{directory} is no run's directory: it has neither config.json nor metrics.jsonl{hint}")
        self.is_finished = "summary.json" in names

    def _read(self, name: str) -> dict | None:
        path = self.directory / name
        return parse(path.read_bytes()) if path.exists() else None

    def _read_lines(self) -> None:
        self.token_texts, self.metrics = Rows(self.directory / "tokens.jsonl"), Rows(self.directory / "metrics.jsonl")
        self.diagnosis = Rows(self.directory / "diagnosis.jsonl")

    @cached_property
    def samples(self) -> StepIndex:
        return StepIndex(self.directory / "samples.jsonl")
