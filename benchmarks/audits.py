"""What the audit of data finds in published files: in each of them, and in what two of them share.

    python benchmarks/audits.py                   # a minute, one thread; writes the entry audits of
                                                  # benchmarks/results/measurements.json

The files are GSM8K's and those of the evaluation suite of sail-sg/understand-r1-zero. In a pair, the first file is for
training and the second one for evaluation, and only what they share is kept: the rest is in the report of each file.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from tasks.audit.examine_rows import examine
from viewer.results import write_json

from harness.base.config import RESOLVED, RunConfig

RESULTS = Path(__file__).resolve().parent / "results" / "measurements.json"
BENCHMARKS = ("asdiv", "math500", "aime24", "amc", "minerva", "olympiad_bench")
TRAINING = ("asdiv", "math500")  # the first ones: each is compared with those that follow it


@dataclass(frozen=True, kw_only=True)
class Config:
    data_dir: str = "../shared/data"  # where gsm8k/ and math_benchmarks/ are


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    found = {"gsm8k": audit("gsm8k", f"{config.data_dir}/gsm8k/train.jsonl")}  # and test.jsonl beside it
    place = f"{config.data_dir}/math_benchmarks"
    found |= {name: audit("math", f"{place}/{name}.jsonl") for name in BENCHMARKS}
    for first, second in itertools.combinations(BENCHMARKS, 2):
        if first in TRAINING:
            report = audit("math", f"{place}/{first}.jsonl", f"{place}/{second}.jsonl")
            shared = [finding for finding in report["findings"] if finding["name"].startswith("shared_")]
            found[f"{first}_{second}"] = {"sources": report["sources"], "findings": shared}
    write_json(RESULTS, found, entry="audits")


def audit(task: str, data: str, eval_data: str | None = None) -> dict:
    settings = RunConfig(task=task, data=data, eval_data=eval_data)
    return examine(settings, RESOLVED[settings.kind]["max_new_tokens"])


if __name__ == "__main__":
    main()
