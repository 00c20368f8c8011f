"""The record of one row: which tokens were fed, which were sampled, and the rewards.

*The completion* is the tokens that the policy has sampled, in one turn or several. The tools' answers in between are in
the row but belong to no completion: no length, budget, reward, loss or denominator counts them.
"""

import math
from dataclasses import dataclass, field

from common.episode import Episode


@dataclass
class Trajectory:
    """One completion of one prompt, as ragged lists. Training uses exactly the ids that were sampled.

    `action_mask` and `sampler_log_probs` have one entry for every id and are written where the token is made: 1 and its
    log-probability on exactly the tokens that the policy sampled, including its end-of-turn token; 0 on the prompt, on
    tools' answers, and on the template's text around them.

    >>> row = Trajectory([5, 6, 7, 2], 2, action_mask=[0, 0, 1, 1], sampler_log_probs=[0.0, 0.0, -0.7, -0.1])
    >>> row.observe([3, 9])
    >>> row.ids, row.completion_ids, row.num_action_tokens
    ([5, 6, 7, 2, 3, 9], [7, 2], 2)
    """

    ids: list[int]
    prompt_length: int
    action_mask: list[int]
    sampler_log_probs: list[float]  # nats, under softmax(logits / temperature), before top-p
    prompt_index: int = 0  # the prompt's row in its data file
    completion_index: int = 0  # 0..G-1 within the group
    # "stop": ended with an end-of-turn token or a stop text; "length": cut off by the budget; "given": by a file, and
    # not sampled
    finish_reason: str = "length"
    text: str = ""  # the completion as text, for rewards and for people
    question: str | None = None  # for people; None: the question of the task's row
    turns: list[tuple[str, str]] = field(default_factory=list)  # (role, text) after the prompt, if there are several
    rewards: dict[str, float] = field(default_factory=dict)  # by component, unweighted
    # More measurements, which are only logged: a float of 0 or 1 answers a yes-or-no question, an int counts
    description: dict[str, float] = field(default_factory=dict)
    logged: dict[str, object] = field(default_factory=dict)  # what reward functions have logged about it, by name
    episode: Episode | None = None  # in an environment with a state

    @property
    def completion_ids(self) -> list[int]:
        return [i for i, is_action in zip(self.ids, self.action_mask, strict=True) if is_action]

    @property
    def num_action_tokens(self) -> int:
        return sum(self.action_mask)

    @property
    def newest_turn(self) -> list[int]:
        """The ids that were sampled since the last one that was not."""
        return self.ids[len(self.ids) - self.action_mask[::-1].index(0) :]

    @property
    def num_turns(self) -> int:
        """Of the policy; 0 if `turns` is not recorded, as in experiments of one turn."""
        return sum(role == "assistant" for role, _ in self.turns)

    def act(self, ids: list[int], log_probs: list[float]) -> None:
        """Append tokens that the policy has sampled: masks are made nowhere else."""
        self.ids += ids
        self.action_mask += [1] * len(ids)
        self.sampler_log_probs += log_probs

    def observe(self, ids: list[int], max_length: float = math.inf) -> None:
        """Append tokens that were not sampled: the tools' answers, as the template renders them; as much as fits."""
        ids = ids[: int(max(0, min(len(ids), max_length - len(self.ids))))]
        self.ids += ids
        self.action_mask += [0] * len(ids)
        self.sampler_log_probs += [0.0] * len(ids)
