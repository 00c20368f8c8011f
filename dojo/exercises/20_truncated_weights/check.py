"""Truncated importance sampling, token by token."""

import math
from collections.abc import Callable, Iterator

import torch

from dojo.judge import Call


def case(p_trainer: list, p_sampler: list, advantages: list, mask: list, cap: float, about: str) -> Call:
    """From probabilities, which are easier to read."""
    arguments = {
        "log_probs": torch.tensor(p_trainer).log(),
        "sampler_log_probs": torch.tensor(p_sampler).log(),
        "advantages": torch.tensor(advantages)[:, None],
        "mask": torch.tensor(mask),
        "cap": cap,
    }
    return Call("truncated_weights", arguments, gradient="log_probs", about=about)


CALLS = [
    case([[0.5, 0.25]], [[0.5, 0.25]], [1.0], [[1, 1]], 2.0, "both programs agree"),
    case([[0.5, 0.1]], [[0.4, 0.2]], [1.0], [[1, 1]], 2.0, "ratios 1.25 and 0.5"),
    case([[0.8, 0.3]], [[0.2, 0.3]], [1.0], [[1, 1]], 2.0, "ratio 4 at a cap of 2"),
    case([[0.1, 0.9]], [[0.8, 0.9]], [-1.0], [[1, 1]], 2.0, "ratio 1/8, and a negative advantage"),
    case(
        [[0.9, 0.5, 0.6], [0.2, 0.3, 0.9]],
        [[1.0, 0.4, 0.1], [0.3, 0.3, 1.0]],
        [2.0, -0.5],
        [[0, 1, 1], [1, 1, 0]],
        3.0,
        "two rows; the first token is a prompt's, and the last one is padding",
    ),
]

TermOf = Callable[[float, float, float, float], tuple[float, float]]  # ratio, A, log p, C: term, and its derivative


def tokens(call: Call) -> Iterator[Iterator[tuple[float, float, float, float]]]:
    log_probs, sampler, advantages, mask = (
        call.arguments[name].tolist() for name in ("log_probs", "sampler_log_probs", "advantages", "mask")
    )
    for b, row in enumerate(log_probs):
        yield ((math.exp(x - sampler[b][t]), advantages[b][0], x, mask[b][t]) for t, x in enumerate(row))


def slow(call: Call, term_of: TermOf, masked: bool = True) -> dict[str, list[list[float]]]:
    cap, value, gradient = call.arguments["cap"], [], []
    for row in tokens(call):
        pairs = []
        for ratio, advantage, log_prob, is_action in row:
            term, derivative = term_of(ratio, advantage, log_prob, cap)
            pairs.append((term, derivative) if is_action or not masked else (0.0, 0.0))
        value.append([term for term, _ in pairs])
        gradient.append([derivative for _, derivative in pairs])
    return {"value": value, "gradient": gradient}


def weighted(weight: Callable[[float, float], float]) -> TermOf:
    """-w A log p with a constant w."""
    return lambda ratio, a, log_prob, cap: (-weight(ratio, cap) * a * log_prob, -weight(ratio, cap) * a)


def through_the_weight(ratio: float, a: float, log_prob: float, cap: float) -> tuple[float, float]:
    weight = min(ratio, cap)
    slope = ratio * log_prob if ratio <= cap else 0.0  # of w, times log p
    return -weight * a * log_prob, -a * (slope + weight)


def surrogate(ratio: float, a: float, log_prob: float, cap: float) -> tuple[float, float]:
    """-min(w, C) A."""
    return -min(ratio, cap) * a, -ratio * a if ratio <= cap else 0.0


def expected(call: Call) -> dict[str, list[list[float]]]:
    return slow(call, weighted(min))


MISTAKES = {
    "A gradient flows through the weight: it must be a constant (detach).": lambda call: slow(call, through_the_weight),
    "The ratio is upside down: the trainer's probability is divided by the sampler's.": lambda call: slow(
        call, weighted(lambda ratio, cap: min(1 / ratio, cap))
    ),
    "min(w, C) A has no log p, so a token above the cap has no gradient: multiply a constant weight by log p.": (
        lambda call: slow(call, surrogate)
    ),
    "A token above the cap is dropped: it must keep its gradient, with the weight C.": lambda call: slow(
        call, weighted(lambda ratio, cap: ratio if ratio <= cap else 0.0)
    ),
    "The weight is cut from below, too: only the cap C bounds it.": lambda call: slow(
        call, weighted(lambda ratio, cap: min(max(ratio, 1 / cap), cap))
    ),
    "The weight is not cut at C.": lambda call: slow(call, weighted(lambda ratio, cap: ratio)),
    "The weight is missing: this is the policy gradient for samples of the trainer itself.": lambda call: slow(
        call, weighted(lambda ratio, cap: 1.0)
    ),
    "The sign is wrong: a loss falls where the log-prob of a good token rises.": lambda call: slow(
        call, weighted(lambda ratio, cap: -min(ratio, cap))
    ),
    "Tokens that were not sampled have a loss: multiply by the mask.": lambda call: slow(
        call, weighted(min), masked=False
    ),
}
