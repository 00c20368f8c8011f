"""The runs of imitation/rejection/README.md: filters, and how often the policy is sampled anew.

    python benchmarks/rejection.py                               # all runs: about half an hour of one core
    python benchmarks/rejection.py --only all once-4 --seeds 0   # a part of them
    python benchmarks/rejection.py --table-only                  # the table, from the committed data

Every run samples 7,680 completions. Runs that already exist are not repeated, and results of missing ones are kept.
Writes imitation/rejection/results/, and prints the table of the README.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
import tyro

from common.chat import encode_prompt
from common.sampling import sample
from tasks import arithmetic as task
from viewer.groups import read_run
from viewer.results import KeptRun, keep_runs, read_runs
from viewer.runs import rolling_means

from harness.base.config import RunConfig
from harness.data.data import read_rows
from harness.models.loading import load_policy

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "imitation/rejection/results"
RUNS = {  # flags
    "all": {},
    "best-1": {"keep-per-question": 1},
    "once-4": {  # twenty samples of each question, and four epochs
        "steps": 1,
        "prompts-per-step": 384,
        "group-size": 20,
        "sft-batch-size": 48,
        "epochs-per-step": 4,
    },
}
COLUMNS = (
    "reward/correct", "completion/length", "completion/reasoned", "kept/share", "kept/easy", "policy/entropy",
    "loss/total", "loss/grad_norm", "eval/sampled/accuracy", "eval/greedy/accuracy", "time/step",
)  # fmt: skip
FIGURES = ("sampled/accuracy", "sampled/pass@8", "sampled/reasoned", "sampled/accuracy_reasoned", "sampled/length",
           "greedy/accuracy")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config:
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    only: tuple[str, ...] = tuple(RUNS)
    runs_dir: str = "runs"
    table_only: bool = False  # print without training


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    torch.set_num_threads(1)
    if not config.table_only:
        places = [train(config, name, seed) for name in config.only for seed in config.seeds]
        keep_runs(RESULTS, [result(place) for place in places], COLUMNS)
    print(table(list(read_runs(RESULTS).values())))


def train(config: Config, name: str, seed: int) -> Path:
    """One run, in a separate process with one thread."""
    place = Path(config.runs_dir) / "rejection" / f"{name}-seed{seed}"
    flags = {"seed": seed, "name": place.name, "runs-dir": config.runs_dir, "samples-every": 0, "checkpoint-every": 0}
    words = [sys.executable, str(ROOT / "imitation/rejection/train.py"), "--eval-every", "0"]
    for flag, value in (flags | RUNS[name]).items():
        words += [f"--{flag}", str(value)]
    if not (place / "summary.json").exists():
        subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
        print(place, flush=True)
    return place


def result(place: Path) -> KeptRun:
    run = read_run(place)
    about = {key: run.config[key] for key in ("seed", "command", "machine", "commit", "lr", "eval_prompts")}
    about["rows_per_step"] = run.config["prompts_per_step"] * run.config["group_size"]
    summary = {key: run.summary[key] for key in ("seconds", "peak_memory_bytes")}
    summary |= {"entropy_before": entropy("tiny", about["seed"]), "entropy": entropy(place / "final", about["seed"])}
    summary["reasoned_if_right_before"] = reasoned_if_right(place)
    summary |= {when: {key: run.summary[when][key] for key in FIGURES} for when in ("before", "after")}
    return KeptRun(RESULTS / place.name, about | {"run": place.name.rpartition("-")[0]}, summary, run.metrics.rows)


def reasoned_if_right(place: Path) -> float:
    """Before training: the share of reasoned answers among the right ones to a question, mean over questions."""
    right: dict[int, list[float]] = {}
    for question, correct, description in json.loads((place / "before.json").read_text(encoding="utf-8"))[2]:
        if correct == 1:
            right.setdefault(question, []).append(description["reasoned"])
    return mean(map(mean, right.values()))


def entropy(model: str | Path, seed: int) -> float:
    """Nats per token, an estimate: mean of -log p over the tokens of two sampled answers to each held-out question."""
    policy = load_policy(RunConfig(model=str(model), device="cpu", dtype="float32", attn_implementation="sdpa"))
    rows = read_rows(str(task.EVAL_DATA), task.FIELDS)[:256]
    prompts = [encode_prompt(policy.tokenizer, task.messages(row)) for row in rows]
    drawn = [
        row
        for start in range(0, len(rows), 64)
        for row in sample(policy, prompts[start : start + 64], 2, max_new_tokens=96, key=(seed, 0, start))
    ]
    return -sum(sum(row.sampler_log_probs) for row in drawn) / sum(row.num_action_tokens for row in drawn)


def table(runs: list[KeptRun]) -> str:
    """Mean (lowest to highest) over the seeds of every run."""
    heads = (
        "run",
        "seeds",
        "sampled",
        "greedy",
        "pass@8",
        "entropy",
        "reasoned",
        "step of 0.8",
        "thousand tokens",
        "kept/share",
        "kept/easy",
    )
    lines = [heads, ("---",) * len(heads)]
    for name in dict.fromkeys(run.config["run"] for run in runs):
        group = [run for run in runs if run.config["run"] == name]
        cells = [spread([run.summary["after"][key] for run in group]) for key in
                 ("sampled/accuracy", "greedy/accuracy", "sampled/pass@8")]  # fmt: skip
        cells.append(spread([run.summary["entropy"] for run in group], 4))
        cells.append(spread([run.summary["after"]["sampled/reasoned"] for run in group]))
        cells.append(", ".join(str(reached(run)) for run in group))
        cells.append(spread([tokens(run) / 1000 for run in group], 0))
        cells += [spread([of_kept(run, key) for run in group]) for key in ("kept/share", "kept/easy")]
        lines.append((name, str(len(group)), *cells))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def reached(run: KeptRun, accuracy: float = 0.8) -> int | None:
    """The first step at which the training accuracy, averaged over three steps, is this high."""
    curve = rolling_means([row["reward/correct"] for row in run.metrics.rows if "reward/correct" in row], 3)
    return next((step for step, value in enumerate(curve, start=1) if value >= accuracy), None)


def tokens(run: KeptRun) -> float:
    """Sampled by the training of a run."""
    lengths = [row["completion/length"] for row in run.metrics.rows if "completion/length" in row]
    return run.config["rows_per_step"] * sum(lengths)


def of_kept(run: KeptRun, key: str) -> float:
    """The mean of a metric over steps, each weighted by how many completions it has kept."""
    rows = [row for row in run.metrics.rows if key in row]
    weights = [1.0 if key == "kept/share" else row["kept/share"] for row in rows]
    return sum(w * row[key] for w, row in zip(weights, rows, strict=True)) / sum(weights)


def spread(values: list[float], digits: int = 3) -> str:
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
