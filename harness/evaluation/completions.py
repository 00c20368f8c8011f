"""Asking all questions, and saving every completion so that a kill loses at most one batch.

The order: first the greedy answer of every question, then the n samples of the first question, of the second, and so
on. They are cut into batches of `--generation-batch-size`, which depend only on the settings, and completions.jsonl
grows by one batch at a time. A restarted program keeps the complete batches and computes the others as it would have
done before: same batches, same random numbers (keyed by seed, question and sample), same results.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from common.evaluate import EVALUATION, ask_once
from common.policy import Policy
from common.trajectory import Trajectory

from harness.base.config import ModelConfig
from harness.base.files import finite
from harness.evaluation.figures import GREEDY
from harness.task.task import Task

Batch = list[tuple[int, int]]  # question and sample of each completion; all are sampled at the same time


def make_batches(num_questions: int, num_samples: int, size: int) -> list[Batch]:
    """
    >>> make_batches(2, 2, size=3)
    [[(0, -1), (1, -1)], [(0, 0), (0, 1), (1, 0)], [(1, 1)]]
    """
    greedy = [(question, GREEDY) for question in range(num_questions)]
    sampled = [(question, sample) for question in range(num_questions) for sample in range(num_samples)]
    return [part[start : start + size] for part in (greedy, sampled) for start in range(0, len(part), size)]


def ask(policy: Policy, task: Task, batch: Batch, config: ModelConfig) -> list[Trajectory]:
    """The answers of one batch, with random numbers as in a run's evaluation."""
    (first, sample), (last, _) = batch[0], batch[-1]
    start = max(0, sample)
    return ask_once(
        policy,
        task.eval_rows,
        task,
        list(range(first, last + 1)),
        1 if sample == GREEDY else config.num_samples,
        rows=range(start, start + len(batch)),
        key=(config.seed, EVALUATION),
        greedy=sample == GREEDY,
        system_prompt=config.system_prompt,
        max_new_tokens=config.max_new_tokens,
        top_p=config.top_p,
    )


class Completions:
    """The completions.jsonl of an evaluation, up to the last complete batch.

    An incomplete batch that a kill left behind is removed when the next one is added.
    """

    def __init__(self, path: Path, batches: list[Batch]):
        self._path, self._batches = path, batches
        self.num_batches = self._size = 0  # complete batches, and their bytes
        if path.exists():
            with path.open("rb") as file:
                for batch in batches:
                    lines = [file.readline() for _ in batch]
                    if not lines[-1].endswith(b"\n"):
                        break
                    self.num_batches += 1
                    self._size += sum(map(len, lines))

    @property
    def left(self) -> list[Batch]:
        """The batches that are not yet in the file."""
        return self._batches[self.num_batches :]

    def add(self, answers: list[Trajectory]) -> None:
        """Append the next batch."""
        content = b""
        for (question, sample), row in zip(self._batches[self.num_batches], answers, strict=True):
            line = {
                "question": question,  # the number of its row
                "sample": sample,
                "text": row.text,
                "rewards": row.rewards,
                "description": row.description,
                "correct": row.rewards.get("correct"),
                "length": row.num_action_tokens,  # including the token that ends the turn
                "finish_reason": row.finish_reason,  # "stop", or "length": cut off
            }
            content += json.dumps(finite(line)).encode() + b"\n"
        with self._path.open("ab") as file:
            file.truncate(self._size)
            file.seek(0, os.SEEK_END)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._size += len(content)
        self.num_batches += 1

    def __iter__(self) -> Iterator[dict]:
        """The lines of complete batches, one by one from the file."""
        count = sum(map(len, self._batches[: self.num_batches]))
        if count:
            with self._path.open("rb") as file:
                for _, line in zip(range(count), file, strict=False):
                    yield json.loads(line)
