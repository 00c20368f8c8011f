"""Means over questions with their 95 % intervals, and the difference of two policies on the same questions.

Every figure here is a mean over Q questions of one number per question: whether the greedy answer is right, the share
of right samples, an estimate of pass@k. The n samples of one question are not independent of each other, so that n Q
answers are worth fewer than n Q questions; the number per question is what is independent.

    standard error   SE = sqrt(sum_q (x_q - p)^2 / (Q - 1) / Q)          p: mean of the x_q; clustered by question
                                                                          (Miller 2024, arXiv 2411.00640, section 2.2)
    effective number m  = p (1 - p) / SE^2                                as many independent answers have the same SE
    interval            = Wilson's (1927) for the share p of m answers    the formula is in viewer/table.py

For answers that are right or wrong, one per question, m = Q and this is Wilson's interval. Unlike p +- 1.96 SE it stays
between 0 and 1, and does not become a point where all answers are right: then m = Q (Dean and Pagano 2015, "Evaluating
confidence interval methods for binomial proportions in clustered surveys").
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.keyed import keyed_generator
from viewer.table import wilson

RESAMPLES = 10_000


class Estimate(NamedTuple):
    """A mean over questions."""

    value: float
    low: float  # of the 95 % interval
    high: float
    standard_error: float | None  # None: of one question nothing is known about others


def mean_with_interval(values: Sequence[float], answers_per_question: int = 1) -> Estimate:
    """The mean of one number between 0 and 1 per question.

    Args:
        answers_per_question: independent answers that each number is made from; Q times this many is the most that the
            effective number of answers can be. It is never below Q, the number of questions.

    >>> [round(number, 3) for number in mean_with_interval([1.0] * 8 + [0.0] * 2)]
    [0.8, 0.49, 0.943, 0.133]
    >>> [round(number, 3) for number in mean_with_interval([1.0] * 10)]
    [1.0, 0.722, 1.0, 0.0]
    """
    x = np.asarray(values, dtype=float)
    p = float(x.mean())
    error = float(x.std(ddof=1) / len(x) ** 0.5) if len(x) > 1 else None
    most = len(x) * max(1, answers_per_question)
    effective = min(most, max(len(x), p * (1 - p) / error**2)) if error else most if 0 < p < 1 else len(x)
    effective = len(x) if error is None else effective
    low, high = wilson(p, effective)
    return Estimate(p, max(0.0, min(low, p)), min(1.0, max(high, p)), error)


def difference(before: Sequence[float], after: Sequence[float], seed: int) -> Estimate:
    """The mean over questions of `after - before`, with the interval of a bootstrap over questions.

    Questions are drawn with replacement, `RESAMPLES` times, each with both of its numbers: what makes a question hard
    for both policies cancels. The interval holds the middle 95 % of the means (the percentile bootstrap of Efron 1979).
    """
    gain = np.asarray(after, dtype=float) - np.asarray(before, dtype=float)
    count = len(gain)
    generator = keyed_generator("bootstrap", seed)
    means = np.empty(RESAMPLES)
    for start in range(0, RESAMPLES, 500):  # of 500 resamples at a time, which bounds the memory
        drawn = generator.integers(0, count, size=(500, count))
        means[start : start + 500] = gain[drawn].mean(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    error = float(gain.std(ddof=1) / count**0.5) if count > 1 else None
    return Estimate(float(gain.mean()), float(low), float(high), error)
