"""The gradient of one mean over all tokens, entry by entry, whatever the number of ranks."""

import math

import torch

from dojo.judge import Call

TABLE = torch.tensor([[0.0, 1.0, -1.0], [0.5, 0.0, 0.0], [0.0, -0.5, 1.0]])
IDS = torch.tensor([[1, 2, 1, 0], [2, 2, 1, 0], [1, 0, 0, 0], [2, 0, 0, 0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
ADVANTAGES = torch.tensor([1.0, -0.5, 0.5, -1.0])


def call_of(num_rows: int, ranks: int, about: str, mask: torch.Tensor = MASK) -> Call:
    rows = {"ids": IDS[:num_rows], "mask": mask[:num_rows], "advantages": ADVANTAGES[:num_rows]}
    return Call("gradient", {"table": TABLE, **rows, "ranks": ranks}, about=about)


CALLS = [
    call_of(4, 1, "one rank: this was right"),
    call_of(3, 2, "two ranks: the second has two rows, the first one row"),
    call_of(4, 2, "two ranks with two rows each, of 6 and of 2 tokens"),
    call_of(4, 4, "four ranks with one row each"),
    call_of(4, 2, "the second rank has only masked tokens", MASK * torch.tensor([[1.0], [1.0], [0.0], [0.0]])),
]


def slow(call: Call, rows: range | None = None, denominator: float | None = None) -> list[list[float]]:
    """The gradient of the sum over some rows, divided by the number of their tokens or by something else."""
    table, ids, mask, advantages = (call.arguments[name].tolist() for name in ("table", "ids", "mask", "advantages"))
    found = [[0.0 for _ in row] for row in table]
    tokens = 0.0
    for i in rows if rows is not None else range(len(ids)):
        for j in range(len(mask[i])):
            tokens += mask[i][j]
            old, new = ids[i][j], ids[i][j + 1]
            total = sum(math.exp(x) for x in table[old])
            for token, logit in enumerate(table[old]):
                slope = (token == new) - math.exp(logit) / total
                found[old][token] -= advantages[i] * mask[i][j] * slope
    return [[x / (denominator or tokens) for x in row] for row in found]


def expected(call: Call) -> list[list[float]]:
    return slow(call)


def local(call: Call, by_rows: bool) -> list[list[float]]:
    """Each rank's mean over its own tokens; then the mean over ranks, or one weighted by their rows."""
    ranks, num_rows = call.arguments["ranks"], len(call.arguments["ids"])
    total = [[0.0] * 3 for _ in range(3)]
    for rank in range(ranks):
        rows = range(rank * num_rows // ranks, (rank + 1) * num_rows // ranks)
        weight = len(rows) / num_rows if by_rows else 1 / ranks
        part = slow(call, rows)
        total = [[x + weight * y for x, y in zip(*pair, strict=True)] for pair in zip(total, part, strict=True)]
    return total


def scaled(call: Call, factor: float) -> list[list[float]]:
    return [[factor * x for x in row] for row in slow(call)]


MISTAKES = {
    "As before: each rank divides by the number of its own tokens, so a token counts more on a rank that has few.": (
        lambda call: local(call, by_rows=False)
    ),
    "The ranks agree now, but on another loss: the masked tokens are in the denominator, and one rank alone no longer "
    "returns the mean over tokens. The symptom is gone; the number of tokens is still not shared.": (
        lambda call: slow(call, denominator=call.arguments["mask"].numel())
    ),
    "Each rank's mean is weighted by its rows. That cures parts of different size, but a token of a short completion "
    "still counts more than one of a long completion.": lambda call: local(call, by_rows=True),
    "The denominator is right and the gradient is too small by the number of ranks: sums have to be summed, and "
    "they are averaged.": lambda call: scaled(call, 1 / call.arguments["ranks"]),
    "The gradient is too large by the number of ranks: the count is a mean, and the gradients are summed.": (
        lambda call: scaled(call, call.arguments["ranks"])
    ),
}
