"""What sampling one step ahead gains: seconds per step with --steps-ahead 0 and 1, engine and trainer on a core each.

    python benchmarks/engine_ahead.py --engine-url http://127.0.0.1:8000       # ten minutes on an idle machine

The server is started before, on the bundled policy and bound to core 1: `taskset -c 1` before the command in the README
of experiment_engine.

Runs of experiment_engine with and without take turns; the trainer is bound to core 0, and the server should be bound to
another one. Both train the bundled policy with the same questions and the same number of updates. Seconds are those of
the steps after the first five: wall-clock, since waiting is what this is about, so the machine must be idle. A ratio is
the median of the rounds' ratios. Writes the entry engine_ahead of benchmarks/results/measurements.json.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tyro

from viewer.results import write_json

from harness.base.config import ROOT
from harness.run.machine import describe_machine

RESULTS = ROOT / "benchmarks" / "results" / "measurements.json"
FIRST = 6  # step that counts
PHASES = ("step", "sample", "log_probs", "update", "generation", "weights")


@dataclass(frozen=True, kw_only=True)
class Command:
    engine_url: str  # address of a float32 engine of the bundled policy, on a core of its own
    core: int = 0  # of the trainer
    rounds: int = 5  # in each of which both ways take their turn
    steps: int = 30  # of a run


def main(arguments: Sequence[str] | None = None) -> None:
    command = tyro.cli(Command, args=arguments, description=__doc__)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(command.rounds):
            found = {}
            for ahead in (0, 1):
                name = f"round{number}_ahead{ahead}"
                train(command, Path(folder), name, ahead, seed=number)
                found[str(ahead)] = seconds_of(Path(folder) / "experiment_engine" / name)
            rounds.append(found)
            print(json.dumps(found), flush=True)
    medians = {ahead: {name: median(row[ahead][name] for row in rounds) for name in PHASES} for ahead in ("0", "1")}
    ratios = [row["0"]["step"] / row["1"]["step"] for row in rounds]
    print(f"a step takes {medians['0']['step']:.2f} s, one step ahead {medians['1']['step']:.2f} s")
    print(f"one step ahead is {median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})")
    results = {"rounds": rounds, "medians": medians, "ratio": median(ratios), "ratios": ratios}
    results |= {"command": sys.argv, "steps": command.steps} | describe_machine()
    write_json(RESULTS, results, entry="engine_ahead")


def train(command: Command, folder: Path, name: str, ahead: int, seed: int) -> None:
    words = ["taskset", "-c", str(command.core), sys.executable, str(ROOT / "experiment_engine" / "train.py")]
    words += ["--engine-url", command.engine_url, "--steps-ahead", str(ahead), "--steps", str(command.steps)]
    words += ["--seed", str(seed), "--name", name, "--runs-dir", str(folder)]
    words += ["--eval-every", "0", "--eval-prompts", "8", "--checkpoint-every", "0", "--samples-every", "0"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def seconds_of(run: Path) -> dict[str, float]:
    """By phase, the median over the steps that count."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "time/step" in row and row["step"] >= FIRST]
    return {name: median(row[f"time/{name}"] for row in steps) for name in PHASES}


if __name__ == "__main__":
    main()
