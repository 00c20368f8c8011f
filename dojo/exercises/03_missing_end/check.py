"""The mask, one token at a time; then the reward, and a run."""

import math
from collections.abc import Callable
from typing import Any

import torch

from dojo.judge import Call

END, NUM_DIGITS = 10, 3
RUN = "a log whose last reward is above 0.9, with a length below 3.5"
ROWS = torch.tensor([[1, 2, 3, 3, 2, 1, 10, 10, 10], [4, 5, 6, 10, 10, 10, 10, 10, 10]])
FULL = torch.tensor([[7, 8, 9, 9, 8, 7, 6, 5, 4]])

CALLS = [
    Call("rewards_of", {"tokens": torch.cat([ROWS, FULL])}),
    Call("action_mask_of", {"tokens": ROWS}, about="an answer of three digits, and one that ends at once"),
    Call("action_mask_of", {"tokens": FULL}, about="an answer that does not end"),
    Call("train", {"seed": 0, "steps": 150}),
]


def slow_rewards(call: Call, price: float = 0.0) -> list[float]:
    found = []
    for row in call.arguments["tokens"].tolist():
        right = [*reversed(row[:NUM_DIGITS]), END]
        share = sum(row[NUM_DIGITS + n] == token for n, token in enumerate(right)) / 4
        found.append(share - price * sum(token != END for token in row[2 * NUM_DIGITS :]))
    return found


def slow_mask(call: Call, counts: Callable[[list[int], int], bool]) -> list[list[int]]:
    """Position t of an answer counts if `counts(its row, t)`."""
    rows = call.arguments["tokens"].tolist()
    return [[int(t >= NUM_DIGITS and counts(row, t)) for t in range(len(row))] for row in rows]


def was_sampled(row: list[int], t: int) -> bool:
    return END not in row[:t]


def expected(call: Call) -> list | str:
    if call.function == "train":
        return RUN
    return slow_rewards(call) if call.function == "rewards_of" else slow_mask(call, was_sampled)


def last(result: Any, name: str) -> float:
    """NaN if it was not logged."""
    return result[name][-1] if isinstance(result, dict) and result.get(name) else math.nan


def accept(call: Call, result: Any) -> bool:
    return call.function == "train" and last(result, "reward") > 0.9 and last(result, "length") < 3.5


MISTAKES = {
    "A price for long answers changes the task and cannot help: no term of the loss has the end token in it, so no "
    "reward can teach it. Leave the reward as it was.": lambda call: slow_rewards(call, price=0.1),
    "The end token that the policy sampled is still not in the mask: stopping is a choice of the policy, as a digit "
    "is.": lambda call: slow_mask(call, lambda row, t: row[t] != END),
    "The answers stop now, and the mask is wrong in another way: it counts the padding behind the end, which the "
    "policy did not sample.": lambda call: slow_mask(call, lambda row, t: True),
    "An answer that does not end has no end token to be found: all its tokens were sampled, and must be in the mask.": (
        lambda call: slow_mask(call, lambda row, t: END in row and END not in row[:t])
    ),
    "An answer that does not end was sampled to its last token: the mask must have all of them, and not only one.": (
        lambda call: slow_mask(call, lambda row, t: t == NUM_DIGITS or (END in row and END not in row[:t]))
    ),
}
