"""The losses, one token at a time, from the papers: what the user's functions are compared with.

PPO's clipped surrogate: arXiv 1707.06347, equation 7. GRPO: arXiv 2402.03300, equations 3 and 4. Dr. GRPO: arXiv
2503.20783, section 3.2. The estimates k1, k2 and k3 of a KL divergence: Schulman 2020, "Approximating KL divergence".
"""

import math
from collections.abc import Callable


def surrogate_slope(ratio: float, advantage: float, low: float, high: float) -> float:
    """The derivative of -min(ratio A, clip(ratio, 1 - low, 1 + high) A) by the token's log-prob.

    >>> surrogate_slope(1.5, 2.0, 0.2, 0.2), surrogate_slope(1.5, -2.0, 0.2, 0.2)
    (-0.0, 3.0)
    """
    is_clipped = ratio > 1 + high if advantage > 0 else ratio < 1 - low
    return -ratio * advantage * (not is_clipped)


# The derivative by the token's log-prob of an estimate of KL(policy || reference), by d = log p_ref - log p
KL_SLOPES: dict[str, Callable[[float], float]] = {
    "k3": lambda d: 1 - math.exp(d),
    "k2": lambda d: -d,
    "k1": lambda d: 1.0,
    "k3 with policy and reference exchanged": lambda d: math.exp(-d) - 1,
    "the absolute difference": lambda d: -math.copysign(1.0, d),
}


def log_softmax(logits: list[float], temperature: float) -> list[float]:
    """Log-probs of one distribution in float64, stable for any logits."""
    scaled = [logit / temperature for logit in logits]
    largest = max(scaled)
    log_z = largest + math.log(math.fsum(math.exp(value - largest) for value in scaled))
    return [value - log_z for value in scaled]


def group_advantages(returns: list[float], divisor: str) -> list[float]:
    """The advantages of one group: its returns minus their mean, by a standard deviation over G-1, over G, or by none.

    >>> group_advantages([1.0, 0.0, 0.0, 0.0], "G-1")[0], group_advantages([1.0, 0.0, 0.0, 0.0], "none")[0]
    (1.5, 0.75)
    """
    size = len(returns)
    mean = math.fsum(returns) / size
    centered = [value - mean for value in returns]
    if divisor == "none":
        return centered
    if divisor == "leave-one-out":  # RLOO, arXiv 2402.14740: the mean of the others
        return [value * size / (size - 1) for value in centered]
    variance = math.fsum(value**2 for value in centered) / (size - 1 if divisor == "G-1" else size)
    return [value / math.sqrt(variance) for value in centered]
