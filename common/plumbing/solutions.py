"""Rows that no completion could solve, found before training: each gold answer is tried as its own solution."""

import math
import time

from common.errors import UserError

from common.plumbing.task import Row, Task
from common.plumbing.terminal import printable, say

PATIENCE = 10  # seconds for all rows together


def try_solutions(task: Task, rows: list[Row]) -> None:
    """Reward the solution of every row, for as long as `PATIENCE` lasts; does nothing for a task without `solution`.

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
            raise UserError(
                f"{row.place}: no completion can be right, because the row's own solution {printable(repr(text), 80)} "
                f"earns {measure} {earned:g}: {_advice(task, row)}"
            )


def _advice(task: Task, row: Row) -> str:
    if "####" in str(row.get("answer")) and str(task) != "--task gsm8k":  # the task that reads such answers
        return "the answers look like GSM8K's, for which use --task gsm8k, or keep only what follows ####"
    return f"bring the row to the form that reward(row, text) of {task} compares with, or correct its solution(row)"
