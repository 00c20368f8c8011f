"""How often a score prefers the chosen answer of a pair, and why: the figures of a reward model on held-out pairs."""

import math
from statistics import fmean

NEAR = 0.1  # lengths that differ by less than this share of the longer one count as equal
BINS = 10


def preference_metrics(
    scores: list[tuple[float, float]], lengths: list[tuple[int, int]], same_style: list[bool]
) -> dict[str, float]:
    """The figures of held-out pairs; in each tuple the chosen answer is first.

    accuracy              share of pairs whose chosen answer has the higher score; equal scores count half
    accuracy_same_style   the same, among pairs whose answers are in the same style, so that the style says nothing
                          about which of the two is preferred
    accuracy_same_length  the same, among pairs of nearly equal length
    calibration_error     mean distance between sigmoid(margin), the probability that the model gives the answer it
                          prefers, and how often it is right, over ten bins of that probability (Guo et al.,
                          arXiv 1706.04599, equation 5)
    length_correlation    of the score with the length of an answer in tokens, over all answers (Pearson)

    A figure is left out if no pair contributes to it.

    >>> found = preference_metrics([(2.0, -1.0), (0.5, 1.0)], [(9, 3), (5, 5)], [False, True])
    >>> found["accuracy"], found["accuracy_same_style"], found["accuracy_same_length"]
    (0.5, 0.0, 0.0)
    """
    margins = [chosen - rejected for chosen, rejected in scores]
    is_right = [rightness(margin) for margin in margins]
    is_near = [abs(a - b) <= NEAR * max(a, b) for a, b in lengths]
    groups = {"accuracy": [True] * len(scores), "accuracy_same_style": same_style, "accuracy_same_length": is_near}
    metrics = {}
    for name, belongs in groups.items():
        found = [right for right, is_in in zip(is_right, belongs, strict=True) if is_in]
        metrics |= {name: fmean(found)} if found else {}
    metrics["margin"] = fmean(margins)
    metrics["calibration_error"] = _calibration_error([_sigmoid(abs(margin)) for margin in margins], is_right)
    correlation = _correlation([score for pair in scores for score in pair], [n for pair in lengths for n in pair])
    return metrics | ({} if correlation is None else {"length_correlation": correlation})


def rightness(margin: float) -> float:
    """Whether a pair is judged as it should be: 1 if the chosen answer has the higher score, half if both are equal."""
    return 1.0 if margin > 0 else 0.5 if margin == 0 else 0.0


def mean_log_probs(log_probs: list[float]) -> dict[str, float]:
    """The mean log-probs of the chosen and of the rejected answers; in each pair the chosen one is first.

    >>> mean_log_probs([-1.0, -5.0, -2.0, -6.0])
    {'log_prob_chosen': -1.5, 'log_prob_rejected': -5.5}
    """
    return {"log_prob_chosen": fmean(log_probs[::2]), "log_prob_rejected": fmean(log_probs[1::2])}


def _calibration_error(probabilities: list[float], is_right: list[float]) -> float:
    bins: dict[int, list[tuple[float, float]]] = {}
    for probability, right in zip(probabilities, is_right, strict=True):
        bins.setdefault(min(int(probability * BINS), BINS - 1), []).append((probability, right))
    gaps = [abs(sum(p - right for p, right in entries)) for entries in bins.values()]
    return sum(gaps) / len(probabilities)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _correlation(x: list[float], y: list[float]) -> float | None:
    x, y = ([value - fmean(values) for value in values] for values in (x, y))
    norm = math.hypot(*x) * math.hypot(*y)
    return sum(a * b for a, b in zip(x, y, strict=True)) / norm if norm else None
