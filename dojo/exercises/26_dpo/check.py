"""DPO's loss, pair by pair, and its derivative by hand."""

import math

import torch

from dojo.judge import Call

NAMES = ("chosen", "rejected", "reference_chosen", "reference_rejected")


def case(*log_probs: list[float], beta: float, about: str, gradient: str = "chosen") -> Call:
    arguments = {name: torch.tensor(x) for name, x in zip(NAMES, log_probs, strict=True)}
    return Call("dpo", arguments | {"beta": beta}, gradient=gradient, about=about)


CALLS = [
    case([-3.0], [-5.0], [-3.0], [-5.0], beta=0.5, about="the policy is still the reference"),
    case([-3.0], [-6.0], [-4.0], [-5.0], beta=0.5, about="one pair in the right order"),
    case([-3.0], [-6.0], [-4.0], [-5.0], beta=0.5, about="the same, by the rejected answer", gradient="rejected"),
    case(
        [-9.0, -2.0],
        [-4.0, -7.0],
        [-6.0, -2.0],
        [-5.0, -4.0],
        beta=0.1,
        about="two pairs, the first in the wrong order",
    ),
    case([-600.0], [-100.0], [-350.0], [-350.0], beta=0.5, about="a pair of long answers, badly in the wrong order"),
]


def slow(call: Call, signs: tuple = (1, -1, -1, 1), beta: float | None = None, divided: bool = True) -> dict:
    """-log sigmoid of beta times a signed sum of the four log-probs."""
    beta = call.arguments["beta"] if beta is None else beta
    columns = [call.arguments[name].tolist() for name in NAMES]
    count = len(columns[0]) if divided else 1
    loss, gradient = 0.0, []
    for pair in zip(*columns, strict=True):
        margin = beta * sum(sign * x for sign, x in zip(signs, pair, strict=True))
        loss += (max(-margin, 0.0) + math.log1p(math.exp(-abs(margin)))) / count  # log(1 + exp(-margin))
        push = 1.0 / (1.0 + math.exp(margin)) if margin < 500 else 0.0
        gradient.append(-beta * signs[NAMES.index(call.gradient)] * push / count)
    return {"value": loss, "gradient": gradient}


def expected(call: Call) -> dict:
    return slow(call)


def not_finite(call: Call) -> dict:
    """log(sigmoid(x)) in float32, where sigmoid(x) is 0."""
    if slow(call)["value"] < 100:
        return slow(call)
    return {"value": math.inf, "gradient": [math.nan]}


MISTAKES = {
    "The reference is missing: a score is the log-ratio to the reference, not the log-prob.": lambda call: slow(
        call, signs=(1, -1, 0, 0)
    ),
    "The pairs' losses are added up: the loss is their mean.": lambda call: slow(call, divided=False),
    "log(sigmoid(x)) has the logarithm of 0 here, or exp(-x) is infinite: use logsigmoid.": not_finite,
    "The chosen and the rejected answer have changed places.": lambda call: slow(call, signs=(-1, 1, 1, -1)),
    "The reference has the wrong sign: it is subtracted from the policy's log-prob.": lambda call: slow(
        call, signs=(1, -1, 1, -1)
    ),
    "beta is missing in the scores.": lambda call: slow(call, beta=1.0),
}
