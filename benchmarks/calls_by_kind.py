"""For which questions does the policy call? Share of conversations with a call, and accuracy, by kind of question.

    python benchmarks/calls_by_kind.py runs/experiment_multiturn_tool_calling/*

Reads the samples.jsonl of runs of experiment_multiturn_tool_calling, of their last twenty steps (all rows of every
tenth step, two groups of the others), and writes experiment_multiturn_tool_calling/results/calls_by_kind.csv.
"""

import csv
import json
import sys
from collections import defaultdict
from pathlib import Path

from common.evaluate import mean
from tasks.calculator import TRAIN_DATA

RESULTS = Path(__file__).resolve().parent.parent / "experiment_multiturn_tool_calling" / "results"
LAST = 20  # steps


def main(runs: list[str]) -> None:
    questions = [json.loads(line) for line in TRAIN_DATA.read_text(encoding="utf-8").splitlines()]
    kind_of = {row["question"]: row["kind"] for row in questions}
    table = []
    for run in map(Path, runs):
        rows = [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
        by_kind = defaultdict(list)
        for row in rows:
            if row["step"] > rows[-1]["step"] - LAST:
                by_kind[kind_of[row["question"]]].append((row["rewards"]["calls"] > 0, row["rewards"]["correct"]))
        for kind, values in sorted(by_kind.items()):
            called, correct = (round(mean(list(column)), 3) for column in zip(*values, strict=True))
            table.append({"run": run.name, "kind": kind, "rows": len(values), "called": called, "accuracy": correct})
    with (RESULTS / "calls_by_kind.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)
    print((RESULTS / "calls_by_kind.csv").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(sys.argv[1:])
