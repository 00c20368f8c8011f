"""k3, one token at a time."""

import math
from collections.abc import Callable

import torch

from dojo.judge import Call


def call(log_probs: list, log_probs_ref: list, mask: list, about: str, gradient: str | None = None) -> Call:
    numbers = {"log_probs": log_probs, "log_probs_ref": log_probs_ref, "mask": mask}
    return Call("k3", {name: torch.tensor(value) for name, value in numbers.items()}, gradient, about)


PADDED = [[-1.0, -0.5, -200.0], [-2.0, -1.5, -1.0]], [[-2.0, -0.5, 0.0], [-1.0, -1.0, -3.0]], [[1, 1, 0], [1, 1, 1]]
CALLS = [
    call([[-1.0, -1.0, -2.0]], [[-1.0, -2.0, -1.0]], [[1, 1, 1]], "all tokens count"),
    call([[-1.0, -1.0, -2.0]], [[-1.0, -2.0, -1.0]], [[1, 1, 1]], "all tokens count", gradient="log_probs"),
    call([[-1.0, -0.5, -2.0]], [[-2.0, -3.0, -1.0]], [[1, 0, 1]], "the second token does not count"),
    call(*PADDED, "at padding, r is larger than the largest number of float32"),
    call(*PADDED, "at padding, r is larger than the largest number of float32", gradient="log_probs"),
]


def k3(log_r: float) -> tuple[float, float]:
    """The estimate, and its derivative by log r."""
    return math.exp(log_r) - log_r - 1, math.exp(log_r) - 1


def upside_down(log_r: float) -> tuple[float, float]:
    return math.exp(-log_r) + log_r - 1, 1 - math.exp(-log_r)


def slow(call: Call, token: Callable = k3, hole: tuple[float, float] = (0.0, 0.0), flows: float = 1.0) -> list | dict:
    """`hole` is what stands where the mask is 0: the value, and the gradient by log_probs."""
    rows = zip(*(x.tolist() for x in call.arguments.values()), strict=True)
    values, gradients = [], []
    for new_row, reference_row, counts in rows:
        pairs = []
        for new, reference, is_in in zip(new_row, reference_row, counts, strict=True):
            value, slope = token(reference - new) if is_in else (hole[0], -hole[1])
            pairs.append((value, -flows * slope))  # log r falls as log p rises
        values.append([value for value, _ in pairs])
        gradients.append([gradient for _, gradient in pairs])
    return {"value": values, "gradient": gradients} if call.gradient else values


def everywhere(call: Call) -> list | dict:
    log_probs, log_probs_ref, mask = call.arguments.values()
    arguments = {"log_probs": log_probs, "log_probs_ref": log_probs_ref, "mask": torch.ones_like(mask)}
    return slow(Call(call.function, arguments, call.gradient))


def expected(call: Call) -> list | dict:
    return slow(call)


MISTAKES = {
    "r is upside down: the tokens come from the policy, so that r is p_ref / p.": lambda call: slow(call, upside_down),
    "This is k1 = -log r: it can be negative, and as a loss its mean gradient is 0. k3 adds r - 1.": lambda call: slow(
        call, lambda log_r: (-log_r, -1.0)
    ),
    "This is k2 = (log r)^2 / 2, another estimate.": lambda call: slow(call, lambda log_r: (log_r**2 / 2, log_r)),
    "The 1 is not subtracted: k3 must be 0 where the two policies agree.": lambda call: slow(
        call, lambda log_r: (math.exp(log_r) - log_r, math.exp(log_r) - 1)
    ),
    "The values are right, but no gradient reaches log_probs: something is detached.": lambda call: slow(
        call, flows=0.0
    ),
    "Where the mask is 0, k3 must be 0.": everywhere,
    "The value at padding is NaN: infinity times 0. Don't multiply by the mask; choose with torch.where, before "
    "exp.": lambda call: slow(call, hole=(math.nan, math.nan)),
    "The values are right, but the gradient at padding is NaN: exp was infinite there, and 0 times infinity is NaN. "
    "Mask the exponent, before exp.": lambda call: slow(call, hole=(0.0, math.nan)),
}
