"""RLOO's advantages, one number at a time."""

import torch

from dojo.judge import Call

CALLS = [
    Call("leave_one_out", {"returns": torch.tensor([[1.0, 0.0, 0.0, 0.0]])}),
    Call("leave_one_out", {"returns": torch.tensor([[1.0, 0.0], [5.0, 3.0]])}, about="two questions, groups of two"),
    Call("leave_one_out", {"returns": torch.tensor([[2.0, 2.0, 2.0]])}, about="all completions earned the same"),
    Call("leave_one_out", {"returns": torch.tensor([[0.5, -1.0, 2.0], [0.0, 0.0, 3.0]])}),
]


def slow(call: Call, itself: bool = False, by_row: bool = True, missing: int = 0) -> list[list[float]]:
    """`missing` is added to the number by which the others' sum is divided."""
    rows = call.arguments["returns"].tolist()
    found = []
    for q, row in enumerate(rows):
        found.append([])
        for g, x in enumerate(row):
            others = [
                other
                for p, among in enumerate(rows)
                for h, other in enumerate(among)
                if (p == q or not by_row) and (itself or (p, h) != (q, g))
            ]
            found[q].append(x - sum(others) / (len(others) + missing))
    return found


def expected(call: Call) -> list[list[float]]:
    return slow(call)


def divided(call: Call) -> list[list[float]]:
    returns = call.arguments["returns"].tolist()
    spreads = [torch.tensor(row).std().item() + 1e-4 for row in returns]
    return [[x / spread for x in row] for row, spread in zip(slow(call), spreads, strict=True)]


MISTAKES = {
    "The baseline contains the completion itself: it is the mean of the whole group.": lambda call: slow(
        call, itself=True
    ),
    "The sum of the others is divided by G: they are G - 1 completions.": lambda call: slow(call, missing=1),
    "The completions of other questions are in the baseline: take the others of the same row only.": lambda call: slow(
        call, by_row=False
    ),
    "RLOO does not divide by the standard deviation.": divided,
}
