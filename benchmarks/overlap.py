"""What is gained by sampling while training: scale/asynchronous in one process, and with a process that samples.

    python benchmarks/overlap.py --plot docs/overlap.png      # fifteen minutes of two idle cores

A finished run is a line of benchmarks/results/asynchronous/overlap.jsonl, and is not repeated.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from harness.base.machine import describe_machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "asynchronous" / "overlap.jsonl"
LEARN = "--steps 40 --lr 2e-4 --kl-weight 0 --eval-prompts 1 --eval-every 0 --samples-every 0 --checkpoint-every 0"
WAYS = {
    "one process, one core": "--lag 0",
    "one process, two threads": "--lag 0 --threads 2",
    "a sampler, in turns": "--samplers 1 --max-staleness 0",
    "a sampler, at most 1 update behind": "--samplers 1 --max-staleness 1 --correction dppo",
    "a sampler, at most 4 updates behind": "--samplers 1 --max-staleness 4 --correction dppo",
}
ENOUGH, WINDOW = 0.9, 5  # sampled accuracy in training, its mean over so many steps
SHOWN = range(20, 26)  # steps in the picture


@dataclass(frozen=True, kw_only=True)
class Config:
    seeds: int = 3
    plot: Path | None = None  # draw what the two processes do in a few steps of seed 0


def measure(way: str, seed: int) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        flags = [*LEARN.split(), *WAYS[way].split(), "--seed", str(seed), "--runs-dir", directory, "--name", "x"]
        start = time.time()
        subprocess.run(
            [sys.executable, "scale/asynchronous/train.py", *flags], cwd=ROOT, check=True, capture_output=True
        )
        seconds, run = time.time() - start, Path(directory) / "asynchronous" / "x"
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
        lanes = run / "lanes.jsonl"
        lanes = [json.loads(line) for line in lanes.read_text("utf-8").splitlines()] if lanes.exists() else []
    steps = [row for row in rows if "time/step" in row]
    right = [row["reward/correct"] for row in steps]
    means = [statistics.mean(right[max(0, n - WINDOW) : n]) for n in range(1, len(right) + 1)]
    reached = next((n for n, mean in enumerate(means, 1) if n >= WINDOW and mean >= ENOUGH), None)
    times = {name: statistics.median(row[f"time/{name}"] for row in steps) for name in ("step", "sample", "update")}
    begin = lanes[0]["start"] if lanes else 0
    return {
        "way": way, "seed": seed, "seconds": seconds, **times, "steps_to_enough": reached,
        "seconds_to_enough": reached and sum(row["time/step"] for row in steps[:reached]),
        "staleness": [row.get("policy/staleness", 0) for row in steps], "correct": right,
        "lanes": [lane | {"start": lane["start"] - begin, "end": lane["end"] - begin} for lane in lanes],
    }  # fmt: skip


def busy(lanes: list[dict], name: str) -> float:
    """The share of the time between the first and the last span in which a process works."""
    spans = [(max(lane["start"], 0), lane["end"]) for lane in lanes if lane["lane"] == name]
    return sum(end - start for start, end in spans) / max(lane["end"] for lane in lanes)


def print_table(runs: list[dict]) -> None:
    print("| | seconds of a step | seconds to 0.9 | steps to 0.9 | updates behind | trainer, sampler busy |")
    print("|---" * 6 + "|")
    for way in WAYS:
        own = [run for run in runs if run["way"] == way]
        cells = [f"{statistics.median(run['step'] for run in own):.2f}"]
        for name, form in (("seconds_to_enough", ".0f"), ("steps_to_enough", ".0f")):
            cells.append(" ".join("never" if run[name] is None else format(run[name], form) for run in own))
        cells.append(f"{statistics.mean(age for run in own for age in run['staleness'][5:]):.2f}")
        shares = [[busy(run["lanes"], name) for run in own if run["lanes"]] for name in ("trainer", "sampler 0")]
        cells.append(", ".join(f"{statistics.mean(share):.0%}" for share in shares if share) or "")
        print(f"| {way} | " + " | ".join(cells) + " |")


def print_simulation(sample: float, train: float) -> None:
    """Seconds of a step with N samplers, if each has an equal part: the slower one decides, or the limit K.

    A rollout is begun when the update K + 1 before its own is done, so K + 1 steps take at least one of each.
    """
    print(
        "| samplers | " + " | ".join(f"K = {most}" for most in (0, 1, 4)) + " | trainer works |\n|---|---|---|---|---|"
    )
    for number in (1, 2, 4, 8, 16, 32, 64):
        part = sample / number
        steps = [max(train, part, (train + part) / (most + 1)) for most in (0, 1, 4)]
        print(f"| {number} | " + " | ".join(f"{step:.2f}" for step in steps) + f" | {train / steps[-1]:.0%} |")


def plot(runs: list[dict], path: Path) -> None:
    from matplotlib import pyplot as plt

    shown = [run for run in runs if run["lanes"] and run["seed"] == 0]
    figure, axes = plt.subplots(len(shown), figsize=(7, 1.2 + 1.1 * len(shown)), sharex=True, layout="constrained")
    for axis, run in zip(axes, shown, strict=True):
        spans = [lane for lane in run["lanes"] if lane["step"] in SHOWN]
        begin = min(lane["start"] for lane in spans if lane["lane"] == "sampler 0" and lane["step"] == SHOWN[0])
        for lane in spans:
            height = ["sampler 0", "trainer"].index(lane["lane"])
            step = lane["step"] - (lane["lane"] == "trainer")  # its span ends when the next step begins
            axis.barh(
                height, lane["end"] - lane["start"], left=lane["start"] - begin, height=0.8,
                color=f"C{step % 2}", edgecolor="white",
            )  # fmt: skip
            middle = (lane["start"] + lane["end"]) / 2 - begin
            axis.text(middle, height, step, ha="center", va="center", color="white", size=8)
        axis.set_yticks([0, 1], ["sampler", "trainer"])
        axis.set_title(run["way"], loc="left", fontsize=10)
        axis.margins(x=0.01)
    axes[-1].set_xlabel("seconds; numbers: the step whose questions are answered, or trained on")
    figure.savefig(path, dpi=110)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    lines = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() else []
    runs = [json.loads(line) for line in lines]
    for seed in range(config.seeds):
        for way in WAYS:  # interleaved: the machine is not always equally fast
            if not any((run["way"], run["seed"]) == (way, seed) for run in runs):
                runs.append(measure(way, seed) | describe_machine())
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(runs[-1]) + "\n")
    print_table(runs)
    alone = [run for run in runs if run["way"] == "one process, one core"]
    sample = statistics.median(run["sample"] for run in alone)
    print_simulation(sample, statistics.median(run["step"] for run in alone) - sample)
    if config.plot:
        plot(runs, config.plot)


if __name__ == "__main__":
    main()
