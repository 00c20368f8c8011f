"""The effect of each hyperparameter: experiment_base trained with one of them changed at a time, three seeds each.

    python benchmarks/hyperparameters.py --jobs 2            # all runs; the page says how long they took
    python benchmarks/hyperparameters.py --only top-p lr     # only the runs that change one of these flags
    python benchmarks/hyperparameters.py --draw-only         # the figure and the table again, from the committed data

Runs that already exist are not repeated, and results of missing runs are kept. Writes
benchmarks/results/hyperparameters/ (metrics.csv and runs.json) and docs/hyperparameters.png, and prints the table of
docs/hyperparameters.md.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import tyro

from viewer.groups import read_run
from viewer.results import MACHINE, KeptRun, keep_runs, read_runs
from viewer.runs import rolling_means
from viewer.save_figure import save_figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "hyperparameters"
PICTURE = ROOT / "docs" / "hyperparameters.png"
EXPERIMENT = "experiment_base"
DEFAULTS = {
    "group-size": 8, "lr": 5e-5, "kl-weight": 0.02, "clip-eps": 0.2, "epochs-per-step": 1, "temperature": 1.0,
    "prompts-per-step": 16, "minibatch-size": 128, "top-p": 1.0, "max-new-tokens": 96, "max-grad-norm": 1.0,
    "weight-decay": 0.0, "format-weight": 0.0,
}  # fmt: skip
# One panel each: heading, flag, values, and other differences from the defaults.
PANELS: list[tuple[str, str, tuple, dict]] = [
    ("group size", "group-size", (2, 4, 8, 16), {}),
    ("learning rate", "lr", (1.25e-5, 2.5e-5, 5e-5, 1e-4, 2e-4), {}),
    ("KL weight", "kl-weight", (0.0, 0.02, 0.5), {}),
    # one update per rollout never clips, so this panel makes four
    ("clip range, with four epochs", "clip-eps", (0.05, 0.2, 10.0), {"epochs-per-step": 4}),
    ("epochs per rollout", "epochs-per-step", (1, 2, 4), {}),
    ("temperature", "temperature", (0.6, 1.0, 1.3), {}),
    ("prompts per step", "prompts-per-step", (4, 16, 32), {}),
    ("minibatch size, of 128 rows", "minibatch-size", (32, 64, 128), {}),
    ("top-p", "top-p", (0.8, 0.95, 1.0), {}),
    ("completion budget", "max-new-tokens", (24, 48, 96), {}),
    ("maximal gradient norm", "max-grad-norm", (0.1, 1.0, 10.0), {}),
    ("weight decay", "weight-decay", (0.0, 0.1, 10.0), {}),
    ("weight of the format reward", "format-weight", (0.0, 0.2, 1.0), {}),
]
COLUMNS = ("reward/correct", "completion/length", "completion/reasoned", "loss/kl", "policy/entropy", "loss/grad_norm",
           "policy/clipped", "group/zero_reward_variance", "time/step")  # fmt: skip
WINDOW = 5  # steps over which every curve is averaged
REACHED = 0.8  # the table gives the step at which the sampled accuracy reaches this


@dataclass(frozen=True, kw_only=True)
class Config:
    seeds: tuple[int, ...] = (0, 1, 2)  # of the runs
    steps: int = 60  # of each run
    jobs: int = 1  # runs at the same time, each with one thread
    runs_dir: str = "runs/hyperparameters"  # where the runs are written
    only: tuple[str, ...] = ()  # flags: make only the runs that change one of them; none: all runs
    draw_only: bool = False  # draw and print without training


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    if not config.draw_only:
        with ThreadPoolExecutor(config.jobs) as pool:
            chosen = [settings for settings in all_settings() if not config.only or set(settings) & set(config.only)]
            wanted = [(settings, seed) for seed in config.seeds for settings in chosen]
            list(pool.map(lambda run: train(config, *run), wanted))
        write_results(config)
    curves, runs = read_results()
    draw(curves)
    print(table(curves, runs))


def all_settings() -> list[dict]:
    """The differences of each setting from the defaults; every setting once."""
    settings = [also | {flag: value} for _, flag, values, also in PANELS for value in values]
    changed = [{flag: value for flag, value in each.items() if value != DEFAULTS[flag]} for each in settings]
    return [each for index, each in enumerate(changed) if each not in changed[:index]]


def name_of(settings: dict) -> str:
    """The name of a setting: its flags that differ from the defaults, in the order of DEFAULTS."""
    changed = [
        f"{flag}={settings[flag]:g}" for flag in DEFAULTS if settings.get(flag, DEFAULTS[flag]) != DEFAULTS[flag]
    ]
    return ",".join(changed) or "default"


def train(config: Config, settings: dict, seed: int) -> None:
    """One run, in a separate process with one thread."""
    name = f"{name_of(settings)},seed={seed}"
    if (Path(config.runs_dir) / EXPERIMENT / name / "summary.json").exists():
        return
    flags = {flag: value for flag, value in settings.items() if flag != "format-weight"}
    if "format-weight" in settings:
        flags["reward-weight"] = f"format={settings['format-weight']:g}"
    flags |= {"steps": config.steps, "seed": seed, "name": name, "runs-dir": config.runs_dir}
    flags |= {"eval-every": 0, "samples-every": 0, "checkpoint-every": 0}
    command = [sys.executable, str(ROOT / EXPERIMENT / "train.py")]
    command += [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {name} failed:\n{done.stderr[-3000:]}")
    print(name, flush=True)


def write_results(config: Config) -> None:
    """Collect the values for the figure and the table from the runs; other results are kept."""
    runs = []
    for settings in all_settings():
        for seed in config.seeds:
            name = name_of(settings)
            place = Path(config.runs_dir) / EXPERIMENT / f"{name},seed={seed}"
            if (place / "summary.json").exists():
                run = read_run(place)
                about = {"setting": name, "seed": seed, "steps": config.steps}
                about |= {key: run.config[key] for key in MACHINE if key in run.config}
                kept = ("after", "seconds", "tokens_per_second", "peak_memory_bytes")
                rows = [row for row in run.metrics.rows if "reward/correct" in row]
                summary = {key: run.summary[key] for key in kept}
                runs.append(KeptRun(RESULTS / f"{name}-seed{seed}", about, summary, rows))
    keep_runs(RESULTS, runs, COLUMNS)


Curves = dict[str, dict[int, list[dict[str, float]]]]  # by setting and seed: one entry per step


def read_results() -> tuple[Curves, list[dict]]:
    curves: Curves = {}
    runs = []
    for run in read_runs(RESULTS).values():
        curves.setdefault(run.config["setting"], {})[run.config["seed"]] = run.metrics.rows
        runs.append(run.config | run.summary)
    return curves, runs


def panels_of(curves: Curves) -> list[tuple[str, str, tuple, dict]]:
    """The panels with results for every value."""
    return [panel for panel in PANELS if all(name_of(panel[3] | {panel[1]: value}) in curves for value in panel[2])]


def smooth(curve: list[dict[str, float]]) -> list[float]:
    """The sampled accuracy as a running mean over the last steps."""
    return rolling_means([entry["reward/correct"] for entry in curve], WINDOW)


def draw(curves: Curves) -> None:
    """One panel per hyperparameter: sampled accuracy over steps, mean and range of the seeds."""
    import matplotlib

    matplotlib.use("Agg")  # works without a display
    import matplotlib.pyplot as plt

    num_columns = 3
    panels = panels_of(curves)
    num_rows = -(-len(panels) // num_columns)
    figure, places = plt.subplots(num_rows, num_columns, figsize=(13, 3.1 * num_rows), sharex=True, sharey=True)
    for (heading, flag, values, also), axes in zip(panels, places.flat, strict=False):
        for index, value in enumerate(values):
            seeds = [smooth(curve) for curve in curves[name_of(also | {flag: value})].values()]
            color = plt.cm.viridis(0.92 * index / (len(values) - 1))
            steps = range(1, len(seeds[0]) + 1)
            is_default = value == DEFAULTS[flag] and not also
            label = f"{value:g}" + (" (default)" if is_default else "")
            means = [mean(step) for step in zip(*seeds, strict=True)]
            axes.plot(steps, means, color=color, label=label, linewidth=2.2 if is_default else 1.5)
            lowest, highest = ([f(step) for step in zip(*seeds, strict=True)] for f in (min, max))
            axes.fill_between(steps, lowest, highest, color=color, alpha=0.15, linewidth=0)
        axes.set_title(heading, fontsize=11)
        axes.legend(frameon=False, fontsize=9, loc="lower right")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    places[0, 0].set_ylim(0, 1.02)
    for axes in places[:, 0]:
        axes.set_ylabel("sampled accuracy, training questions", fontsize=9)
    for axes in places.flat[len(panels) :]:
        axes.set_axis_off()
    for axes in places.flat[len(panels) - num_columns : len(panels)]:  # the lowest panel of each column
        axes.set_xlabel("step")
        axes.tick_params(labelbottom=True)
    figure.tight_layout()
    save_figure(figure, PICTURE, dpi=100)


def table(curves: Curves, runs: list[dict]) -> str:
    """The table of docs/hyperparameters.md: one row per value, with means over the seeds."""
    lines = [
        f"| | value | step at {REACHED:g} | sampled, last 10 steps | greedy, held out | KL | entropy "
        "| groups with zero reward variance |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for heading, flag, values, also in panels_of(curves):
        for index, value in enumerate(values):
            setting = name_of(also | {flag: value})
            seeds = list(curves[setting].values())
            reached = [next((i + 1 for i, x in enumerate(smooth(curve)) if x >= REACHED), None) for curve in seeds]

            def last(key: str, seeds: list = seeds) -> float | None:
                found = [entry[key] for curve in seeds for entry in curve[-10:] if key in entry]
                return mean(found) if found else None

            greedy = mean(run["after"]["greedy/accuracy"] for run in runs if run["setting"] == setting)
            kl = last("loss/kl")
            cells = [
                heading if index == 0 else "",
                f"**{value:g}**" if value == DEFAULTS[flag] else f"{value:g}",
                ", ".join("-" if step is None else str(step) for step in reached),
                f"{last('reward/correct'):.3f}",
                f"{greedy:.3f}",
                "-" if kl is None else f"{kl:.3f}",
                f"{last('policy/entropy'):.3f}",
                f"{last('group/zero_reward_variance'):.2f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
