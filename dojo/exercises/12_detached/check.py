"""The gradient of the loss, one token at a time; then a run. The loss itself may have any value."""

import math
from collections.abc import Callable
from typing import Any

import torch

from dojo.judge import Call

RATIO_CAP = 1.28
RUN = "a log whose last reward is above 0.8"
SAME = {
    "log_probs": torch.tensor([[-2.0, -0.5], [-2.0, -0.5]]),
    "old_log_probs": torch.tensor([[-2.0, -0.5], [-2.0, -0.5]]),
    "advantages": torch.tensor([1.0, -1.0]),
    "mask": torch.tensor([[1, 1], [1, 0]]),
}
OLDER = SAME | {"old_log_probs": torch.tensor([[-3.0, -0.4], [-1.5, -0.5]])}

CALLS = [
    Call("policy_loss", SAME, gradient="log_probs", about="the first update: all weights are 1"),
    Call("policy_loss", OLDER, gradient="log_probs", about="a later update: one weight is at the cap"),
    Call("train", {"seed": 0, "steps": 60}),
]

Slope = Callable[[float, float, bool], float]  # of log-prob, weight, and whether it is at the cap: d term / d log-prob


def slow(call: Call, slope: Slope = lambda log_prob, weight, is_capped: weight) -> dict[str, list[list[float]]]:
    arguments = {name: x.tolist() for name, x in call.arguments.items()}
    number, gradient = sum(map(sum, arguments["mask"])), []
    for row, advantage in enumerate(arguments["advantages"]):
        gradient.append([])
        for t, counts in enumerate(arguments["mask"][row]):
            log_prob = arguments["log_probs"][row][t]
            ratio = math.exp(log_prob - arguments["old_log_probs"][row][t])
            push = slope(log_prob, min(ratio, RATIO_CAP), ratio > RATIO_CAP)
            gradient[row].append(-advantage * push / number if counts else 0.0)
    return {"gradient": gradient}


def expected(call: Call) -> dict[str, list[list[float]]] | str:
    return RUN if call.function == "train" else slow(call)


def last(result: Any, name: str) -> float:
    """NaN if it was not logged."""
    return result[name][-1] if isinstance(result, dict) and result.get(name) else math.nan


def accept(call: Call, result: Any) -> bool:
    return call.function == "train" and last(result, "reward") > 0.8


def attached(log_prob: float, weight: float, is_capped: bool) -> float:
    return weight if is_capped else weight * (1 + log_prob)


MISTAKES = {
    "The gradient still has a second part, through the weight: w (1 + log p) and not w. It has the wrong sign for "
    "every token with a probability below 1 / e.": lambda call: slow(call, attached),
    "With the other sign the reward rises at first, and the cause stays: the weight is still differentiated, so a "
    "token is now pushed the wrong way as soon as its probability is above 1 / e.": lambda call: slow(
        call, lambda *token: -attached(*token)
    ),
    "The wrong factor is detached: the loss now trains the weight, by the factor log p. Detach the weight, so that the "
    "log-prob is trained.": lambda call: slow(
        call, lambda log_prob, weight, is_capped: 0.0 if is_capped else weight * log_prob
    ),
    "The reward rises now, but this is no longer CISPO: a token whose weight is at the cap has no gradient, and CISPO "
    "exists to keep it.": lambda call: slow(call, lambda log_prob, weight, is_capped: 0.0 if is_capped else weight),
}
