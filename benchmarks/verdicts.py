"""How long verdicts on mathematical answers take, and whether they are those of math-verify.

    python benchmarks/verdicts.py --data ../shared/data/math_benchmarks          # 10 minutes on two busy cores

`--data` holds the benchmarks as JSON lines (math500, minerva, olympiad_bench, aime24, amc: `problem`, `answer`). A step
has 125 of their problems with 8 answers each: the gold answer, another spelling of it, the same with a digit changed,
a gold answer of another problem, or a number. The workers have started, and judge one step after the other, as in a
run. "Again": the same answers once more. The variants take turns, each on the same steps. Writes
the entry verdicts of benchmarks/results/measurements.json.
"""

import json
import os
import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import math_verify
import tyro

from tasks.math import golds
from tasks.verdicts.judge import Judge
from viewer.results import write_json

from harness.run.machine import describe_machine

RESULTS = Path(__file__).resolve().parent / "results" / "measurements.json"
FILES = ("math500", "minerva", "olympiad_bench", "aime24", "amc")
PROBLEMS, ANSWERS = 125, 8
Case = tuple[list[str], str]


@dataclass(frozen=True)
class Config:
    data: Path  # the directory of the benchmarks
    steps: int = 7  # of a thousand answers each, for every number of workers
    pairs: int = 3000  # that are compared with math-verify alone, besides every gold answer with itself
    seed: int = 0


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    rows = [json.loads(line) for name in FILES for line in (config.data / f"{name}.jsonl").open(encoding="utf-8")]
    answers = [golds(row) for row in rows]
    figures = {"config": {"steps": config.steps, "pairs": config.pairs, "seed": config.seed}, "problems": len(rows)}
    figures["seconds"] = measure(config, answers)
    figures |= compare(config, answers) | {"measured": describe_machine()}
    write_json(RESULTS, figures, entry="verdicts")
    print(json.dumps({name: figures[name] for name in ("seconds", "agreement")}, indent=1))


def measure(config: Config, answers: list[list[str]]) -> dict:
    """Seconds of `prepare` for a thousand answers, per number of workers: of the clock, and of its own processor."""
    judges = {number: Judge(number_of_workers=number) for number in (1, 2)}
    taken: dict[int, list[dict]] = {number: [] for number in judges}
    for judge in judges.values():
        judge.verdict(["x+y"], "y+x")  # waits until one of them is ready
    for step in range(config.steps):
        cases = cases_of_step(answers, random.Random(f"{config.seed} {step}"))
        for number, judge in judges.items():
            own_began, began = time.process_time(), time.perf_counter()
            judge.num_asked = 0
            judge.prepare(cases)
            new = {"seconds": time.perf_counter() - began, "own processor": time.process_time() - own_began}
            new["asked"] = judge.num_asked
            began = time.perf_counter()
            judge.prepare(cases)
            again = time.perf_counter() - began
            verdicts = [judge.verdict(*case) for case in cases]
            counts = {"right": verdicts.count(True), "undecided": verdicts.count(None)}
            taken[number].append(new | {"seconds, again": again} | counts | {"load": os.getloadavg()[0]})
    for judge in judges.values():
        judge.close()
    return {
        f"{number} workers": {name: statistics.median(step[name] for step in found) for name in found[0]}
        | {"steps": found}
        for number, found in taken.items()
    }


def cases_of_step(answers: list[list[str]], generator: random.Random) -> list[Case]:
    problems = generator.sample(range(len(answers)), PROBLEMS)
    golds_of_answers = [answers[index] for index in problems for _ in range(ANSWERS)]
    return [(own, answer_to(own, answers, generator)) for own in golds_of_answers]


def answer_to(own: list[str], answers: list[list[str]], generator: random.Random) -> str:
    gold, kind = own[0].replace("$", ""), generator.random()
    if kind < 0.3:
        return gold
    if kind < 0.45:
        return respelled(gold)
    if kind < 0.75:
        return with_a_digit_changed(gold, generator)
    if kind < 0.9:
        return generator.choice(generator.choice(answers))
    return str(generator.randrange(200))


def respelled(gold: str) -> str:
    """The same value, written in another way."""
    if re.fullmatch(r"-?\d+", gold):
        return f"{gold}.0"
    text = re.sub(r"\\frac\{(\w+)\}\{(\w+)\}", r"\1/\2", gold)
    text = re.sub(r"\\sqrt\{(\w+)\}", r"\1^{1/2}", text)
    is_single = not any(sign in gold for sign in ",=")
    return f"1 \\cdot ({gold})" if text == gold and is_single else text


def with_a_digit_changed(gold: str, generator: random.Random) -> str:
    places = [place for place, letter in enumerate(gold) if letter.isdigit()]
    if not places:
        return f"{gold}+1"
    place = generator.choice(places)
    return gold[:place] + str((int(gold[place]) + generator.randint(1, 3)) % 10) + gold[place + 1 :]


def compare(config: Config, answers: list[list[str]]) -> dict:
    """Our verdicts beside those of math-verify on the same texts, with its own limit of 5 seconds."""
    generator = random.Random(config.seed)
    pairs = list(dict.fromkeys((gold, gold) for own in answers for gold in own))
    num_golds = len(pairs)
    while len(pairs) < num_golds + config.pairs:
        own = generator.choice(answers)
        pairs.append((generator.choice(own), answer_to(own, answers, generator)))
    judge = Judge()
    ours = [judge.verdict([gold], answer) for gold, answer in pairs]
    judge.close()
    began = time.process_time()
    theirs = [math_verify.verify(read(gold), read(answer)) for gold, answer in pairs]
    seconds = time.process_time() - began
    differ = [
        {"gold": gold, "answer": answer, "ours": our, "math-verify": their}
        for (gold, answer), our, their in zip(pairs, ours, theirs, strict=True)
        if our is not their
    ]
    both = list(zip(ours[num_golds:], theirs[num_golds:], strict=True))
    agreement = {
        "golds": num_golds,
        "golds accepted as their own answer": ours[:num_golds].count(True),
        "by math-verify": theirs[:num_golds].count(True),
        "pairs": len(both),
        "agree": sum(our is their for our, their in both),
        "right by ours only": both.count((True, False)),
        "right by math-verify only": both.count((False, True)),
        "undecided": len([our for our, _ in both if our is None]),
        "processor seconds of math-verify alone": seconds,
    }
    return {"agreement": agreement, "differ": differ}


def read(text: str) -> list:
    text = text.replace("\\$", "").replace("$", "")
    return math_verify.parse(f"\\boxed{{{text}}}")


if __name__ == "__main__":
    main()
