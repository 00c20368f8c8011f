"""Turns completions into rewards: the components of the task's file, of judges, and of `--reward-functions`."""

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.errors import UserError
from common.parallel import call_once, gather, gather_rows, own_part
from common.trajectory import Trajectory

from harness.base.checks import parse_numbers
from harness.base.terminal import say
from harness.data.rows import Row
from harness.task.task_file import TaskError, TaskFile, tell

if TYPE_CHECKING:  # most runs have none
    from harness.task.answer_judge import Judge
    from harness.task.reward_functions import RewardFunctions


class Scorer:
    """The reward components of completions, and their weights.

    `given` are NAME=NUMBER, as in `--reward-weight`; `more_weights` belong to components that the experiment adds, or
    to `correct`, whose weight it can change.
    `functions` are asked with `system_prompt`; their components have the weight 1 unless it is given.
    """

    def __init__(
        self,
        file: TaskFile,
        given: tuple[str, ...] = (),
        more_weights: dict[str, float] | None = None,
        judges: "Sequence[Judge]" = (),
        functions: "RewardFunctions | None" = None,
        system_prompt: str = "",
    ):
        self.file, self.judges, self.functions, self._system_prompt = file, judges, functions, system_prompt
        names = [] if functions is None else functions.names
        judged = {name: weight for judge in judges for name, weight in judge.weights.items()}
        if taken := {"total", *judged, *(more_weights or {})} & set(names):
            raise UserError(f"--reward-functions: the name {min(taken)!r} is taken: give the function another one")
        if taken := {"total", *file.weights, *(more_weights or {})} & judged.keys():
            raise UserError(f"--judge: the name {min(taken)!r} is taken: give the question another one")
        added = (more_weights or {}) | dict.fromkeys(names, 1.0) | judged
        if taken := file.weights.keys() & {"total", *added} - {"correct"}:
            raise UserError(f"{file}: the name {min(taken)!r} is taken: give the reward component another one")
        self.weights = file.weights | added  # those in use
        for component, weight in parse_numbers("--reward-weight", given).items():
            if component not in self.weights:
                raise UserError(f"--reward-weight {component}: {file} has the components {', '.join(self.weights)}")
            self.weights[component] = weight
        # Of the components with a weight, without those that the experiment adds
        self.paid = [name for name in (*file.weights, *judged, *names) if self.weights.get(name)]
        self.fault: TaskError | None = None  # the first number that is not finite
        self._has_unpaid = False  # whether a completion had no reward with a weight, which is said once

    def reward(self, row: dict, text: str) -> dict[str, float]:
        """The components of the task's file; tells the user of the first paid one that is not finite."""
        rewards = self.file.reward(row, text)
        for component, value in rewards.items():
            if self.weights[component] and not math.isfinite(value) and self.fault is None:
                problem = f"gives {component!r} the value {value}"  # the run counts the updates that it skips
                self.fault = self.file.error("reward", row, problem)
                tell(self.file.error("reward", row, f"{problem}; an update with it is skipped"))
        return rewards

    def total_reward(self, rewards: dict[str, float]) -> float:
        """The weighted sum of a completion's reward components."""
        return sum(weight * rewards.get(component, 0.0) for component, weight in self.weights.items() if weight)

    def try_out(self, row: dict) -> None:
        """Reward and describe an empty completion, or play a turn, so that a task that cannot work is refused early."""
        if self.file.is_environment:
            self.file.try_play(row)
            return
        self.reward(row, "")
        self.file.describe(row, "")
        self.fault = None

    def reward_all(self, rows: list[Row], texts: list[str], completions: list[Trajectory]) -> list[dict[str, float]]:
        """All reward components of each completion, in order: the task's own, and those of `reward_together`."""
        self.file.prepare(rows, texts)  # lets slow judging run in parallel; most tasks do nothing here
        own = [self.reward(row, text) for row, text in zip(rows, texts, strict=True)]
        together = self.reward_together(rows, texts, completions)
        found = [rewards | more for rewards, more in zip(own, together, strict=True)]
        unpaid = [row for row, rewards in zip(rows, found, strict=True) if not any(map(self.weights.get, rewards))]
        if self.functions is not None and unpaid and not self._has_unpaid:
            self._has_unpaid = True
            say(
                f"{self.file}: every reward of {unpaid[0].place} that has a weight is None, and counts as 0", sys.stderr
            )
        return found

    def reward_together(
        self, rows: list[Row], texts: list[str], completions: list[Trajectory]
    ) -> list[dict[str, float]]:
        """The components of the judges and of `--reward-functions`, which get all completions at once, in order.

        The functions see what the policy was asked; the judges see no system turn, which is meant for the policy. A
        component that does not apply to a completion is left out.
        """
        rewards: list[dict[str, float]] = [{} for _ in rows]
        asked = list(map(self.file.messages, rows)) if self.judges else []
        for judge in self.judges:
            scores = call_once(lambda judge=judge: judge.score(asked, texts) if rows else [])
            rewards = [one | other for one, other in zip(rewards, scores, strict=True)]
        if self.functions is not None:
            found = self._call_functions(rows, texts, completions)
            rewards = [one | other for one, other in zip(rewards, found, strict=True)]
        return rewards

    def _call_functions(self, rows: list[Row], texts: list[str], completions: list[Trajectory]) -> list[dict]:
        """The values of the reward functions; if a group is divided among ranks, they get the groups of all ranks."""
        given = list(zip(rows, texts, [completion.completion_ids for completion in completions], strict=True))
        is_divided = any(gather(bool(completions) and completions[0].completion_index > 0))
        given = gather_rows(given) if is_divided else given

        def call() -> list[tuple[dict[str, float], dict[str, object]]]:
            if not given:
                return []
            asked, said, ids = map(list, zip(*given, strict=True))
            return self.functions.score(self.asked(asked), asked, said, ids)

        found = call_once(call, for_all=is_divided)
        own = own_part(found) if is_divided else found
        for completion, (_, logged) in zip(completions, own, strict=True):
            completion.logged = logged
        return [values for values, _ in own]

    def asked(self, rows: list[Row]) -> list[list[dict]]:
        """The prompts of some rows as the reward functions see them."""
        return [self.file.messages(row, self._system_prompt) for row in rows]
