"""What samples of older weights do to training: lags, learning rates and corrections, and other algorithms at lag 4.

    python benchmarks/asynchronous.py                          # every missing run, on one core; the page says how long
    python benchmarks/asynchronous.py --part grid --seeds 0    # only some of them
    python benchmarks/asynchronous.py --draw-only              # the figures and tables again, from the committed data

A finished run is one line of benchmarks/results/asynchronous/runs.jsonl, and is not made again; neither are those that
scale/asynchronous/results has. So the command can be stopped at any time. Draws docs/asynchronous.png and
docs/asynchronous_grid.png, and prints the tables of docs/asynchronous.md.
"""

import io
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Literal, NamedTuple
from unittest.mock import patch

import tyro
from load_file import load_file

from viewer.results import read_runs
from viewer.runs import rolling_means
from viewer.save_figure import save_figure

from harness.base.machine import describe_machine
from harness.base.places import train_file

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "asynchronous" / "runs.jsonl"
PICTURE, GRID = ROOT / "docs" / "asynchronous.png", ROOT / "docs" / "asynchronous_grid.png"
FOLDER = ROOT / "scale" / "asynchronous"
LAGS, LR = (0, 1, 2, 4, 8, 16), 2e-4
GRID_LAGS, RATES = (1, 4, 8, 16), (2e-4, 4e-4, 1e-4)
CORRECTIONS = ("none", "decoupled", "tis", "icepop", "clip", "dppo", "sequence_mask")
NAMES = {"none": "no correction", "sequence_mask": "sequence mask", None: "on-policy"}  # in the figure
ALGORITHMS = {"drgrpo": "Dr. GRPO", "rloo": "RLOO", "maxrl": "MaxRL", "gspo": "GSPO", "cispo": "CISPO", "dapo": "DAPO"}
FLAGS = {"steps": 40, "kl-weight": 0, "eval-prompts": 1, "eval-every": 0, "samples-every": 0, "checkpoint-every": 0}
COLORS = {False: "#0072b2", True: "#d55e00"}  # runs that learn, and runs that collapse
LAST = 5  # steps: the final accuracy is their mean


@dataclass(frozen=True, kw_only=True)
class Config:
    part: tuple[Literal["lags", "grid", "algorithms"], ...] = ("lags", "grid", "algorithms")  # which runs
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)  # of the runs; grid and algorithms have 0 to 2
    draw_only: bool = False  # draw and print without training


class Setting(NamedTuple):
    """Of a run; `base` is scale/asynchronous, and another algorithm has the sampler's log-probs in its ratio."""

    algorithm: str
    correction: str
    lag: int
    lr: float
    seed: int


Rows = dict[Setting, dict]  # of each run: the accuracy of every step, and more


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    load_file("scale/asynchronous/lagging_sampler.py", "lagging_sampler")  # which train.py imports
    machine = describe_machine()  # now: the results change the checkout
    for setting in [] if config.draw_only else wanted(config):
        if setting not in read_rows():
            row = setting._asdict() | {key: machine[key] for key in ("commit", "machine")} | train(setting)
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(*setting, final(row), flush=True)
    rows = read_rows()
    draw(rows)
    print(f"{lag_table(rows)}\n\n{algorithm_table(rows)}")


def wanted(config: Config) -> list[Setting]:
    """The runs in the order in which they are made: what is finished is a picture with fewer seeds."""
    lags = [Setting("base", "none", lag, LR, seed) for seed in range(5) for lag in LAGS]
    grid = [
        Setting("base", correction, lag, lr, seed)
        for lr in RATES
        for seed in range(3)
        for correction in CORRECTIONS
        for lag in (GRID_LAGS if correction != "none" else (0, *GRID_LAGS))
    ]
    others = [Setting(name, "sampler", lag, LR, seed) for seed in range(3) for name in ALGORITHMS for lag in (0, 4)]
    parts = {"lags": lags, "grid": grid, "algorithms": others}
    runs = dict.fromkeys(setting for part in config.part for setting in parts[part])
    return [setting for setting in runs if setting.seed in config.seeds]


def train(setting: Setting) -> dict:
    """One run in this process: the accuracy of each step, the gap to the sampler, and the seconds."""
    path = train_file("asynchronous" if setting.algorithm == "base" else f"experiment_{setting.algorithm}")
    module = load_file(path)
    flags, changes, began = FLAGS | {"lr": setting.lr, "seed": setting.seed}, {}, time.time()
    if setting.algorithm == "base":
        flags |= {"lag": setting.lag, "correction": setting.correction}
    else:
        flags |= {"epochs-per-step": 1, "minibatch-size": 128}
        changes = {"sample": late(setting.lag), "old_log_probs": lambda *args: args[-1].sampler_log_probs}
    with tempfile.TemporaryDirectory() as folder, patch.dict(vars(module), changes):
        flags |= {"runs-dir": folder, "name": "run"}
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            module.main([word for flag, value in flags.items() for word in (f"--{flag}", str(value))])
        (metrics,) = Path(folder).glob("*/run/metrics.jsonl")
        steps = [row for row in map(json.loads, metrics.open(encoding="utf-8")) if "reward/correct" in row]
    return {"seconds": round(time.time() - began), **series(steps)}


def series(steps: list[dict]) -> dict[str, list[float]]:
    """What is kept of each step."""
    keys = {"correct": "reward/correct", "gap": "policy/sampling_log_prob_difference"}
    return {name: [float(f"{row.get(key, 0):.3g}") for row in steps] for name, key in keys.items()}


def late(lag: int):
    """In place of `sample` in a train.py: it samples with the weights that the policy had `lag` steps ago."""
    from lagging_sampler import LaggingSampler

    sampler, newest = None, 0

    def sample(policy, *arguments, key, **settings):
        nonlocal sampler, newest
        sampler, step = sampler or LaggingSampler(policy, lag + 1), key[1]
        if step > newest:  # a step can sample several times
            sampler.keep()  # so the newest of the kept weights are those of now
            newest = step
        return sampler.sample(*arguments, key=key, **settings)

    return sample


def read_rows() -> Rows:
    """All finished runs by their settings."""
    rows = {}
    for run in read_runs(FOLDER / "results").values():
        if not run.config["swap_every"] and not run.config["sampler_dtype"]:
            setting = Setting("base", *(run.config[key] for key in Setting._fields[1:]))
            steps = [row for row in run.metrics.rows if "reward/correct" in row]
            rows[setting] = run.config | series(steps)
    for line in RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []:
        row = json.loads(line)
        rows[Setting(*(row[key] for key in Setting._fields))] = row
    return rows


def final(row: dict) -> float:
    return mean(row["correct"][-LAST:])


def step_at(run: dict, accuracy: float) -> int | None:
    return next((step for step, correct in enumerate(run["correct"], 1) if correct >= accuracy), None)


def has_collapsed(row: dict) -> bool:
    """Whether the accuracy, a mean of LAST steps, ends more than 0.2 below its highest value."""
    return final(row) < max(rolling_means(row["correct"], LAST)[LAST - 1 :]) - 0.2


def runs_of(rows: Rows, algorithm: str, correction: str, lag: int, lr: float, num_seeds: int = 3) -> list[dict]:
    settings = (Setting(algorithm, correction, lag, lr, seed) for seed in range(num_seeds))
    return [rows[setting] for setting in settings if setting in rows]


def draw(rows: Rows) -> None:
    """A panel for each lag, with a line for each seed; and one for each correction, lags by learning rates."""
    import matplotlib

    matplotlib.use("Agg")  # works without a display
    import matplotlib.pyplot as plt

    figure, places = plt.subplots(2, 3, figsize=(5.6, 3.8), sharex=True, sharey=True)
    for lag, axes in zip(LAGS, places.flat, strict=True):
        runs = runs_of(rows, "base", "none", lag, LR, 5)
        for run in runs:
            axes.plot(range(1, 41), run["correct"], color=COLORS[has_collapsed(run)], linewidth=1.1, alpha=0.85)
        axes.set_title(f"lag {lag}: {sum(map(has_collapsed, runs))} of {len(runs)} collapse", fontsize=9.5)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    places[0, 0].set_ylim(0, 1)
    figure.supylabel("accuracy of the samples", fontsize=9)
    figure.supxlabel("step", fontsize=9)
    figure.tight_layout(pad=0.5)
    save_figure(figure, PICTURE, dpi=160)

    rates = sorted({setting.lr for setting in rows} & {*RATES})
    figure, places = plt.subplots(4, 2, figsize=(5.6, 2.8 + 1.05 * len(rates)), sharey=True)
    for correction, axes in zip([*CORRECTIONS, None], places.flat, strict=True):
        lags = GRID_LAGS if correction else (0,)
        cells = [[runs_of(rows, "base", correction or "none", lag, lr) for lag in lags] for lr in rates]
        values = [[mean(map(final, runs)) if runs else float("nan") for runs in row] for row in cells]
        axes.imshow(values, cmap="cividis", vmin=0, vmax=1, aspect="auto", origin="lower")
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                text = f"{value:.2f}" if value == value else ""  # no run yet
                axes.text(x, y, text, ha="center", va="center", fontsize=10, color="w" if value < 0.6 else "k")
        axes.set_xticks(range(len(lags)), [f"lag {lag}" for lag in lags], fontsize=9)
        axes.set_yticks(range(len(rates)), [f"{lr:.0e}".replace("e-0", "e-") for lr in rates], fontsize=9)
        axes.set_title(NAMES.get(correction, correction), fontsize=10)
        axes.tick_params(length=0)
    figure.supylabel("learning rate", fontsize=10)
    figure.tight_layout(pad=0.5)
    save_figure(figure, GRID, dpi=160)


def lag_table(rows: Rows) -> str:
    lines = ["| lag | final accuracy, each seed | mean | collapsed |", "|---|---|---|---|"]
    for lag in LAGS:
        if runs := runs_of(rows, "base", "none", lag, LR, 5):
            values = [final(run) for run in runs]
            numbers = ", ".join(f"{value:.2f}" for value in values)
            lines += [f"| {lag} | {numbers} | {mean(values):.2f} | {sum(map(has_collapsed, runs))} of {len(runs)} |"]
    return "\n".join(lines)


def algorithm_table(rows: Rows) -> str:
    """Final accuracies and speed at lag 0 and 4; the ratio of GRPO is to the sampler with the correction `clip`."""
    heads = "final accuracy, lag 0", "lag 4", "step at 0.8, lag 0", "lag 4", "collapsed at lag 4"
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, label in ({"base": "GRPO"} | ALGORITHMS).items():
        both = [
            runs_of(rows, name, "sampler" if name != "base" else "clip" if lag else "none", lag, LR) for lag in (0, 4)
        ]
        if all(both):
            cells = [", ".join(f"{final(run):.2f}" for run in runs) for runs in both]
            cells += [", ".join(str(step_at(run, 0.8)) for run in runs) for runs in both]
            lines += [f"| {label} | {' | '.join(cells)} | {sum(map(has_collapsed, both[1]))} of {len(both[1])} |"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
