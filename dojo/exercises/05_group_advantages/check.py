"""Group advantages, one number at a time."""

import math

import torch

from dojo.judge import Call

CALLS = [
    Call("group_advantages", {"returns": torch.tensor([[1.0, 0.0, 0.0, 0.0]])}),
    Call("group_advantages", {"returns": torch.tensor([[1.0, 0.0], [5.0, 3.0]])}, about="two questions"),
    Call("group_advantages", {"returns": torch.tensor([[2.0, 2.0, 2.0]])}, about="all completions earned the same"),
]


def slow(call: Call, correction: int = 1, by_row: bool = True, divided: bool = True) -> list[list[float]]:
    rows = call.arguments["returns"].tolist()
    everything = [x for row in rows for x in row]
    found = []
    for row in rows:
        among = row if by_row else everything
        mean = sum(among) / len(among)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in among) / (len(among) - correction))
        found.append([(x - mean) / (deviation + 1e-4 if divided else 1.0) for x in row])
    return found


def expected(call: Call) -> list[list[float]]:
    return slow(call)


MISTAKES = {
    "The standard deviation here divides by G, and not by G - 1: that is torch.std(..., correction=0).": lambda call: (
        slow(call, correction=0)
    ),
    "A question is compared with other questions: the mean must be taken over each row.": lambda call: slow(
        call, by_row=False
    ),
    "The division by the standard deviation is missing: these are Dr. GRPO's advantages.": lambda call: slow(
        call, divided=False
    ),
}
