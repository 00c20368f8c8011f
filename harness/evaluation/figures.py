"""All figures of an evaluation, from its completions: what results.json holds."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from common.evaluate import pass_at_k

from harness.evaluation.answers import GREEDY, Completion
from harness.evaluation.intervals import mean_with_interval
from harness.evaluation.votes import majority, numbers_of_samples

QUANTILES = (0.05, 0.5, 0.95)


class Answer(NamedTuple):
    """What is kept of a completion in memory: all but its text."""

    correct: float
    given: str | None  # what it answers, in one spelling; None: nothing
    length: int
    is_cut_off: bool
    measured: dict[str, float | None]  # the other reward components, as reward_<name>, and what the task describes


class Answers(NamedTuple):
    """Of all questions."""

    greedy: list[Answer]
    greedy_texts: list[str]
    sampled: list[list[Answer]]  # by question; empty lists with --num-samples 0


def read_answers(
    completions: Iterable[Completion], num_questions: int, read: Callable[[int, str], str | None]
) -> Answers:
    """`read` says what a completion of a question answers."""
    answers = Answers([], [], [[] for _ in range(num_questions)])
    for line in completions:
        others = {f"reward_{name}": value for name, value in line.rewards.items() if name != "correct"}
        given = read(line.question, line.text)
        correct = line.correct if line.correct is not None else 0.0  # a task's NaN
        answer = Answer(correct, given, line.length, line.finish_reason == "length", others | line.description)
        if line.sample == GREEDY:
            answers.greedy.append(answer)
            answers.greedy_texts.append(line.text)
        else:
            answers.sampled[line.question].append(answer)
    return answers


def figures(answers: Answers, seed: int) -> dict:
    """The sections `greedy` and `sampled` of results.json."""
    greedy = {"accuracy": mean_with_interval([answer.correct for answer in answers.greedy])._asdict()}
    found = {"greedy": greedy | means(answers.greedy)}
    if answers.sampled[0]:
        found["sampled"] = _sampled(answers.sampled, seed) | means([x for group in answers.sampled for x in group])
    return found


def _sampled(groups: list[list[Answer]], seed: int) -> dict:
    n = len(groups[0])
    by_question = [[answer.correct for answer in group] for group in groups]
    num_right = [sum(value == 1 for value in values) for values in by_question]
    mean = mean_with_interval([sum(values) / n for values in by_question], answers_per_question=n)
    found: dict = {"n": n, "accuracy": mean._asdict(), "pass@k": {}}
    for k in numbers_of_samples(n):
        passed = [pass_at_k(n, c, k) for c in num_right]
        found["pass@k"][str(k)] = mean_with_interval(passed, answers_per_question=n // k)._asdict()
    # Right answers that cannot be read: the task has another form of answer
    is_readable = all(answer.given is not None for group in groups for answer in group if answer.correct == 1)
    if is_readable:
        votes = [
            majority([answer.given for answer in group], values, seed, question)
            for question, (group, values) in enumerate(zip(groups, by_question, strict=True))
        ]
        found["maj@k"] = {
            str(k): mean_with_interval([vote[k] for vote in votes], answers_per_question=n // k)._asdict()
            for k in votes[0]
        }
    return found


def means(answers: Sequence[Answer]) -> dict:
    """Means over completions, and the distribution of their lengths."""
    names = list(dict.fromkeys(name for answer in answers for name in answer.measured))
    lengths = [answer.length for answer in answers]
    return {
        "means": {name: _mean([answer.measured.get(name) for answer in answers]) for name in names},
        "accuracy_if": _accuracy_if(answers, names),
        "length": {
            "mean": _mean(lengths),
            **{f"{share:.0%}": float(np.quantile(lengths, share)) for share in QUANTILES},
            "mean_if_right": _mean([answer.length for answer in answers if answer.correct == 1]),
            "mean_if_wrong": _mean([answer.length for answer in answers if answer.correct != 1]),
        },
        "cut_off": _mean([answer.is_cut_off for answer in answers]),
        "no_answer": _mean([answer.given is None for answer in answers]),
    }


def _accuracy_if(answers: Sequence[Answer], names: list[str]) -> dict[str, float]:
    """Accuracy among the completions that the task describes as 1, for descriptions that are 0 or 1."""
    found = {}
    for name in names:
        values = {answer.measured.get(name) for answer in answers}
        if not name.startswith("reward_") and values <= {0.0, 1.0} and 1.0 in values:
            found[name] = _mean([answer.correct for answer in answers if answer.measured[name] == 1])
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    """None of nothing, and of numbers one of which is not finite: JSON has no name for the mean."""
    return sum(values) / len(values) if values and None not in values else None
