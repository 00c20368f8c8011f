"""How often 95 % intervals of an evaluation hold the true value, on made-up questions whose truth is known.

    python benchmarks/intervals.py                 # a minute

Each evaluation draws Q questions; a question is answered rightly with a probability of its own, drawn from a beta
distribution, or with the same one. Four intervals of the same figure are compared: Wilson's as if all Q n answers were
independent; mean +- 1.96 standard errors over questions (Miller 2024); the middle 95 % of a bootstrap over questions;
and that of harness/evaluation/intervals.py. Writes the entry intervals of benchmarks/results/measurements.json; --table
prints it for docs/evaluate.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, lgamma
from pathlib import Path

import numpy as np
import tyro

from common.evaluate import pass_at_k
from common.keyed import keyed_generator
from viewer.results import read_json, write_json
from viewer.table import Z, wilson

from harness.evaluation.intervals import mean_with_interval
from harness.run.machine import describe_machine

RESULTS = Path(__file__).resolve().parent / "results" / "measurements.json"
SAMPLES = 8
RESAMPLES = 300
QUESTIONS = {  # the beta distribution of a question's probability of a right answer; one number: all questions alike
    "unequal, mean 0.4": (0.4, 0.6),
    "unequal, mean 0.95": (1.9, 0.1),
    "alike, 0.4": (0.4,),
}
METHODS = ("independent answers", "mean +- 1.96 SE", "bootstrap", "evaluate.py")
Interval = tuple[float, float]


@dataclass(frozen=True)
class Config:
    repeats: int = 500  # evaluations per row
    table: bool = False  # print the committed figures and measure nothing


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,))
    if not config.table:
        rows = [
            {"questions": kind, "Q": count, "figure": figure, **coverage(kind, count, figure, config.repeats)}
            for kind in QUESTIONS
            for count in (30, 256)
            for figure in ("mean@1", f"mean@{SAMPLES}", f"pass@{SAMPLES}")
        ]
        found = {"repeats": config.repeats, "rows": rows, "measured": describe_machine()}
        write_json(RESULTS, found, entry="intervals")
    print(table())


def coverage(kind: str, count: int, figure: str, repeats: int) -> dict[str, float]:
    """The share of evaluations whose interval holds the truth, by method."""
    generator = keyed_generator(f"coverage of {figure}, {kind}", count)
    n = 1 if figure == "mean@1" else SAMPLES
    truth = true_value(kind, figure)
    held = dict.fromkeys(METHODS, 0)
    for _ in range(repeats):
        values = draw(generator, QUESTIONS[kind], count, n, is_pass=figure.startswith("pass"))
        for method, (low, high) in zip(METHODS, intervals(values, n, figure, generator), strict=True):
            held[method] += low - 1e-12 <= truth <= high + 1e-12
    return {method: number / repeats for method, number in held.items()}


def draw(generator: np.random.Generator, shape: tuple[float, ...], count: int, n: int, is_pass: bool) -> np.ndarray:
    """One number per question: the share of right answers, or pass@n."""
    ability = generator.beta(*shape, size=count) if len(shape) == 2 else np.full(count, shape[0])
    num_right = generator.binomial(n, ability)
    return np.array([pass_at_k(n, c, n) for c in num_right.tolist()]) if is_pass else num_right / n


def true_value(kind: str, figure: str) -> float:
    shape = QUESTIONS[kind]
    if figure.startswith("mean"):
        return shape[0] / sum(shape) if len(shape) == 2 else shape[0]
    if len(shape) == 1:
        return 1 - (1 - shape[0]) ** SAMPLES
    a, b = shape  # the mean of (1 - p)^n is B(a, b + n) / B(a, b)
    return 1 - exp(lgamma(b + SAMPLES) - lgamma(a + b + SAMPLES) + lgamma(a + b) - lgamma(b))


def intervals(values: np.ndarray, n: int, figure: str, generator: np.random.Generator) -> tuple[Interval, ...]:
    """In the order of `METHODS`."""
    count, mean = len(values), float(values.mean())
    error = float(values.std(ddof=1)) / count**0.5
    weights = generator.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    own = mean_with_interval(values.tolist(), answers_per_question=n if figure.startswith("mean") else 1)
    return (
        wilson(mean, count * n if figure.startswith("mean") else count),
        (mean - Z * error, mean + Z * error),
        tuple(np.percentile(weights @ values / count, (2.5, 97.5))),
        (own.low, own.high),
    )


def table() -> str:
    """As docs/evaluate.md has it."""
    rows = read_json(RESULTS, "intervals")["rows"]
    lines = ["| questions | Q | figure | " + " | ".join(METHODS) + " |", "|---" * (3 + len(METHODS)) + "|"]
    for row in rows:
        cells = [f"{row[method]:.1%}" for method in METHODS]
        lines.append(f"| {row['questions']} | {row['Q']} | {row['figure']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
