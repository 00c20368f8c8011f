"""The same training with a verifier's reward, and with seven others: docs/without_a_verifier.md.

    python benchmarks/without_a_verifier.py              # every missing run, on one core; the page says how long
    python benchmarks/without_a_verifier.py --draw-only  # the figure and the table again, from the committed data

All runs have the same questions, steps and learning rate; only the reward differs. The true accuracy of the sampled
completions is logged in all of them, and rewarded in one. A finished run is one line of
benchmarks/results/without_a_verifier/runs.jsonl, and is not made again.
"""

import io
import json
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from time import time

import tyro
from load_file import load_file

from viewer.results import read_runs
from viewer.runs import rolling_means
from viewer.save_figure import save_figure

from harness.base.config import ROOT
from harness.base.files import replace_file
from harness.base.machine import describe_machine
from harness.task.pairs import PAIRS
from harness.task.rubric import read_rubric

RESULTS = ROOT / "benchmarks" / "results" / "without_a_verifier" / "runs.jsonl"
PICTURE = ROOT / "docs" / "without_a_verifier.png"
RUBRIC = ROOT / "data" / "rubrics" / "right.jsonl"
FLAGS = {"steps": 60, "prompts-per-step": 8, "lr": 1e-4, "kl-weight": 0, "eval-prompts": 64, "eval-every": 0}
FLAGS |= {"samples-every": 0, "checkpoint-every": 0, "device": "cpu"}
# name: label, experiment, and further flags; the words in capitals are places
REWARDS = {
    "verifier": ("a verifier", "experiment_base", ""),
    "likelihood": ("likelihood of the answer", "rewards/likelihood", ""),
    "majority": ("majority", "rewards/majority", ""),
    "reward_model": (
        "a reward model", "experiment_base", "--reward-weight correct=0 --reward-model RUNS/reward_model/pairs/final",
    ),
    "judge": (
        "a judge", "experiment_base", "--reward-weight correct=0 --judge RUBRIC --judge-model RUNS/sft/verdicts/final",
    ),
    "form": (
        "the form only", "experiment_base", "--reward-functions NO_ANSWERS --reward-weight correct=0 coin=0",
    ),
    "coin": (
        "a coin", "experiment_base", "--reward-functions NO_ANSWERS --reward-weight correct=0 has_thought=0",
    ),
    "judge_verifier": (
        "a judge and a verifier", "experiment_base", "--judge RUBRIC --judge-model RUNS/sft/verdicts/final",
    ),
}  # fmt: skip
ONLY_IN_TABLE = ("judge_verifier",)
SMOLLM2 = ROOT / "benchmarks" / "results" / "judge"
LINES = {"earned": ("#D55E00", "what the reward says"), "on_topic": ("#009E73", "names its topic")}
LINES = {"correct": ("#0072B2", "right (true accuracy)")} | LINES
LAST = 5  # steps of a final value


@dataclass(frozen=True, kw_only=True)
class Config:
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    rewards: tuple[str, ...] = tuple(REWARDS)
    runs_dir: str = "runs/without_a_verifier"
    draw_only: bool = False  # draw and print without training


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    load_file("rewards/likelihood/reference_answers.py", "reference_answers")  # which its train.py imports
    machine = describe_machine()  # now: the results change the checkout
    for seed in [] if config.draw_only else config.seeds:
        for name in config.rewards:
            if (name, seed) not in finished():
                row = {"reward": name, "seed": seed} | {key: machine[key] for key in ("commit", "machine")}
                row |= train(name, seed, Path(config.runs_dir).absolute() / str(seed))
                RESULTS.parent.mkdir(parents=True, exist_ok=True)
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(name, seed, f"{mean(row['correct'][-LAST:]):.3f}", f"{row['seconds']} s", flush=True)
    draw(finished())
    print(table(finished()))


def finished() -> dict[tuple[str, int], dict]:
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    return {(row["reward"], row["seed"]): row for row in map(json.loads, lines)}


def train(name: str, seed: int, runs: Path) -> dict:
    """One run: what it earned and how much of it was right, at each step."""
    _, experiment, words = REWARDS[name]
    own = ["--seed", str(seed), "--runs-dir", str(runs)]
    if name == "reward_model" and not (runs / "reward_model" / "pairs" / "final").exists():
        call("rewards/reward_model", [*own, "--name", "pairs"])
    if name.startswith("judge") and not (runs / "sft" / "verdicts" / "final").exists():
        verdicts = write_verdicts(runs / "verdicts.jsonl")
        call(
            "imitation/sft",
            [*own, "--name", "verdicts", "--model", "tiny", "--data", str(verdicts), "--eval-prompts", "64"],
        )
    places = {"RUNS": runs, "RUBRIC": RUBRIC, "NO_ANSWERS": ROOT / "benchmarks" / "no_answers.py"}
    for place, path in places.items():
        words = words.replace(place, str(path))
    given = [word for flag, value in FLAGS.items() for word in (f"--{flag}", str(value))]
    began = time()
    call(experiment, [*given, *own, "--name", name, *words.split()])
    path = runs / Path(experiment).name / name / "metrics.jsonl"
    steps = [row for row in map(json.loads, path.open(encoding="utf-8")) if "reward/correct" in row]
    keys = {"correct": "reward/correct", "earned": "reward/total", "length": "completion/length"}
    series = {kept: [float(f"{row.get(key, 0.0):.3g}") for row in steps] for kept, key in keys.items()}
    return {"seconds": round(time() - began), **series}


def call(experiment: str, arguments: list[str]) -> None:
    """Run a train.py in this process, in silence."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        load_file(f"{experiment}/train.py").main(arguments)


def write_verdicts(path: Path) -> Path:
    """The pairs of the reward model as conversations with a judge: yes to the chosen answer, no to the rejected one."""
    (criterion,) = read_rubric(str(RUBRIC))
    rows = [
        {"messages": [*criterion.conversation(pair["prompt"], pair[which]), {"role": "assistant", "content": verdict}]}
        for pair in map(json.loads, PAIRS.read_text(encoding="utf-8").splitlines())
        for which, verdict in (("chosen", "Yes"), ("rejected", "No"))
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return path


def draw(rows: dict) -> None:
    """A panel for each reward, with a line for each seed: the true accuracy, and what is earned."""
    import matplotlib

    matplotlib.use("Agg")  # works without a display
    import matplotlib.pyplot as plt

    figure, places = plt.subplots(2, 4, figsize=(7.2, 3.9), sharey=True)
    panels = {
        label: [row for (reward, _), row in rows.items() if reward == name]
        for name, (label, *_) in REWARDS.items()
        if name not in ONLY_IN_TABLE
    }
    panels["SmolLM2, judging itself"] = [of_smollm2()]
    for (label, runs), axes in zip(panels.items(), places.flat, strict=True):
        for row in runs:
            for key, (color, _) in LINES.items():
                if key in row and max(row[key]) <= 1:  # the score of a reward model has another scale
                    axes.plot(rolling_means(row[key], LAST), color=color, linewidth=1.0, alpha=0.8)
        axes.set_title(label, fontsize=8.5)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, len(runs[0]["correct"]) - 1 if runs else 60)
    places[0, 0].set_ylim(0, 1)
    for color, label in LINES.values():
        places[0, 0].plot([], color=color, label=label)
    figure.legend(*places[0, 0].get_legend_handles_labels(), loc="lower right", ncols=3, fontsize=8.5, frameon=False)
    figure.supxlabel("step", x=0.12, fontsize=9)
    figure.tight_layout()
    save_figure(figure, PICTURE)


def of_smollm2() -> dict[str, list[float]]:
    """The run of SmolLM2 against its own verdicts on instructions."""
    rows = read_runs(SMOLLM2)["short"].metrics.rows
    steps = [row for row in rows if "reward/short" in row]
    keys = {"correct": "reward/correct", "earned": "reward/short", "on_topic": "reward/on_topic"}
    return {name: [row[key] for row in steps] for name, key in keys.items()}


def table(rows: dict) -> str:
    lines = [
        "| reward | right at the start | highest | at the end | earned at the end | tokens, end |",
        "|---|---|---|---|---|---|",
    ]
    for name, (label, _, _) in REWARDS.items():
        runs = [row for (reward, _), row in rows.items() if reward == name]
        if not runs:
            continue
        columns = [
            [mean(run["correct"][:LAST]) for run in runs],
            [max(rolling_means(run["correct"], LAST)[LAST - 1 :]) for run in runs],
            *([mean(run[key][-LAST:]) for run in runs] for key in ("correct", "earned", "length")),
        ]
        digits = [2, 2, 2, 2, 0]
        cells = [
            f"{mean(values):.{n}f} ({min(values):.{n}f} to {max(values):.{n}f})"
            for n, values in zip(digits, columns, strict=True)
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
