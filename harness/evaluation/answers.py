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
    """The answers of one batch; the random numbers are those of a run's evaluation.

    Args:
        settings: `seed`, and those of `ask_once`.
    """
    group_size = 1 if batch.is_greedy else num_samples
    first, last = batch.rows[0] // group_size, batch.rows[-1] // group_size
    key = (settings.pop("seed"), EVALUATION)
    part = range(batch.rows.start - first * group_size, batch.rows.stop - first * group_size)
    asked = list(range(first, last + 1))
    return ask_once(policy, rows, task, asked, group_size, rows=part, key=key, greedy=batch.is_greedy, **settings)


class Completions:
    """completions.jsonl of an evaluation, up to the end of a batch.

    Args:
        path: of the file. What a kill has left behind the last complete batch is removed when the next one is added.
        batches: all of the evaluation.
    """

    def __init__(self, path: Path, batches: list[Batch], num_samples: int):
        self._path, self._batches, self._num_samples = path, batches, num_samples
        self.num_batches, self._size = self._find_end()

    @property
    def left(self) -> list[Batch]:
        """The batches that are not in the file yet."""
        return self._batches[self.num_batches :]

    def add(self, answers: list[Trajectory]) -> None:
        """Append the next batch."""
        numbers = self._batches[self.num_batches].numbers(self._num_samples)
        lines = [
            json.dumps(finite(_completion(row, question, sample)._asdict())) + "\n"
            for row, (question, sample) in zip(answers, numbers, strict=True)
        ]
        content = "".join(lines).encode()
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

    def _find_end(self) -> tuple[int, int]:
        """How many batches the file holds completely, and their bytes."""
        if not self._path.exists():
            return 0, 0
        num_batches = size = 0
        with self._path.open("rb") as file:
            for batch in self._batches:
                bytes_of_batch = 0
                for number in batch.numbers(self._num_samples):
                    line = file.readline()
                    if not _is_of(line, number):
                        return num_batches, size
                    bytes_of_batch += len(line)
                num_batches, size = num_batches + 1, size + bytes_of_batch
        return num_batches, size


def _is_of(line: bytes, number: tuple[int, int]) -> bool:
    """Whether a line is complete, and of this question and sample."""
    try:
        found = Completion(**json.loads(line)) if line.endswith(b"\n") else None
    except (ValueError, TypeError, RecursionError):
        return False
    return found is not None and (found.question, found.sample) == number


def _completion(row: Trajectory, question: int, sample: int) -> Completion:
    return Completion(
        question,
        sample,
        row.text,
        row.rewards,
        row.description,
        row.rewards["correct"],
        row.num_action_tokens,
        row.finish_reason,
    )
