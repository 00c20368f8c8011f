"""maj@k: how often the answer that most of k samples give is right (Wang et al. 2022, arXiv 2203.11171)."""

from collections.abc import Sequence

import numpy as np

from common.keyed import keyed_generator

DRAWS = 128  # subsets of k samples, at least, that maj@k with k < n is a mean over


def majority(answers: Sequence[str | None], correct: Sequence[float], seed: int, question: int) -> dict[int, float]:
    """maj@k of one question for k = 1, 2, 4, ..., n, by k.

    Each of the k samples votes for the answer that it gives; one that gives none does not vote. Where several answers
    have most votes, one of them is taken at random: what counts is the share of them that is right. Without any vote
    the value is 0. For k = n this is exact. For k < n it is the mean over subsets of k samples: the samples are
    shuffled and cut into n // k subsets, as often as it takes to have `DRAWS` of them. The random numbers depend on the
    seed and the question only.

    >>> majority(["58", "60", "58", None], [1.0, 0.0, 1.0, 0.0], seed=0, question=0)[4]
    1.0
    >>> majority(["58", "60"], [1.0, 0.0], seed=0, question=0)
    {1: 0.5, 2: 0.5}
    """
    count = len(answers)
    given = list(dict.fromkeys(answer for answer in answers if answer is not None))
    if not given:
        return dict.fromkeys(numbers_of_samples(count), 0.0)
    index = {answer: number for number, answer in enumerate(given)} | {None: len(given)}
    votes = np.array([index[answer] for answer in answers])  # (n,)
    # Samples that give the same answer are right together, as a rule; where a task judges more than the answer, in part
    worth = np.bincount(votes, weights=np.asarray(correct, dtype=float)) / np.maximum(np.bincount(votes), 1)
    worth = worth[: len(given)]  # (A,)
    generator = keyed_generator("votes", seed, question)
    found = {}
    for k in numbers_of_samples(count):
        per_shuffle = count // k
        num_shuffles = -(-DRAWS // per_shuffle) if 1 < k < count else 1
        shuffles = [generator.permutation(votes) if k < count else votes for _ in range(num_shuffles)]
        subsets = np.concatenate([shuffle[: per_shuffle * k].reshape(per_shuffle, k) for shuffle in shuffles])
        found[k] = float(_winners(subsets, worth).mean())
    return found


def _winners(subsets: np.ndarray, worth: np.ndarray) -> np.ndarray:
    """The share of the winning answers that is right: subsets (S, k) of numbers of answers, worth (A,) -> (S,)."""
    num_answers = len(worth)
    cells = subsets + np.arange(len(subsets))[:, None] * (num_answers + 1)
    counts = np.bincount(cells.ravel(), minlength=len(subsets) * (num_answers + 1))
    counts = counts.reshape(len(subsets), num_answers + 1)[:, :num_answers]  # the last column has not voted
    wins = (counts == counts.max(axis=1, keepdims=True)) & (counts > 0)
    return (wins * worth).sum(axis=1) / np.maximum(wins.sum(axis=1), 1)


def numbers_of_samples(n: int) -> list[int]:
    """
    >>> numbers_of_samples(8), numbers_of_samples(10)
    ([1, 2, 4, 8], [1, 2, 4, 8, 10])
    """
    powers = [2**exponent for exponent in range(n.bit_length()) if 2**exponent <= n]
    return powers if not powers or powers[-1] == n else [*powers, n]
