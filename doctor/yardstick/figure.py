"""The measurements of benchmarks/yardstick.py, as a figure and as tables."""

import csv
from pathlib import Path
from statistics import median

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "yardstick"
SIZE = 4  # completions of a group, of the points in the figure
COLORS = {"unbiased": "#0072b2", "another objective": "#009e73", "biased": "#d55e00"}
OTHER_OBJECTIVES = ("MaxRL, summed", "pass@2")
CRITICS = (("perfect critic", 0.0), ("perfect critic", 1.0), ("untrained critic", 0.5))
KEYS = {  # of each part: what a line of its table is about
    "groups": ("size", "estimator"),
    "accuracies": ("estimator", "size", "accuracy"),
    "critics": ("critic", "lambda"),
    "lags": ("lag", "correction"),
    "penalties": ("estimator",),
    "tokens": ("tokens",),
    "proposals": ("proposal",),
}


def read_results() -> dict[str, list[dict]]:
    """The lines of every part; numbers are floats, and empty cells are left out."""
    found = {}
    for part in KEYS:
        with (RESULTS / f"{part}.csv").open(encoding="utf-8", newline="") as file:
            found[part] = [{key: _value(text) for key, text in row.items() if text} for row in csv.DictReader(file)]
    return found


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def medians(rows: list[dict], keys: tuple[str, ...]) -> dict[tuple, dict[str, float]]:
    """The median over policies of every number, by the values of `keys`."""
    grouped: dict[tuple, list[dict]] = {}
    for row in rows:
        grouped.setdefault(tuple(row[key] for key in keys), []).append(row)
    left_out = {*keys, "seed", "policy"}
    return {
        key: {name: median(row[name] for row in some) for name in some[0] if name not in left_out}
        for key, some in grouped.items()
    }


def table(results: dict[str, list[dict]], part: str) -> str:
    """Markdown: the medians over policies; of the estimators in groups, those with a softmax table."""
    rows = [row for row in results[part] if row.get("policy", "table") == "table"]
    found = medians(rows, KEYS[part])
    names = list(dict.fromkeys(name for values in found.values() for name in values))
    lines = [f"| {' | '.join([*KEYS[part], *names])} |", "|---" * (len(KEYS[part]) + len(names)) + "|"]
    for key, values in found.items():
        cells = [f"{x:.3g}" if isinstance(x, float) else x for x in key]
        lines.append(f"| {' | '.join(cells + [f'{values[n]:.3g}' if n in values else '' for n in names])} |")
    return "\n".join(lines)


def points(results: dict[str, list[dict]]) -> list[tuple[list[str], float, float]]:
    """Of the softmax tables: names, angle and noise; those that can't be told apart share a point."""
    rows = [row for row in results["groups"] if row["policy"] == "table"]
    found = {name: each for (size, name), each in medians(rows, KEYS["groups"]).items() if size == SIZE}
    critics = medians(results["critics"], KEYS["critics"])
    found |= {f"PPO, {name}, \u03bb = {number:g}": critics[name, number] for name, number in CRITICS}
    merged: list[tuple[list[str], float, float]] = []
    for name, values in found.items():
        here = values["angle"], values["noise"]
        for names, angle, noise in merged:
            if abs(angle - here[0]) < 1 and abs(noise / here[1] - 1) < 0.03:
                names.append(name)
                break
        else:
            merged.append(([name], *here))
    return merged


def draw(results: dict[str, list[dict]], path: Path, own: tuple[str, float, float] | None = None) -> None:
    """Bias against noise, a point for each estimator, and noise against accuracy.

    Args:
        own: one more point: its name, angle and noise.
    """
    import matplotlib

    matplotlib.use("Agg")  # works without a display
    import matplotlib.pyplot as plt

    from viewer.save_figure import save_figure

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.9), width_ratios=(1.25, 1))
    for names, angle, noise in points(results):
        kind = "unbiased" if angle < 1e-6 else "biased"
        kind = "another objective" if names[0] in OTHER_OBJECTIVES else kind
        left.plot(angle, noise, "o", color=COLORS[kind], markersize=5)
        is_left = angle < 0.5 or angle > 20  # beside the points of the unbiased ones there are others
        settings = {"textcoords": "offset points", "fontsize": 6.5, "ha": "right" if is_left else "left"}
        left.annotate(", ".join(names), (angle, noise), (-5 if is_left else 5, -2), **settings)
    for kind, color in COLORS.items():
        left.plot([], [], "o", color=color, markersize=5, label=kind)
    if own:
        left.plot(*own[1:], "*", color="black", markersize=11, label=own[0])
    left.set_xlabel("bias: angle of the mean to the exact gradient, degrees", fontsize=8)
    left.set_ylabel("noise: completions with as much noise as signal", fontsize=8)
    left.legend(fontsize=7, loc="lower right")
    left.set_xlim(-19, 30)
    left.set_xticks([0, 5, 10, 15, 20, 25])
    left.set_yscale("log")
    left.set_yticks([5, 10, 20, 40], ["5", "10", "20", "40"])
    left.minorticks_off()
    found = medians(results["accuracies"], KEYS["accuracies"])
    styles = {"REINFORCE": ("#999999", [8.0]), "RLOO": ("#0072b2", [2.0, 4.0, 8.0, 16.0])}
    for name, (color, sizes) in styles.items():
        for size in sizes:
            line = sorted((key[2], values["noise"]) for key, values in found.items() if key[:2] == (name, size))
            label = f"{name}, groups of {size:.0f}" if name == "RLOO" else name
            right.plot(*zip(*line, strict=True), color=color, label=label, linewidth=0.6 + size / 9, marker=".")
    right.set_yscale("log")
    right.set_xlabel("accuracy of the question", fontsize=8)
    right.set_ylabel("noise", fontsize=8)
    right.legend(fontsize=7)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(pad=0.6)
    save_figure(figure, path, dpi=150)
