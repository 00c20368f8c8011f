"""What is asked: a task with its rows, and how an answer to one of them is read."""

import hashlib
import json
from collections.abc import Callable

from common.errors import UserError

from harness.base.config import ModelConfig
from harness.base.hub import find_test_split, is_hub_source
from harness.base.terminal import say
from harness.data.data import filter_rows, load_rows, read_rows
from harness.data.rows import FieldsError, find_problem
from harness.data.task import Row, Task, import_named, task_of


def load_questions(config: ModelConfig, renamed: dict[str, str]) -> Task:
    """The task of an evaluation, with its questions as `eval_rows`; `renamed`: fields of the data by other names."""
    task = task_of(config.task)
    if "correct" not in task.weights:
        problem = f"has no reward component 'correct' (it has {', '.join(task.weights)})"
        raise UserError(
            f"{task} {problem}, and so no accuracy: add it to its REWARD_WEIGHTS, with weight 0 if you like"
        )
    source = config.data if config.data is not None else task.eval_data
    if source is None:
        raise UserError(f"{task} has no evaluation data of its own: give --data")
    if is_hub_source(source) and (test_split := find_test_split(source)) is not None:
        say(f"the questions are those of {test_split} (--data names another split)")
        source = test_split
    rows = _read_renamed(source, config, task, renamed) if renamed else load_rows(source, config, task)
    task.data, task.eval_rows = source, rows[: config.limit]
    task.try_out(task.eval_rows[0])
    answer_reader(task)(0, task.solution(task.eval_rows[0]) or "")  # so that a `vote` that fails does so now
    return task


def _read_renamed(source: str, config: ModelConfig, task: Task, renamed: dict[str, str]) -> list[Row]:
    rows = read_rows(source, {})
    for row in rows:
        for published, name in renamed.items():
            if published in row:
                row[name] = row.pop(published)
        if (problem := find_problem(row, task.fields)) is not None:
            raise FieldsError(row, problem)
    return filter_rows(rows, config, task, source)


def answer_reader(task: Task) -> Callable[[int, str], str | None]:
    """What a completion of a question answers, in one spelling: by the task's `vote`, else as the arithmetic task."""
    arithmetic = import_named("arithmetic")

    def read(question: int, text: str) -> str | None:
        if task.has_vote:
            return task.vote(task.eval_rows[question], text)
        given = arithmetic.given_answer(text)
        return None if given is None else arithmetic.normalize_answer(given)

    return read


def content_of(row: Row) -> str:
    """A checksum of what a row holds, which names it whatever file it is in."""
    text = json.dumps(row, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
