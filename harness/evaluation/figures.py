"""All figures of an evaluation, computed from its completions: the content of results.json.

Every figure is a mean over Q questions of one number per question: whether the greedy answer is right, the share of
right samples, an estimate of pass@k. The n samples of one question are not independent of each other, but the numbers
of different questions are.

    standard error   SE = sqrt(sum_q (x_q - p)^2 / (Q - 1) / Q)          p: mean of the x_q; clustered by question
                                                                          (Miller 2024, arXiv 2411.00640, section 2.2)
    effective number m  = p (1 - p) / SE^2                                as many independent answers have the same SE
    interval            = Wilson's (1927) for the share p of m answers    the formula is in viewer/table.py

For answers that are right or wrong, one per question, m = Q and this is Wilson's interval. Unlike p +- 1.96 SE it stays
between 0 and 1, and does not shrink to a point if all answers are right: then m = Q (Dean and Pagano 2015, "Evaluating
confidence interval methods for binomial proportions in clustered surveys").
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from common.evaluate import pass_at_k
from common.keyed import keyed_generator
from viewer.table import wilson

GREEDY = -1  # the number of a question's greedy answer; its samples are 0, 1, 2, ...
DRAWS = 128  # for k < n, maj@k is a mean over at least this many subsets of k samples
RESAMPLES = 10_000  # of the bootstrap


class Answer(NamedTuple):
    """A completion as it is kept in memory: everything but its text."""

    correct: float | None  # None: the task has no right answers
    given: str | None  # its answer, in one spelling; None: no answer
    length: int
    is_cut_off: bool
    measured: dict[str, float | None]  # the other reward components, as reward_<name>, and the task's `describe` values


class Answers(NamedTuple):
    """The answers to all questions."""

    greedy: list[Answer]
    greedy_texts: list[str]
    sampled: list[list[Answer]]  # by question; empty lists with --num-samples 0


def read_answers(lines: Iterable[dict], rows: Sequence[dict], read: Callable[[dict, str], str | None]) -> Answers:
    """Parse the lines of completions.jsonl; `read` extracts the answer from a completion of a row's question."""
    answers = Answers([], [], [[] for _ in rows])
    for line in lines:
        others = {f"reward_{name}": value for name, value in line["rewards"].items() if name != "correct"}
        correct = line["correct"]
        if correct is None and "correct" in line["rewards"]:  # a task's NaN
            correct = 0.0
        given, is_cut_off = read(rows[line["question"]], line["text"]), line["finish_reason"] == "length"
        answer = Answer(correct, given, line["length"], is_cut_off, others | line["description"])
        if line["sample"] == GREEDY:
            answers.greedy.append(answer)
            answers.greedy_texts.append(line["text"])
        else:
            answers.sampled[line["question"]].append(answer)
    return answers


def figures(answers: Answers, seed: int, judged: Sequence[str] = ()) -> dict:
    """The sections `greedy` and `sampled` of results.json; `judged` are the reward components of a rubric."""
    has_right = answers.greedy[0].correct is not None
    greedy = {"accuracy": mean_with_interval([answer.correct for answer in answers.greedy])} if has_right else {}
    found = {"greedy": greedy | _judged([[answer] for answer in answers.greedy], judged) | means(answers.greedy)}
    if n := len(answers.sampled[0]):
        sampled = {"n": n} | (_sampled(answers.sampled, seed) if has_right else {}) | _judged(answers.sampled, judged)
        found["sampled"] = sampled | means([x for group in answers.sampled for x in group])
    return found


def _judged(groups: list[list[Answer]], names: Sequence[str]) -> dict:
    found = {name: mean_with_interval([mean_of(name, group) for group in groups], len(groups[0])) for name in names}
    return {"judged": found} if found else {}


def mean_of(component: str, group: Sequence[Answer]) -> float:
    """The mean of a reward component other than `correct`, over the answers to one question."""
    return sum(answer.measured[f"reward_{component}"] for answer in group) / len(group)


def _sampled(groups: list[list[Answer]], seed: int) -> dict:
    n = len(groups[0])
    correct = [[answer.correct for answer in group] for group in groups]
    num_right = [sum(value == 1 for value in values) for values in correct]
    found: dict = {
        "accuracy": mean_with_interval([sum(values) / n for values in correct], answers_per_question=n),
        "pass@k": {
            str(k): mean_with_interval([pass_at_k(n, c, k) for c in num_right], answers_per_question=n // k)
            for k in numbers_of_samples(n)
        },
    }
    # If right answers cannot be read, the task has another form of answer
    if all(answer.given is not None for group in groups for answer in group if answer.correct == 1):
        votes = [
            majority([answer.given for answer in group], values, seed, question)
            for question, (group, values) in enumerate(zip(groups, correct, strict=True))
        ]
        found["maj@k"] = {
            str(k): mean_with_interval([vote[k] for vote in votes], answers_per_question=n // k) for k in votes[0]
        }
    return found


def means(answers: Sequence[Answer]) -> dict:
    """Means over completions, and the distribution of their lengths."""
    names = list(dict.fromkeys(name for answer in answers for name in answer.measured))
    lengths = [answer.length for answer in answers]
    has_right = answers[0].correct is not None
    accuracy_if = {}  # among the completions that the task describes as 1, for descriptions that are 0 or 1
    for name in names:
        values = {answer.measured.get(name) for answer in answers}
        if has_right and not name.startswith("reward_") and values <= {0.0, 1.0} and 1.0 in values:
            accuracy_if[name] = _mean([answer.correct for answer in answers if answer.measured[name] == 1])
    found = {
        "means": {name: _mean([answer.measured.get(name) for answer in answers]) for name in names},
        "accuracy_if": accuracy_if,
        "length": {
            "mean": _mean(lengths),
            **{f"{share:.0%}": float(np.quantile(lengths, share)) for share in (0.05, 0.5, 0.95)},
        },
        "cut_off": _mean([answer.is_cut_off for answer in answers]),
    }
    if has_right:
        found["length"]["mean_if_right"] = _mean([answer.length for answer in answers if answer.correct == 1])
        found["length"]["mean_if_wrong"] = _mean([answer.length for answer in answers if answer.correct != 1])
        found["no_answer"] = _mean([answer.given is None for answer in answers])
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean; None if there are no numbers, or if any number is not finite: JSON cannot express that mean."""
    return sum(values) / len(values) if values and None not in values else None


def _estimate(value: float, low: float, high: float, x: np.ndarray) -> dict:
    """A mean over questions with its 95 % interval; a single question says nothing about others."""
    error = float(x.std(ddof=1) / len(x) ** 0.5) if len(x) > 1 else None
    return {"value": float(value), "low": float(low), "high": float(high), "standard_error": error}


def mean_with_interval(values: Sequence[float], answers_per_question: float = 1) -> dict:
    """The mean of one number between 0 and 1 per question.

    Args:
        answers_per_question: independent answers behind each number; Q times this many is the most that the
            effective number of answers can be. It is never below Q, the number of questions.

    >>> [round(number, 3) for number in mean_with_interval([1.0] * 8 + [0.0] * 2).values()]
    [0.8, 0.49, 0.943, 0.133]
    >>> [round(number, 3) for number in mean_with_interval([1.0] * 10).values()]
    [1.0, 0.722, 1.0, 0.0]
    """
    x = np.asarray(values, dtype=float)
    p, count = float(x.mean()), len(x)
    found = _estimate(p, 0.0, 1.0, x)
    error, most = found["standard_error"], count * max(1, answers_per_question)
    alike = most if count > 1 and 0 < p < 1 else count  # all numbers are equal
    effective = min(most, max(count, p * (1 - p) / error**2)) if error else alike
    low, high = wilson(p, effective)
    return found | {"low": max(0.0, min(low, p)), "high": min(1.0, max(high, p))}


def shares(tallies: list[dict[str, list[bool]]]) -> dict[str, dict]:
    """For each name, the share of true verdicts over all questions together; a question may have several verdicts.

    With s_q true verdicts out of n_q, the share is p = sum_q s_q / sum_q n_q, a ratio of sums. Its standard error is
    the standard error of the mean of x_q = p + (s_q - p n_q) Q / sum_q n_q. For one verdict per question x_q is s_q.

    >>> {name: round(found["value"], 3) for name, found in shares([{"a": [True]}, {"a": [False, False]}]).items()}
    {'a': 0.333}
    """
    found = {}
    for name in dict.fromkeys(name for tally in tallies for name in tally):
        verdicts = [tally[name] for tally in tallies if name in tally]
        right, sizes = (np.array(list(map(count, verdicts))) for count in (sum, len))
        p, size = float(right.sum() / sizes.sum()), float(sizes.mean())
        found[name] = mean_with_interval(p + (right - p * sizes) / size, answers_per_question=size) | {"value": p}
    return found


def difference(before: Sequence[float], after: Sequence[float], seed: int) -> dict:
    """The mean over questions of `after - before`, with an interval from a bootstrap over questions.

    Questions are drawn with replacement, `RESAMPLES` times, each with both of its numbers, so that the difficulty of a
    question for both policies cancels. The interval holds the middle 95 % of the means (the percentile bootstrap of
    Efron 1979).
    """
    gain = np.asarray(after, dtype=float) - np.asarray(before, dtype=float)
    generator = keyed_generator("bootstrap", seed)
    # 500 resamples at a time, to bound the memory
    drawn = (generator.integers(0, len(gain), size=(500, len(gain))) for _ in range(RESAMPLES // 500))
    resampled = np.concatenate([gain[chosen].mean(axis=1) for chosen in drawn])
    return _estimate(gain.mean(), *np.percentile(resampled, (2.5, 97.5)), gain)


def average(estimates: list[dict]) -> dict:
    """The mean over benchmarks with equal weights, with a 95 % interval.

        low = mean - sqrt(sum_b (p_b - low_b)^2) / B,      high likewise

    The distances between independent intervals and their estimates add up like standard errors (Newcombe 1998; Zou and
    Donner 2008, "Construction of confidence limits about effect measures").

    >>> {name: round(bound, 3) for name, bound in average([{"value": 0.5, "low": 0.4, "high": 0.6}] * 4).items()}
    {'value': 0.5, 'low': 0.45, 'high': 0.55}
    """
    count = len(estimates)
    value = sum(estimate["value"] for estimate in estimates) / count
    below, above = (
        sum((estimate["value"] - estimate[bound]) ** 2 for estimate in estimates) ** 0.5 / count
        for bound in ("low", "high")
    )
    return {"value": value, "low": value - below, "high": value + above}


def majority(answers: Sequence[str | None], correct: Sequence[float], seed: int, question: int) -> dict[int, float]:
    """maj@k of one question for k = 1, 2, 4, ..., n, by k (Wang et al. 2022, arXiv 2203.11171).

    Each of the k samples votes for its answer; a sample without an answer does not vote. If several answers tie for
    most votes, the share of them that is right counts. Without any vote the value is 0. For k = n this is exact. For k
    < n it is the mean over subsets of k samples: the samples are shuffled and cut into n // k subsets, repeatedly,
    until there are `DRAWS` subsets.

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
    # Samples with the same answer are usually all right or all wrong; if a task judges more than the answer, partly
    worth = np.bincount(votes, weights=np.asarray(correct, dtype=float)) / np.maximum(np.bincount(votes), 1)
    generator = keyed_generator("votes", seed, question)
    found = {}
    for k in numbers_of_samples(count):
        per_shuffle = count // k
        num_shuffles = -(-DRAWS // per_shuffle) if 1 < k < count else 1
        shuffles = [generator.permutation(votes) if k < count else votes for _ in range(num_shuffles)]
        subsets = np.concatenate([shuffle[: per_shuffle * k].reshape(per_shuffle, k) for shuffle in shuffles])
        found[k] = float(_winners(subsets, worth[: len(given)]).mean())
    return found


def _winners(subsets: np.ndarray, worth: np.ndarray) -> np.ndarray:
    """The share of the winning answers that is right: subsets (S, k) of answer numbers, worth (A,) -> (S,)."""
    width = len(worth) + 1  # the last column holds the samples that did not vote
    cells = subsets + np.arange(len(subsets))[:, None] * width
    counts = np.bincount(cells.ravel(), minlength=len(subsets) * width).reshape(len(subsets), width)[:, :-1]
    wins = (counts == counts.max(axis=1, keepdims=True)) & (counts > 0)
    return (wins * worth).sum(axis=1) / np.maximum(wins.sum(axis=1), 1)


def numbers_of_samples(n: int) -> list[int]:
    """
    >>> numbers_of_samples(8), numbers_of_samples(10)
    ([1, 2, 4, 8], [1, 2, 4, 8, 10])
    """
    powers = [2**exponent for exponent in range(n.bit_length())]
    return powers if not powers or powers[-1] == n else [*powers, n]
