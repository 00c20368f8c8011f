"""The loss, one token at a time; then a run."""

import math
from collections.abc import Callable
from typing import Any

import torch

from dojo.judge import Call

RUN = "a log whose last kl is between 1 and 1.5"
LOG_PROBS = torch.tensor([[-1.0, -2.0, -0.5], [-0.5, -1.0, -1.5]])
LOG_PROBS_REF = torch.tensor([[-1.5, -1.0, -0.5], [-2.5, -1.0, -1.0]])
ADVANTAGES = torch.tensor([1.0, -1.0])


def call_with(mask: list[list[int]], about: str, padding: int = 0) -> Call:
    arguments = {
        "log_probs": torch.nn.functional.pad(LOG_PROBS, (0, padding), value=-1.0),
        "log_probs_ref": torch.nn.functional.pad(LOG_PROBS_REF, (0, padding), value=-2.0),
        "mask": torch.nn.functional.pad(torch.tensor(mask), (0, padding)),
        "advantages": ADVANTAGES,
        "kl_weight": 0.5,
    }
    return Call("policy_loss", arguments, about=about)


CALLS = [
    call_with([[1, 1, 1], [1, 1, 1]], "two answers of the same length, no padding"),
    call_with([[1, 1, 1], [1, 0, 0]], "three columns of padding", padding=3),
    Call("train", {"seed": 0, "steps": 80, "room": 8}),
]

Penalty = Callable[[list[list[float]], int], float]  # of each row's KLs, and the number of columns


def per_token(rows: list[list[float]], columns: int) -> float:
    return sum(map(sum, rows)) / sum(map(len, rows))


def slow(call: Call, penalty: Penalty = per_token) -> float:
    arguments = {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in call.arguments.items()}
    surrogate, number, kls = 0.0, 0, []
    for row, advantage in enumerate(arguments["advantages"]):
        kls.append([])
        for t, counts in enumerate(arguments["mask"][row]):
            if counts:
                log_prob = arguments["log_probs"][row][t]
                log_r = arguments["log_probs_ref"][row][t] - log_prob
                kls[row].append(math.exp(log_r) - log_r - 1)
                surrogate, number = surrogate - advantage * log_prob, number + 1
    return surrogate / number + arguments["kl_weight"] * penalty(kls, len(arguments["mask"][0]))


def expected(call: Call) -> float | str:
    return RUN if call.function == "train" else slow(call)


def last(result: Any, name: str) -> float:
    """NaN if it was not logged."""
    return result[name][-1] if isinstance(result, dict) and result.get(name) else math.nan


def accept(call: Call, result: Any) -> bool:
    return call.function == "train" and 1 < last(result, "kl") < 1.5


MISTAKES = {
    "The penalty still becomes weaker with each column of padding: it is divided by all entries of the batch.": (
        lambda call: slow(call, lambda rows, columns: sum(map(sum, rows)) / (columns * len(rows)))
    ),
    "Padding that all rows share is cut off, so empty columns change nothing now; the cause stays: the longest row "
    "still sets the weight of the penalty for all others.": lambda call: slow(
        call, lambda rows, columns: sum(map(sum, rows)) / (max(map(len, rows)) * len(rows))
    ),
    "Padding has no effect now, but the penalty is divided by the number of answers: its weight grows with their "
    "length. Divide by the number of action tokens, as in the surrogate.": lambda call: slow(
        call, lambda rows, columns: sum(map(sum, rows)) / len(rows)
    ),
    "Padding has no effect now, but each answer has a mean of its own: a token of a short answer is penalised more "
    "than one of a long answer. The docstring asks for one mean over all action tokens.": lambda call: slow(
        call, lambda rows, columns: sum(sum(row) / len(row) for row in rows) / len(rows)
    ),
}
