"""Rows that no completion could solve, found before training: each gold answer is tried as its own solution."""

import math
import time

from common.errors import UserError

from common.plumbing.rows import is_empty
from common.plumbing.task import Row, Task
from common.plumbing.task_file import suggest_task
from common.plumbing.terminal import printable, say

PATIENCE = 10  # seconds for all rows together


def try_solutions(task: Task, rows: list[Row], name: str) -> None:
    """Reward the solution of every row, for as long as `PATIENCE` lasts; does nothing for a task without `solution`.

    Args:
        name: what `--task` calls it.

    Raises:
        UserError: the solution of a row does not earn `correct` = 1, or, in a task without `correct`, no reward.
    """
    began = time.monotonic()
    for number, row in enumerate(rows):
        if time.monotonic() - began > PATIENCE:
            say(f"{task}: the solutions of {number} of {len(rows)} rows were tried in {PATIENCE} s, and are rewarded")
            return
        text = task.solution(row)
        if text is None:
            return
        rewards = task.reward(row, text)
        measure = "correct =" if "correct" in rewards else "a total reward of"
        earned = rewards["correct"] if "correct" in rewards else task.total_reward(rewards)
        is_earned = earned == 1 if "correct" in rewards else earned > 0
        if math.isfinite(earned) and not is_earned:  # others are a fault of the reward, which the run reports
            raise UserError(f"{row.place}: {_reason(task, row, text, f'{measure} {earned:g}', name)}")


def _reason(task: Task, row: Row, text: str, earned: str, name: str) -> str:
    if empty := [repr(field) for field in sorted({*task.fields, "answer"} & row.keys()) if is_empty(row[field])]:
        return f"the field {' and '.join(empty)} is empty, so that no completion can be right: remove the row"
    reason = f"no completion can be right, because the row's own solution {printable(repr(text), 80)} earns {earned}"
    if suggestion := suggest_task(row, name):
        return reason + suggestion
    hashes = " (of GSM8K's answers keep what follows ####)" if "####" in str(row.get("answer")) else ""
    form = f"the form that reward(row, text) of {task} compares with{hashes}"
    return f"{reason}: bring the row to {form}, or correct its solution(row)"
