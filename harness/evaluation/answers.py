"""Asking all questions, and keeping every completion so that a kill loses at most those of one batch.

Row by row, first the greedy answer of every question, then the n samples of the first question, of the second, and so
on. The rows are cut into batches of `--generation-batch-size`, which depend on the settings only, and completions.jsonl
grows by one batch at a time. A program that is started again keeps the complete batches and computes the others as it
would have done: same batches, same random numbers (keyed by seed, question and sample), same results.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common.evaluate import EVALUATION, ask_once
from common.policy import Policy
from common.trajectory import Trajectory

from harness.data.task import Task
from harness.logs.metrics import finite

GREEDY = -1  # the number of a question's greedy answer; its samples are 0, 1, 2, ...


class Completion(NamedTuple):
    """A line of completions.jsonl."""

    question: int  # the number of its row
    sample: int
    text: str
    rewards: dict[str, float]
    description: dict[str, float]
    correct: float
    length: int  # tokens, including that which ends the turn
    finish_reason: str  # "stop", or "length": cut off


class Batch(NamedTuple):
    """Rows that are sampled at the same time."""

    is_greedy: bool
    rows: range  # row question * group size + sample

    def numbers(self, num_samples: int) -> Iterator[tuple[int, int]]:
        """Question and sample of every row."""
        for row in self.rows:
            yield (row, GREEDY) if self.is_greedy else divmod(row, num_samples)


def make_batches(num_questions: int, num_samples: int, size: int) -> list[Batch]:
    """
    >>> [(batch.is_greedy, list(batch.numbers(2))) for batch in make_batches(2, 2, size=3)]
    [(True, [(0, -1), (1, -1)]), (False, [(0, 0), (0, 1), (1, 0)]), (False, [(1, 1)])]
    """
    parts = ((True, num_questions), (False, num_questions * num_samples))
    return [
        Batch(is_greedy, range(start, min(start + size, count)))
        for is_greedy, count in parts
        for start in range(0, count, size)
    ]


def ask(policy: Policy, rows: list[dict], task: Task, batch: Batch, num_samples: int, **settings) -> list[Trajectory]:
    """The answers of one batch, with `seed` and the settings of `ask_once`; random numbers as in a run's evaluation."""
    group_size = 1 if batch.is_greedy else num_samples
    first, last = batch.rows[0] // group_size, batch.rows[-1] // group_size
    key = (settings.pop("seed"), EVALUATION)
    part = range(batch.rows.start - first * group_size, batch.rows.stop - first * group_size)
    asked = list(range(first, last + 1))
    return ask_once(policy, rows, task, asked, group_size, rows=part, key=key, greedy=batch.is_greedy, **settings)


class Completions:
    """completions.jsonl of an evaluation, up to the last complete one of all its batches.

    What a kill has left behind that is removed when the next one is added.
    """

    def __init__(self, path: Path, batches: list[Batch], num_samples: int):
        self._path, self._batches, self._num_samples = path, batches, num_samples
        self.num_batches = self._size = 0  # complete batches, and their bytes
        if path.exists():
            with path.open("rb") as file:
                for batch in batches:
                    lines = [file.readline() for _ in batch.rows]
                    if not lines[-1].endswith(b"\n"):
                        break
                    self.num_batches += 1
                    self._size += sum(map(len, lines))

    @property
    def left(self) -> list[Batch]:
        """The batches that are not in the file yet."""
        return self._batches[self.num_batches :]

    def add(self, answers: list[Trajectory]) -> None:
        """Append the next batch."""
        numbers = self._batches[self.num_batches].numbers(self._num_samples)
        content = b""
        for row, number in zip(answers, numbers, strict=True):
            measured = (row.rewards, row.description, row.rewards["correct"])
            line = Completion(*number, row.text, *measured, row.num_action_tokens, row.finish_reason)
            content += json.dumps(finite(line._asdict())).encode() + b"\n"
        with self._path.open("ab") as file:
            file.truncate(self._size)
            file.seek(0, os.SEEK_END)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._size += len(content)
        self.num_batches += 1

    def __iter__(self) -> Iterator[Completion]:
        """Those of complete batches, one after the other from the file."""
        count = sum(len(batch.rows) for batch in self._batches[: self.num_batches])
        if count:
            with self._path.open("rb") as file:
                for _, line in zip(range(count), file, strict=False):
                    yield Completion(**json.loads(line))
