"""The loss, one token at a time; then a run."""

import math
from collections.abc import Callable
from typing import Any

import torch

from dojo.judge import Call

RUN = "a log whose last reward is above 0.9"
LOGITS = torch.tensor([[[0.0, 1.0, 0.0], [2.0, 0.0, 1.0], [0.0, 0.0, 3.0], [1.0, 0.0, 0.0]]])
TWO = torch.cat([LOGITS, LOGITS.flip(1)])

CALLS = [
    Call(
        "policy_loss",
        {
            "logits": LOGITS,
            "tokens": torch.tensor([[0, 1, 2, 2]]),
            "action_mask": torch.tensor([[0, 1, 1, 0]]),
            "advantages": torch.tensor([1.0]),
        },
        about="a question of one token, an answer of two, one token of padding",
    ),
    Call(
        "policy_loss",
        {
            "logits": TWO,
            "tokens": torch.tensor([[1, 2, 0, 2], [0, 2, 2, 2]]),
            "action_mask": torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0]]),
            "advantages": torch.tensor([1.0, -1.0]),
        },
        about="an answer of three tokens, and one of a single token",
    ),
    Call("train", {"seed": 0, "steps": 100}),
]


def slow(call: Call, counts: Callable[[list[int], int], bool] = lambda mask, t: mask[t] == 1, late: int = 1) -> float:
    """Token t counts if `counts(its row's mask, t)`, and is predicted by the logits of position t - late."""
    arguments = {name: x.tolist() for name, x in call.arguments.items()}
    total, number = 0.0, 0
    for logits, tokens, mask, advantage in zip(*arguments.values(), strict=True):
        for t in range(1, len(tokens)):
            if counts(mask, t):
                scores = logits[t - late]
                log_prob = scores[tokens[t]] - math.log(sum(math.exp(x) for x in scores))
                total, number = total - advantage * log_prob, number + 1
    return total / number


def expected(call: Call) -> float | str:
    return RUN if call.function == "train" else slow(call)


def last(result: Any, name: str) -> float:
    """NaN if it was not logged."""
    return result[name][-1] if isinstance(result, dict) and result.get(name) else math.nan


def accept(call: Call, result: Any) -> bool:
    return call.function == "train" and last(result, "reward") > 0.9


MISTAKES = {
    "The first token of every answer is still not in the loss, and the token behind the end still is: compare what "
    "log_probs[:, t] and mask[:, t] are about.": lambda call: slow(call, lambda mask, t: mask[t - 1] == 1),
    "The first digit is now learned, and the cause is not cured: the token behind the end is still in the loss, though "
    "the policy did not sample it.": lambda call: slow(call, lambda mask, t: mask[t] == 1 or mask[t - 1] == 1),
    "Padding is no longer trained, which is only the visible half: the first token of every answer is still not in the "
    "loss.": lambda call: slow(call, lambda mask, t: mask[t] == 1 and mask[t - 1] == 1),
    "The mask has moved to the log-probs, but these are now wrong: the logits of position t predict token t+1.": (
        lambda call: slow(call, late=0)
    ),
    "Now all tokens are trained, the question's too: the policy did not choose those.": lambda call: slow(
        call, lambda mask, t: True
    ),
}
