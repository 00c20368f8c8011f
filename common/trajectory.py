"""What happened to one row: which tokens were fed, which were sampled, and what they earned."""

from dataclasses import dataclass, field


@dataclass
class Trajectory:
    """One completion of one prompt, as ragged lists. The ids that were sampled are the ids that are trained on.

    `action_mask` and `sampler_log_probs` have one entry for every id and are written where the token is made: 1 and its
    log-probability on exactly the tokens that the policy sampled, including its end-of-turn token; 0 on the prompt.

    >>> row = Trajectory([5, 6, 7, 2], 2, action_mask=[0, 0, 1, 1], sampler_log_probs=[0.0, 0.0, -0.7, -0.1])
    >>> row.completion_ids, row.num_action_tokens
    ([7, 2], 2)
    """

    ids: list[int]
    prompt_length: int
    action_mask: list[int]
    sampler_log_probs: list[float]  # nats, under softmax(logits / temperature), before top-p
    prompt_index: int = 0  # the prompt's row in its data file
    completion_index: int = 0  # 0..G-1 within the group
    finish_reason: str = "length"  # "stop": ended with an end-of-turn token; "length": cut off by the budget
    text: str = ""  # the completion as text, for rewards and for people
    rewards: dict[str, float] = field(default_factory=dict)  # by component, unweighted
    description: dict[str, float] = field(default_factory=dict)  # what else the task measures; only logged

    @property
    def completion_ids(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def num_action_tokens(self) -> int:
        return sum(self.action_mask)
