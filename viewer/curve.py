"""Draw a run: accuracy (or reward), completion length, KL, and what its task describes, against the step.

    python -m viewer.curve runs/experiment_base/<name>       # writes curve.png into it

Reads the run's directory and imports nothing of the training code.
"""

import sys
from pathlib import Path

from viewer.panels import Curves, panels_of, with_unit
from viewer.results import open_run
from viewer.runs import RunError, rolling_means

from harness.logs.headings import METRICS, SHARE, Metric

DETAILS = {"completion/length_right", "completion/length_wrong", "eval/greedy/length"}  # in the page only


def draw_curve(directory: Path) -> Path:
    """Draw the metrics of a run into `curve.png` in its directory, and return that path."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    entries = open_run(directory).metrics.rows
    directory.mkdir(exist_ok=True)  # a kept run has only a name
    panels = _panels(entries)
    figure = _draw_panels(plt, entries, panels) if panels else _draw_loss(plt, entries)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{directory.resolve().parent.name}/{directory.resolve().name}")
    path = directory / "curve.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _panels(entries: list[dict]) -> list[Curves]:
    """The panels of a run that samples, or that learns from pairs of answers, in their order; none for another run."""
    keys = {key for entry in entries for key in entry}
    if not keys & {"reward/total", "preference/accuracy"}:
        return []
    left_out = {*DETAILS, *(["reward/total"] if "reward/correct" in keys else [])}
    left_out |= set() if "preference/accuracy" in keys else {"loss/total"}
    found = sorted((curves for curves in panels_of(entries) if curves.panel.place), key=lambda each: each.panel.place)
    if any(key.startswith("completion/") and key not in METRICS for curves in found for key in curves.labels):
        left_out.add("group/zero_reward_variance")  # there is something of the task to show
    for panel, labels in found:
        for key in [*labels]:
            if key in left_out or (panel.title == "reward" and key != "reward/total"):  # without its components
                del labels[key]
    return [curves for curves in found if curves.labels]


def _draw_panels(plt, entries: list[dict], panels: list[Curves]):
    num_rows = (len(panels) + 1) // 2
    figure, grid = plt.subplots(num_rows, 2, figsize=(10, 3.6 * num_rows), layout="constrained", squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (panel, lines) in zip(grid.flat, panels, strict=False):
        title, (first, *others) = with_unit(panel.title, panel), lines
        if not others and (".*" in panel.keys or METRICS.get(first, Metric()).label):  # a single line has no legend
            title = f"{title}: {lines[first]}"
        axes.set(title=title, xlabel="step")
        for number, (key, label) in enumerate(lines.items()):
            is_noisy = key.startswith(("reward/", "preference/", "loss/total"))
            if is_noisy:
                _line(axes, entries, key, color="C0", alpha=0.3, label=label)
            label = "the same, mean of 5 steps" if is_noisy else label
            _line(axes, entries, key, 5 if is_noisy else 1, color=f"C{number}", label=label)
        if panel.axis == SHARE:
            axes.set_ylim(0, 1.02)
        elif axes.dataLim.ymin >= 0:
            axes.set_ylim(bottom=0)
        if others:  # below the panel, where it covers no line
            axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncol=2, frameon=False)
    return figure


def _draw_loss(plt, entries: list[dict]):
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    _line(axes, entries, "loss/total", alpha=0.3, color="C0")
    _line(axes, entries, "loss/total", window=50, color="C0", label="training rows, mean of 50 steps")
    _line(axes, entries, "eval/loss", color="C1", label="held-out rows")
    axes.set(title="loss (nats per token)", xlabel="step", yscale="log")
    axes.legend(frameon=False)
    return figure


def _line(axes, entries: list[dict], key: str, window: int = 1, **style) -> None:
    """The values of a key; two or fewer as points alone, because a line between them would be no trend."""
    points = [(entry["step"], entry[key]) for entry in entries if key in entry]
    if not points:
        return
    steps, values = zip(*points, strict=True)
    style |= {"marker": "o"} if key.startswith("eval/") or len(points) < 3 else {}
    style |= {"linestyle": "none"} if len(points) < 3 else {}
    axes.plot(steps, rolling_means(values, window), markersize=4, **style)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m viewer.curve RUN_DIRECTORY")
    try:
        print(draw_curve(Path(sys.argv[1])))
    except RunError as error:
        sys.exit(f"error: {error}")
