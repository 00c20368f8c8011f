"""The algorithms compared on the same work: GRPO, Dr. GRPO and their siblings, five seeds each.

    python benchmarks/algorithms.py --jobs 2                 # all runs; the page says how long they took
    python benchmarks/algorithms.py --work sixteen --only gspo --seeds 0
    python benchmarks/algorithms.py --variants --seeds 0 1 2 # the broken runs of the READMEs
    python benchmarks/algorithms.py --draw-only              # the figure and the tables again, from the committed data

Runs that already exist are not repeated, and results of missing runs are kept. Writes benchmarks/results/algorithms/
(metrics.csv and runs.json) and docs/algorithms.png, and prints the tables of docs/algorithms.md.
"""

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import tyro

from viewer.groups import read_run
from viewer.results import KeptRun, keep_runs, read_runs
from viewer.runs import rolling_means
from viewer.save_figure import save_figure

from harness.base.places import current_name, train_file

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "algorithms"
PICTURE = ROOT / "docs" / "algorithms.png"
ALGORITHMS = {
    "base": "GRPO", "drgrpo": "Dr. GRPO", "rloo": "RLOO", "maxrl": "MaxRL", "gspo": "GSPO", "cispo": "CISPO",
    "dapo": "DAPO",
}  # fmt: skip
NO_DAPO = {"clip-eps-high": 0.2, "max-rounds": 1, "reward-weight": "overlong=0"}  # the token mean is left
VARIANTS = {  # name: work, and the difference from the experiment that its name begins with
    "rloo-pairs": ("one", {"group-size": 2, "prompts-per-step": 64}),
    "gspo-kl": ("sixteen", {"kl-weight": 0.02}),
    "gspo-wide": ("sixteen", {"clip-eps": 0.2, "clip-eps-high": 0.2}),
    "cispo-low": ("sixteen", {"ratio-cap": 0.28}),
    "maxrl-offset": ("sixteen", {"reward-weight": "format=10"}),
    "dapo-token-mean": ("sixteen", NO_DAPO),
    "dapo-clip-higher": ("sixteen", NO_DAPO | {"clip-eps-high": 0.28}),
    "dapo-sampling": ("sixteen", NO_DAPO | {"max-rounds": 4}),
    "dapo-overlong": ("sixteen", NO_DAPO | {"reward-weight": "overlong=1"}),
}
WORK = {  # flags of train.py, the same for all algorithms
    "one": {"steps": 60, "epochs-per-step": 1, "minibatch-size": 128, "lr": 5e-5, "kl-weight": 0},
    "sixteen": {"steps": 15, "epochs-per-step": 4, "minibatch-size": 32, "lr": 5e-5, "kl-weight": 0},
    "long": {"steps": 40, "epochs-per-step": 1, "minibatch-size": 128, "lr": 1e-4, "kl-weight": 0,
             "data": "data/long_sums.jsonl", "eval-data": "data/long_sums_heldout.jsonl", "at-most": "num_terms=7",
             "completion-prefix": "<think>", "max-new-tokens": 160},
}  # fmt: skip
HEADINGS = {
    "one": "one update per rollout",
    "sixteen": "sixteen updates per rollout",
    "long": "sums of five to seven numbers, one update per rollout",
}
COLUMNS = (
    "reward/correct", "completion/length", "policy/entropy", "policy/clipped", "policy/capped", "loss/grad_norm",
    "group/zero_reward_variance", "time/step", "sampling/tokens", "sampling/groups", "eval/sampled/accuracy",
    "eval/greedy/accuracy",
)  # fmt: skip
FIGURES = ("sampled/accuracy", "sampled/pass@8", "greedy/accuracy", "sampled/length")  # of an evaluation
CPU_SHARE = "cpu_share.txt"  # in the directory of a run
WINDOW = 3  # steps over which curves are averaged
REACHED = 0.8  # the table gives when the sampled accuracy reaches this
NUM_ROWS = 128  # completions of a step without dynamic sampling


@dataclass(frozen=True, kw_only=True)
class Config:
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)  # of the runs
    work: tuple[str, ...] = tuple(WORK)  # one: one update per rollout; sixteen: sixteen; long: longer sums
    only: tuple[str, ...] = tuple(ALGORITHMS)  # algorithms
    variants: bool = False  # make the runs of VARIANTS instead
    jobs: int = 1  # runs at the same time, each with one thread
    runs_dir: str = "runs/algorithms"  # where the runs are written
    draw_only: bool = False  # draw and print without training


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    if not config.draw_only:
        with ThreadPoolExecutor(config.jobs) as pool:
            works = [(work, name) for work in config.work for name in config.only]
            works = [(work, name) for name, (work, _) in VARIANTS.items()] if config.variants else works
            wanted = [(work, seed, name) for seed in config.seeds for work, name in works]
            list(pool.map(lambda run: train(config, *run), wanted))
        write_results(config)
    runs = list(read_runs(RESULTS).values())
    draw(runs)
    for work, heading in HEADINGS.items():
        if any(run.config["work"] == work for run in runs):
            print(f"\n{heading}\n\n{table(runs, work)}")


def place_of(config: Config, work: str, seed: int, name: str) -> Path:
    """The directory of a run of an algorithm or a variant."""
    return Path(config.runs_dir) / current_name(f"experiment_{name.partition('-')[0]}") / f"{name}-{work}-seed{seed}"


def train(config: Config, work: str, seed: int, name: str) -> None:
    """One run, in a separate process with one thread."""
    place = place_of(config, work, seed, name)
    if (place / "summary.json").exists():
        return
    _, more = VARIANTS.get(name, ("", {}))
    flags = WORK[work] | more | {"seed": seed, "name": place.name, "runs-dir": config.runs_dir}
    flags |= {key: str(ROOT / flags[key]) for key in ("data", "eval-data") if key in flags}
    flags |= {"eval-every": 0, "samples-every": 0, "checkpoint-every": 0}
    command = [sys.executable, str(ROOT / train_file(place.parent.name))]
    command += [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    environment, began = {**os.environ, "OMP_NUM_THREADS": "1"}, time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        _, process.returncode, usage = os.wait4(process.pid, 0)
        if process.returncode:
            output.seek(0)
            sys.exit(f"error: {place} failed:\n{output.read()[-3000:]}")
    share = (usage.ru_utime + usage.ru_stime) / (time.perf_counter() - began)  # of a core, beside other work
    (place / CPU_SHARE).write_text(f"{share:.4f}\n")
    print(place, flush=True)


def write_results(config: Config) -> None:
    """Collect the values for the figure and the tables from the runs; other results are kept."""
    runs = []
    for work in WORK:
        for seed in config.seeds:
            for name in (*ALGORITHMS, *VARIANTS):
                place = place_of(config, work, seed, name)
                if (place / "summary.json").exists():
                    run = read_run(place)
                    about = {"algorithm": name, "work": work, "seed": seed, "eval_prompts": run.config["eval_prompts"]}
                    about |= {key: run.config[key] for key in ("machine", "commit")}  # versions: pyproject.toml
                    summary = {key: run.summary[key] for key in ("before", "after", "seconds", "peak_memory_bytes")}
                    summary["cpu_share"] = float((place / CPU_SHARE).read_text())
                    for when in ("before", "after"):
                        summary[when] = {key: value for key, value in summary[when].items() if key in FIGURES}
                    runs.append(KeptRun(RESULTS / place.name, about, summary, run.metrics.rows))
    keep_runs(RESULTS, runs, COLUMNS)


def steps_of(run: KeptRun) -> list[dict[str, float]]:
    """The metrics of each step, without the evaluations before and after."""
    return [row for row in run.metrics.rows if "reward/correct" in row]


def tokens(run: KeptRun) -> list[float]:
    """The tokens sampled up to each step, in thousands, including groups that are not trained on."""
    counts = (row.get("sampling/tokens", NUM_ROWS * row["completion/length"]) for row in steps_of(run))
    return list(itertools.accumulate(count / 1000 for count in counts))


def cpu_seconds(run: KeptRun) -> list[float]:
    """Processor time up to each step, without loading and evaluation."""
    return list(itertools.accumulate(run.summary["cpu_share"] * row["time/step"] for row in steps_of(run)))


def accuracy(run: KeptRun) -> list[float]:
    return rolling_means([row["reward/correct"] for row in steps_of(run)], WINDOW)


def runs_of(runs: list[KeptRun], work: str, name: str) -> list[KeptRun]:
    return [run for run in runs if (run.config["work"], run.config["algorithm"]) == (work, name)]


def draw(runs: list[KeptRun]) -> None:
    """For each kind of work, the sampled accuracy over steps and over sampled tokens: the mean over the seeds."""
    import matplotlib

    matplotlib.use("Agg")  # works without a display
    import matplotlib.pyplot as plt

    shown = [work for work in WORK if any(run.config["work"] == work for run in runs)]
    figure, places = plt.subplots(len(shown), 2, figsize=(11, 3.4 * len(shown)), sharey="row", squeeze=False)
    for work, (by_step, by_tokens) in zip(shown, places, strict=True):
        for number, (name, label) in enumerate(ALGORITHMS.items()):
            seeds = runs_of(runs, work, name)
            if not seeds:
                continue
            curves = list(zip(*map(accuracy, seeds), strict=True))
            means = [mean(step) for step in curves]
            steps = range(1, len(means) + 1)
            by_step.plot(steps, means, color=f"C{number}", label=label)
            by_step.fill_between(steps, list(map(min, curves)), list(map(max, curves)), color=f"C{number}", alpha=0.12)
            spent = [mean(step) for step in zip(*map(tokens, seeds), strict=True)]
            by_tokens.plot(spent, means, color=f"C{number}", label=label)
        by_step.set_title(HEADINGS[work], fontsize=10)
        by_step.set_ylabel("sampled accuracy, training questions", fontsize=9)
        by_step.set_xlabel("step")
        by_tokens.set_xlabel("sampled tokens (thousands)")
        for axes in (by_step, by_tokens):
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
    places[0, 1].legend(frameon=False, fontsize=9, loc="lower right")
    figure.tight_layout()
    save_figure(figure, PICTURE, dpi=100)


def table(runs: list[KeptRun], work: str) -> str:
    """One row per algorithm, with the mean over the seeds, and the lowest and the highest."""
    shown = [run for name in ALGORITHMS for run in runs_of(runs, work, name)]
    budget = min(tokens(run)[-1] for run in shown)
    seconds = min(cpu_seconds(run)[-1] for run in shown)
    lines = [
        f"| | accuracy after {budget:.0f} thousand sampled tokens | after {seconds:.0f} s of a core "
        f"| step at {REACHED:g} | held out, sampled | greedy | pass@8 "
        "| entropy | clipped | gradient norm | collapsed |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, label in [*ALGORITHMS.items(), *((name, name) for name in VARIANTS)]:
        if seeds := runs_of(runs, work, name):
            columns = zip(*(numbers(run, budget, seconds) for run in seeds), strict=True)
            cells = [label, *map(spread, columns), f"{sum(map(has_collapsed, seeds))} of {len(seeds)}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def numbers(run: KeptRun, budget: float, seconds: float) -> list[float | None]:
    """The values of the table's columns for one run."""
    curve, rows, after = accuracy(run), steps_of(run), run.summary["after"]

    def mean_of(*keys: str) -> float | None:
        found = [row[key] for row in rows for key in keys if key in row]
        return mean(found) if found else None

    return [
        last_within(curve, tokens(run), budget),
        last_within(curve, cpu_seconds(run), seconds),
        next((step for step, value in enumerate(curve, start=1) if value >= REACHED), None),
        after["sampled/accuracy"],
        after["greedy/accuracy"],
        after["sampled/pass@8"],
        rows[-1]["policy/entropy"],
        mean_of("policy/clipped", "policy/capped"),
        mean_of("loss/grad_norm"),
    ]


def last_within(curve: list[float], costs: list[float], budget: float) -> float:
    """The accuracy at the last step whose cost is within the budget."""
    return [value for value, cost in zip(curve, costs, strict=True) if cost <= budget + 1e-9][-1]


def has_collapsed(run: KeptRun) -> bool:
    """Whether the sampled accuracy ends more than 0.2 below its highest value."""
    return accuracy(run)[-1] < max(accuracy(run)) - 0.2


def spread(values: Sequence[float | None]) -> str:
    """The mean, and the lowest and highest value; steps that are never reached are "-"."""
    found = [value for value in values if value is not None]
    if len(found) < len(values):
        return ", ".join("-" if value is None else f"{value:g}" for value in values) if found else "-"
    if not any(found):
        return "0"
    if all(isinstance(value, int) for value in found):
        return f"{mean(found):.1f} ({min(found)} to {max(found)})"
    return f"{mean(found):.3f} ({min(found):.3f} to {max(found):.3f})"


if __name__ == "__main__":
    main()
