"""How does a policy search? What its completions of Countdown's held-out problems hold, before and after training.

    python benchmarks/countdown_search.py before=tiny_countdown seed0=runs/experiment_base/countdown-0/final

Samples `--samples` completions of each of the first `--questions` held-out problems at temperature 1 from every policy,
reads the tries in them (`(7*5)+2=35+2=37<55`), and writes the entry search of
benchmarks/results/what_rl_teaches/counts.json. To compare with, it simulates a search that draws its tries at random
and makes no mistake. Policies that the file has already, with the same settings, are kept in it.
"""

import dataclasses
import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import tyro

from common.chat import decode, encode_prompt
from common.evaluate import EVALUATION, mean
from common.sampling import sample
from common.trajectory import Trajectory
from tasks import countdown
from tasks.grammars.countdown_grammar import tries
from viewer.results import read_json, write_json

from harness.base.config import PolicyConfig
from harness.data.data import read_rows
from harness.models.loading import load_policy

RESULTS = Path(__file__).resolve().parent / "results" / "what_rl_teaches" / "counts.json"
LINE = re.compile(r"(?P<expression>[^=]+)=(?P<step>[^=]+)=(?P<value>\d+)(?P<relation>[<>=])(?P<target>\d+)")
ROUGHLY = 10  # a value is near the target if it is at most this far away


class Line(NamedTuple):
    """One try of a completion, and what is right about it."""

    is_well_formed: bool
    uses_numbers: bool = False  # each number of the problem exactly once
    is_computed: bool = False  # the value is that of the expression
    is_compared: bool = False  # the relation is that of the value and the target
    is_hit: bool = False  # a valid expression of the target's value, whatever is written after it
    is_claimed: bool = False  # the relation says that the target is reached
    is_near: bool = False  # the exact value is near the target
    is_repeated: bool = False  # the same expression was tried before
    is_repeated_value: bool = False


@dataclass(frozen=True, kw_only=True)
class Config:
    policies: tyro.conf.Positional[tuple[str, ...]]  # NAME=MODEL: a name in the file, a bundled policy or a directory
    questions: int = 256  # of the held-out problems, from the first on
    samples: int = 8  # completions of each
    max_new_tokens: int = 160  # budget of a completion
    seed: int = 0  # of sampling
    out: str = str(RESULTS)  # JSON


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    torch.set_num_threads(1)
    out = Path(config.out)
    rows = read_rows(str(countdown.EVAL_DATA), countdown.FIELDS)[: config.questions]
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name not in ("policies", "out")}
    report = read_json(out, "search")
    if report.get("settings") != settings:
        report = {"settings": settings, "random_search": random_search(rows), "policies": {}}
    for name, _, model in (argument.partition("=") for argument in config.policies):
        policy = load_policy(PolicyConfig(model=model, device="cpu", seed=config.seed))
        prompts = [encode_prompt(policy.tokenizer, countdown.messages(row)) for row in rows]
        completions = sample(
            policy,
            prompts,
            config.samples,
            key=(config.seed, EVALUATION),
            prompt_index=list(range(len(rows))),
            max_new_tokens=config.max_new_tokens,
            generation_batch_size=256,
        )
        for completion in completions:
            completion.text = decode(policy.tokenizer, completion.completion_ids)
        report["policies"][name] = described = describe(rows, completions)
        print(name, json.dumps(described, indent=2))
        write_json(out, report, entry="search")


def describe(rows: list[dict], completions: list[Trajectory]) -> dict:
    """Shares of completions, and of the tries in them."""
    of_completions: dict[str, list[float]] = {}
    every: list[Line] = []
    by_position: dict[int, list[bool]] = {}
    for completion in completions:
        row, text = rows[completion.prompt_index], completion.text
        lines = read_lines(row, text)
        every += lines
        for position, line in enumerate(lines, start=1):
            by_position.setdefault(position, []).append(line.is_hit)
        reward, is_cut = countdown.reward(row, text), completion.finish_reason == "length"
        claims = [line for line in lines if line.is_claimed]
        found = {
            "correct": reward["correct"] == 1,
            "false_claim": reward["answered"] == 1 and reward["correct"] == 0,
            "gave_up": not is_cut and reward["answered"] == 0,
            "cut_off": is_cut,
            "found": any(line.is_hit for line in lines),
            "found_and_missed": any(line.is_hit for line in lines) and reward["correct"] == 0,
            "false_equation": any(not line.is_hit for line in claims),
        }
        for name, value in {**found, "tries": len(lines), "tokens": completion.num_action_tokens}.items():
            of_completions.setdefault(name, []).append(value)
    return {
        "completions": {name: round(mean(values), 4) for name, values in of_completions.items()},
        "tries": {name: round(mean([getattr(line, name) for line in every]), 4) for name in Line._fields},
        "hits_by_position": {
            position: [round(mean(hits), 4), len(hits)]
            for position, hits in sorted(by_position.items())
            if position <= 8
        },
        "signs_of_first_try": signs_of_first_tries(completions),
        "num_completions": len(completions),
        "num_tries": len(every),
    }


def read_lines(row: dict, text: str) -> list[Line]:
    """The tries of a thought; the last one only if it is complete.

    >>> row = {"nums": [7, 5, 2], "target": 37}
    >>> [line.is_hit for line in read_lines(row, "<think>(7+5)*2=12*2=24<37 (7*5)+2=35+2=37=37</think><answer>")]
    [False, True]
    """
    thought, end, _ = text.removeprefix("<think>").partition("</think>")
    parts = thought.split()
    if not end and not thought.endswith(" "):
        parts = parts[:-1]
    lines, seen, values = [], set(), set()
    for part in parts:
        match = LINE.fullmatch(part)
        read = countdown.read_expression(match["expression"]) if match else None
        if read is None:
            lines.append(Line(False))
            continue
        (exact, used), value, target = read, int(match["value"]), row["target"]
        is_valid = sorted(used) == sorted(row["nums"])
        relation = "<" if value < target else ">" if value > target else "="
        lines.append(
            Line(
                is_well_formed=True,
                uses_numbers=is_valid,
                is_computed=exact == value,
                is_compared=match["relation"] == relation and int(match["target"]) == target,
                is_hit=is_valid and exact == target,
                is_claimed=match["relation"] == "=",
                is_near=abs(exact - target) <= ROUGHLY,
                is_repeated=match["expression"] in seen,
                is_repeated_value=exact in values,
            )
        )
        seen.add(match["expression"])
        values.add(exact)
    return lines


def signs_of_first_tries(completions: list[Trajectory]) -> dict[str, float]:
    """The two signs of first tries, from left to right, and their shares."""
    counts = Counter()
    for completion in completions:
        expression = completion.text.removeprefix("<think>").partition("=")[0]
        counts["".join(re.findall(r"[-+*/]", expression))] += 1
    return {signs: round(count / len(completions), 4) for signs, count in counts.most_common(12)}


def random_search(rows: list[dict], repeats: int = 100, max_tries: int = 8) -> dict[str, float]:
    """What a search without mistakes finds that draws tries at random: from all of them, or no value twice."""
    rng = random.Random(0)
    first, found_again, found_left = [], {6: [], max_tries: []}, {6: [], max_tries: []}
    for row in rows * repeats:
        by_value = tries(tuple(row["nums"]))
        values, weights = list(by_value), [len(same) for same in by_value.values()]
        share = len(by_value[row["target"]]) / sum(weights)
        keys = sorted(values, key=lambda value: rng.expovariate(len(by_value[value])))  # weighted, without replacement
        first.append(share)
        for most in found_left:
            found_again[most].append(1 - (1 - share) ** most)
            found_left[most].append(row["target"] in keys[:most])
    return {
        "is_hit": round(mean(first), 4),
        **{f"found_in_{most}_with_repeats": round(mean(values), 4) for most, values in found_again.items()},
        **{f"found_in_{most}": round(mean(values), 4) for most, values in found_left.items()},
    }


if __name__ == "__main__":
    main()
