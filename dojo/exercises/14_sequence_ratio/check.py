"""GSPO's ratio, one completion at a time."""

import math
from collections.abc import Callable

import torch

from dojo.judge import Call

LOG_PROBS = [[-1.0, -0.5, -2.0, -3.0], [-1.0, -2.0, -0.7, -0.4]]
OLD_LOG_PROBS = [[-1.2, -1.0, -1.5, -1.0], [-1.0, -1.6, -0.2, -0.9]]


def call(mask: list, about: str, gradient: str | None = None) -> Call:
    numbers = {"log_probs": LOG_PROBS[: len(mask)], "old_log_probs": OLD_LOG_PROBS[: len(mask)], "mask": mask}
    return Call("sequence_ratio", {name: torch.tensor(value) for name, value in numbers.items()}, gradient, about)


CALLS = [
    call([[1, 1, 1, 1]], "all tokens were sampled"),
    call([[1, 1, 0, 0], [1, 0, 0, 1]], "padding, and a tool's answer between two sampled tokens"),
    call([[1, 1, 1, 0], [1, 0, 0, 1]], "padding, and a tool's answer", gradient="log_probs"),
    call([[1, 1, 1, 1], [0, 0, 0, 0]], "the second completion is empty", gradient="log_probs"),
]


def mean_of_logs(log_ratios: list[float], width: int) -> tuple[float, list[float]]:
    """The ratio of a completion, and its derivatives by its tokens' log-probs."""
    ratio = math.exp(sum(log_ratios) / len(log_ratios))
    return ratio, [ratio / len(log_ratios)] * len(log_ratios)


def product(log_ratios: list[float], width: int) -> tuple[float, list[float]]:
    ratio = math.exp(sum(log_ratios))
    return ratio, [ratio] * len(log_ratios)


def over_the_width(log_ratios: list[float], width: int) -> tuple[float, list[float]]:
    ratio = math.exp(sum(log_ratios) / width)
    return ratio, [ratio / width] * len(log_ratios)


def mean_of_ratios(log_ratios: list[float], width: int) -> tuple[float, list[float]]:
    ratios = [math.exp(x) for x in log_ratios]
    return sum(ratios) / len(ratios), [ratio / len(ratios) for ratio in ratios]


def slow(
    call: Call,
    ratio_of: Callable = mean_of_logs,
    everywhere: bool = False,
    spread: bool = False,
    empty: float = 0.0,
    flows: float = 1.0,
) -> list | dict:
    """Four mistakes: tokens outside the mask are in the product (everywhere), or get the ratio (spread); the gradient
    of a row without tokens is not 0 (empty); all gradients are 0 (flows)."""
    values, gradients = [], []
    for new, old, mask in zip(*(x.tolist() for x in call.arguments.values()), strict=True):
        chosen = [t for t in range(len(mask)) if mask[t] or everywhere]
        values.append([1.0] * len(mask))
        gradients.append([0.0 if any(mask) else empty] * len(mask))
        if not chosen:
            continue
        ratio, slopes = ratio_of([new[t] - old[t] for t in chosen], len(mask))
        for t, slope in zip(chosen, slopes, strict=True):
            gradients[-1][t] = flows * (len(mask) if spread else sum(mask)) * slope  # so many entries have the ratio
        values[-1] = [ratio if is_in or spread else 1.0 for is_in in mask]
    return {"value": values, "gradient": gradients} if call.gradient else values


def each_token(call: Call) -> list | dict:
    log_probs, old_log_probs, mask = (x.tolist() for x in call.arguments.values())
    ratios = [
        [math.exp(new - old) if is_in else 1.0 for new, old, is_in in zip(*rows, strict=True)]
        for rows in zip(log_probs, old_log_probs, mask, strict=True)
    ]
    gradients = [[ratio * is_in for ratio, is_in in zip(*rows, strict=True)] for rows in zip(ratios, mask, strict=True)]
    return {"value": ratios, "gradient": gradients} if call.gradient else ratios


def expected(call: Call) -> list | dict:
    return slow(call)


MISTAKES = {
    "The ratio is not normalised by the length: the product of many ratios is far from 1 in a long "
    "completion.": lambda call: slow(call, product),
    "This is the mean of the tokens' ratios. GSPO's is their geometric mean: the mean of logarithms, then "
    "exp.": lambda call: slow(call, mean_of_ratios),
    "These are the ratios of single tokens: a completion must have one ratio.": each_token,
    "The sum is divided by the number of all entries of the row: only tokens of the mask count.": lambda call: slow(
        call, over_the_width
    ),
    "Tokens outside the mask are in the product: padding, or a tool's answer.": lambda call: slow(
        call, everywhere=True
    ),
    "The ratio must be 1 where the mask is 0.": lambda call: slow(call, spread=True),
    "A row without tokens has a gradient of NaN: 0 divided by 0. Divide by at least 1.": lambda call: slow(
        call, empty=math.nan
    ),
    "The values are right, but no gradient reaches log_probs: something is detached.": lambda call: slow(
        call, flows=0.0
    ),
}
