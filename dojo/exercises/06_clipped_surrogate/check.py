"""The clipped surrogate, one token at a time."""

import math
from collections.abc import Callable

import torch

from dojo.judge import Call

ROW, OLD_ROW = [-1.0, -0.5, -1.5], [-1.0, -1.0, -1.0]  # ratios of 1, 1.65 and 0.61


def call(log_probs: list, old_log_probs: list, advantages: list, about: str, gradient: str | None = None) -> Call:
    numbers = {"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": advantages}
    arguments = {name: torch.tensor(value) for name, value in numbers.items()} | {"clip_eps": 0.2}
    return Call("clipped_surrogate", arguments, gradient, about)


CALLS = [
    call([ROW], [OLD_ROW], [[1.0]], "ratios of 1, 1.65 and 0.61"),
    call([ROW], [OLD_ROW], [[-1.0]], "ratios of 1, 1.65 and 0.61, and a negative advantage"),
    call([ROW], [OLD_ROW], [[1.0]], "a clipped token has no gradient", gradient="log_probs"),
    call(
        [ROW, [-2.0, -0.9, -1.1]],
        [OLD_ROW, [-1.0, -2.0, -1.0]],
        [[-2.0], [0.5]],
        "two rows, with advantages of -2 and 0.5",
        gradient="log_probs",
    ),
]


def surrogate(ratio: float, advantage: float, eps: float) -> tuple[float, float]:
    """The loss of a token, and its derivative by the ratio."""
    clipped = min(max(ratio, 1 - eps), 1 + eps)
    is_plain = ratio * advantage <= clipped * advantage
    return (-ratio * advantage, -advantage) if is_plain else (-clipped * advantage, 0.0)


def larger(ratio: float, advantage: float, eps: float) -> tuple[float, float]:
    clipped = min(max(ratio, 1 - eps), 1 + eps)
    is_plain = ratio * advantage >= clipped * advantage
    return (-ratio * advantage, -advantage) if is_plain else (-clipped * advantage, 0.0)


def only_clipped(ratio: float, advantage: float, eps: float) -> tuple[float, float]:
    is_inside = 1 - eps <= ratio <= 1 + eps
    return -min(max(ratio, 1 - eps), 1 + eps) * advantage, -advantage if is_inside else 0.0


def slow(call: Call, token: Callable = surrogate, sign: float = 1.0, gradient: float = 1.0) -> list | dict:
    """`token` is called with a ratio; sign -1: that of p_old / p."""
    log_probs, old_log_probs, advantages = (call.arguments[name].tolist() for name in list(call.arguments)[:3])
    values, gradients = [], []
    for new_row, old_row, (advantage,) in zip(log_probs, old_log_probs, advantages, strict=True):
        ratios = [math.exp(sign * (new - old)) for new, old in zip(new_row, old_row, strict=True)]
        pairs = [token(ratio, advantage, call.arguments["clip_eps"]) for ratio in ratios]
        values.append([value for value, _ in pairs])
        gradients.append([gradient * sign * slope * ratio for (_, slope), ratio in zip(pairs, ratios, strict=True)])
    return {"value": values, "gradient": gradients} if call.gradient else values


def expected(call: Call) -> list | dict:
    return slow(call)


MISTAKES = {
    "The larger of the two products is used. Compare them after the multiplication by A, and take minus the minimum: "
    "with the minus sign inside, it would have to be a maximum.": lambda call: slow(call, larger),
    "Only the clipped product is used: a token that has moved against its advantage loses the gradient that would "
    "bring it back. The minimum with the plain product keeps it.": lambda call: slow(call, only_clipped),
    "The ratio is upside down: it is p / p_old.": lambda call: slow(call, sign=-1.0),
    "Nothing is clipped: this is -ratio A.": lambda call: slow(call, lambda ratio, a, eps: (-ratio * a, -a)),
    "The minus sign is missing: a loss is made small, an objective large.": lambda call: slow(
        call, lambda ratio, a, eps: tuple(-x for x in surrogate(ratio, a, eps))
    ),
    "The values are right, but no gradient reaches log_probs: something is detached.": lambda call: slow(
        call, gradient=0.0
    ),
}
