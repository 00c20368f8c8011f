"""Draw groups of runs: each is a line, the mean over its runs, in a band from the lowest to the highest run."""

from collections.abc import Sequence
from pathlib import Path

from viewer.groups import Groups, plain, series, updates_per_step
from viewer.panels import heading, in_words
from viewer.runs import Run, rolling_means
from viewer.save_figure import save_figure

from harness.logs.headings import METRICS, POSITIVE, SHARE, Metric

WINDOW = 5  # steps over which every run is averaged before runs are compared
NUM_COLORS = 10  # of matplotlib; then the lines are dashed


def draw_comparison(groups: Groups, path: Path, panels: Sequence[str]) -> None:
    """Draw the runs of each group into a figure: a large panel for the first key, and others beside it.

    The labels say how many updates a step has, if the groups differ in that.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    updates = {label: updates_per_step(runs) for label, runs in groups.items()}
    if len({*updates.values()}) > 1:
        groups = {f"{label}, updates per step: {updates[label]}": runs for label, runs in groups.items()}
    figure = plt.figure(figsize=(11, 5.5))
    grid = figure.add_gridspec(max(1, len(panels) - 1), 5)
    places = [grid[:, :3] if panels[1:] else grid[:, :], *(grid[row, 3:] for row in range(len(panels) - 1))]
    for key, place in zip(panels, places, strict=True):
        _draw_panel(figure.add_subplot(place), groups, key)
    main_axes, last_axes = figure.axes[0], figure.axes[-1]
    if panels[0] == "reward/correct":
        for number, runs in enumerate(groups.values()):
            _draw_held_out(main_axes, runs, f"C{number % NUM_COLORS}", is_first=number == 0)
    for axes in (main_axes, last_axes):
        axes.set_xlabel("step")
    top = _add_legend(figure)
    figure.tight_layout(rect=(0, 0, 1, top))
    save_figure(figure, path)


def _draw_panel(axes, groups: Groups, key: str) -> None:
    title, panel = heading(key)
    for number, (label, runs) in enumerate(groups.items()):
        window = 1 if key.startswith("eval/") else WINDOW  # evaluations are many steps apart
        curves = [{step: panel.scale * value for step, value in series(run, key).items()} for run in runs]
        _draw_band(axes, [_smooth(curve, window) for curve in curves], label, number)
    is_described, is_share = key.startswith("completion/"), METRICS.get(key, Metric()).is_share
    axis = SHARE if is_share else POSITIVE if is_described else (None, None) if title == in_words(key) else panel.axis
    if key == "loss/kl" and axes.get_ylim()[1] > 100:  # broken runs only: the others would be a flat line
        axes.set_yscale("symlog", linthresh=0.1)
        axes.set_yticks([0, 1, 1e3, 1e6])
        title += ", log scale"
    if key == "policy/sampling_log_prob_difference" and axes.get_ylim()[1] > 0:
        axes.set_yscale("log")  # rounding and outdated weights are orders of magnitude apart
        title, axis = f"{title}, log scale", (None, None)
    axes.set_title(_text(title), fontsize=10)
    if axis == SHARE:
        axes.set_ylim(0, 1.02)
    elif axis == POSITIVE and axes.dataLim.ymin >= 0:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_band(axes, curves: list[dict[int, float]], label: str, number: int) -> None:
    """The mean over the runs at the steps that all of them have, and a band from the lowest to the highest.

    A group without values still appears in the legend.
    """
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[step] for curve in curves] for step in steps]
    count = f"{len(curves)} runs" if len(curves) > 1 else "1 run"
    color, style = f"C{number % NUM_COLORS}", ("-", "--", ":", "-.")[number // NUM_COLORS % 4]
    means = [sum(row) / len(row) for row in values]
    # a marker where there is no line to see
    marker = "o" if len(steps) == 1 else ""
    axes.plot(steps, means, color=color, linestyle=style, marker=marker, label=f"{_text(label)} ({count})")
    if len(curves) > 1 and steps:
        axes.fill_between(steps, [min(row) for row in values], [max(row) for row in values], color=color, alpha=0.2)


def _draw_held_out(axes, runs: list[Run], color: str, is_first: bool) -> None:
    """A diamond for each run's sampled accuracy on held-out questions, before and after training."""
    for number, run in enumerate(runs):
        points = series(run, "eval/sampled/accuracy")
        label = "held-out questions, before and after (mean@8)" if is_first and number == 0 else None
        axes.plot(points.keys(), points.values(), "D", color=color, markersize=5, alpha=0.7, label=label)


def _add_legend(figure) -> float:
    """One row of labels above the panels if they have the room, else more; returns where the panels end."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    for columns in range(len(labels), 0, -1):
        style = {"loc": "upper center", "ncol": columns, "fontsize": 9, "frameon": False}
        legend = figure.legend(handles, labels, **style)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
    return 0.95 if columns == len(labels) else 1 - legend.get_window_extent().height / figure.bbox.height


def _smooth(curve: dict[int, float], window: int = WINDOW) -> dict[int, float]:
    """A run's values by step, each the mean of the last few steps."""
    return dict(zip(curve, rolling_means(list(curve.values()), window), strict=True))


def _text(text: str) -> str:
    """Text that matplotlib takes as it is: no formula between dollars, no label that a legend leaves out."""
    text = plain(text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
