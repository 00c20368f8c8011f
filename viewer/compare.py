"""Compare runs: a line for each group of runs, the mean over its seeds, in a band from lowest to highest.

    python -m viewer.compare curve.png "GRPO=experiment_base/results/seed*" "no KL=experiment_base/results/no_kl*"
    python -m viewer.compare curve.png "GRPO=runs/experiment_base/*" --panels reward/correct loss/grad_norm

Reads the runs' metrics.jsonl and imports nothing of the training code.
"""

import glob
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

# key in metrics.jsonl: its title, and the range of the axis (None: as the data need); the title of others is their key
HEADINGS = {
    "reward/correct": ("sampled accuracy on training questions, each asked once", (0, 1.02)),
    "completion/length": ("completion length (tokens)", (0, None)),
    "completion/length_right": ("length of right completions (tokens)", (0, None)),
    "completion/length_wrong": ("length of wrong completions (tokens)", (0, None)),
    "reward/calls": ("calls per answer", (0, None)),
    "reward/retrieved": ("share of the supporting documents found", (0, 1.02)),
    "loss/kl": ("KL to the policy at the start (nats per token)", (0, None)),
}
PANELS = ("reward/correct", "completion/length", "group/zero_reward_variance", "loss/kl")
WINDOW = 5  # steps over which every run is averaged before runs are compared


@dataclass(frozen=True)
class Config:
    picture: tyro.conf.Positional[Path]  # file that the figure is written to
    groups: tyro.conf.Positional[tuple[str, ...]]  # LABEL=RUN_DIRECTORIES each, with * for any text
    panels: tuple[str, ...] = PANELS  # keys of metrics.jsonl: a large panel, and the others beside it


def draw_comparison(groups: dict[str, list[Path]], path: Path, panels: Sequence[str] = PANELS) -> None:
    """Draw the runs of each group, given by their directories, into a figure at `path`.

    Raises:
        FileNotFoundError: a directory holds no metrics.jsonl.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(11, 5.5))
    grid = figure.add_gridspec(max(1, len(panels) - 1), 5)
    places = [grid[:, :3], *(grid[row, 3:] for row in range(len(panels) - 1))]
    for key, place in zip(panels, places, strict=True):
        described = key.startswith("completion/")  # by the task
        default = (f"{key.removeprefix('completion/')} (mean over completions)", (None, None))
        heading, limits = HEADINGS.get(key, default if described else (key, (None, None)))
        axes = figure.add_subplot(place)
        for color, (label, directories) in enumerate(groups.items()):
            _draw_band(axes, [_read_curve(directory, key) for directory in directories], label, f"C{color}")
        if key == "loss/kl" and axes.get_ylim()[1] > 100:  # broken runs only: the others would be a flat line
            axes.set_yscale("symlog", linthresh=0.1)
            axes.set_yticks([0, 1, 1e3, 1e6])
            heading += ", log scale"
        axes.set_title(heading, fontsize=10)
        axes.set_ylim(*limits)
        if described and axes.dataLim.ymin >= 0:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    main_axes, last_axes = figure.axes[0], figure.axes[-1]
    if panels[0] == "reward/correct":
        for color, directories in enumerate(groups.values()):
            _draw_held_out(main_axes, directories, f"C{color}")
    for axes in (main_axes, last_axes):
        axes.set_xlabel("step")
    handles, labels = main_axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=len(labels), fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_band(axes, curves: list[dict[int, float]], label: str, color: str) -> None:
    """The mean over the runs at the steps that all of them have, and a band from the lowest to the highest."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    if not steps:
        return
    values = [[curve[step] for curve in curves] for step in steps]
    count = f"{len(curves)} runs" if len(curves) > 1 else "1 run"
    axes.plot(steps, [sum(row) / len(row) for row in values], color=color, label=f"{label} ({count})")
    if len(curves) > 1:
        axes.fill_between(steps, [min(row) for row in values], [max(row) for row in values], color=color, alpha=0.2)


def _draw_held_out(axes, directories: list[Path], color: str) -> None:
    """A diamond for each run's sampled accuracy on held-out questions, before and after training."""
    for number, directory in enumerate(directories):
        points = [
            (entry["step"], entry["eval/sampled/accuracy"])
            for entry in _read_metrics(directory)
            if "eval/sampled/accuracy" in entry
        ]
        label = "held-out questions, before and after (mean@8)" if number == 0 and color == "C0" else None
        axes.plot(*zip(*points, strict=True), "D", color=color, markersize=5, alpha=0.7, label=label)


def _read_curve(directory: Path, key: str) -> dict[int, float]:
    """A run's values by step, each the mean of the last few steps."""
    points = [(entry["step"], entry[key]) for entry in _read_metrics(directory) if key in entry]
    values = [value for _, value in points]
    means = [sum(values[max(0, i + 1 - WINDOW) : i + 1]) / min(WINDOW, i + 1) for i in range(len(values))]
    return {step: mean for (step, _), mean in zip(points, means, strict=True)}


def _read_metrics(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    groups = {}
    for group in config.groups:
        label, _, pattern = group.partition("=")
        groups[label] = [Path(place) for place in sorted(glob.glob(pattern))]
        if not groups[label]:
            sys.exit(f"error: {group} is not LABEL=RUN_DIRECTORIES, or no directory matches")
    if not groups or not config.panels:
        sys.exit("error: nothing to draw: give runs as LABEL=RUN_DIRECTORIES, and at least one of --panels")
    draw_comparison(groups, config.picture, config.panels)
    print(config.picture)


if __name__ == "__main__":
    main()
