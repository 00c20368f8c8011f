"""Draw a run: accuracy (or reward), completion length, KL, and what its task describes, against the step.

    python -m viewer.curve runs/experiment_base/<name>       # writes curve.png into it

Reads the run's directory and imports nothing of the training code.
"""

import sys
from pathlib import Path

from viewer.results import open_run
from viewer.runs import RunError, kinds_of_questions, rolling_means

# Keys of every task; a run's own task describes all other keys of completions.
KNOWN = {f"completion/{name}" for name in ("length", "length_right", "length_wrong", "stopped", "truncated")}
COUNTS = ("turns", "_calls", "_searches")  # how keys of counts end, which can be below 1, too


def draw_curve(directory: Path) -> Path:
    """Draw the metrics of a run into `curve.png` in its directory, and return that path."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    entries = open_run(directory).metrics.rows
    directory.mkdir(exist_ok=True)  # a kept run has only a name
    has_rewards = any("reward/total" in entry for entry in entries)
    has_pairs = any("preference/accuracy" in entry for entry in entries)
    if has_rewards or has_pairs:
        figure = _draw_panels(plt, entries, (_panels_of_pairs(entries) if has_pairs else {}) | _panels(entries))
    else:
        figure = _draw_loss(plt, entries)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{directory.resolve().parent.name}/{directory.resolve().name}")
    path = directory / "curve.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _panels(entries: list[dict]) -> dict[str, dict[str, str]]:
    """The title of each panel, and the key and the label of each of its lines; shares and counts are kept apart."""
    keys = list(dict.fromkeys(key for entry in entries for key in entry))  # in the order of their first appearance
    has_accuracy = "reward/correct" in keys or "reward/total" not in keys
    own = [key for key in keys if key.startswith("completion/") and key not in KNOWN]
    own = [key for key in own if any(entry.get(key) for entry in entries)]  # a count that is always 0 needs no line
    labels = {key: key.rpartition("/")[2].removeprefix("accuracy_").replace("_", " ") for key in keys}
    of_kinds = [f"eval/greedy/accuracy_{kind}" for kind in kinds_of_questions(entries)]
    own = [key for key in own if labels[key] not in {labels[of] for of in of_kinds}]
    counts = [key for key in own if key.endswith(COUNTS) or any(entry.get(key, 0) > 1 for entry in entries)]
    panels = {
        "accuracy" if has_accuracy else "total reward": {
            "reward/correct" if has_accuracy else "reward/total": "training questions, sampled",
            "eval/greedy/accuracy": "held-out questions, greedy",
            "eval/sampled/accuracy": "held-out questions, sampled (mean@8)",
        },
        "completion length (tokens)": {"completion/length": ""},
        "share of completions": {key: labels[key] for key in own if key not in counts},
        "mean number per completion": {key: labels[key] for key in counts},
        "KL to the policy at the start (nats per token)": {"loss/kl": ""},
        "KL to the teacher (nats per token)": {"teacher/kl": ""},
        "accuracy by kind of question (held out, greedy)": {key: labels.get(key) for key in of_kinds},
    }
    if not own:
        panels["share of groups whose rewards are all equal"] = {"group/zero_reward_variance": ""}
    found = {title: {key: lines[key] for key in lines if key in keys} for title, lines in panels.items()}
    return {title: lines for title, lines in found.items() if lines}


def _panels_of_pairs(entries: list[dict]) -> dict[str, dict[str, str]]:
    """The same for a run that learns from pairs of answers."""
    panels = {
        "accuracy: share of pairs whose chosen answer is preferred": {
            "preference/accuracy": "training pairs",
            "eval/accuracy": "held-out pairs",
            "eval/accuracy_same_style": "held-out pairs of equal style",
            "eval/accuracy_same_length": "held-out pairs of equal length",
        },
        "loss (nats per pair)": {"loss/total": ""},
        "log-prob of an answer (held-out pairs, nats)": {
            "eval/log_prob_chosen": "chosen",
            "eval/log_prob_rejected": "rejected",
        },
    }
    keys = {key for entry in entries for key in entry}
    found = {title: {key: lines[key] for key in lines if key in keys} for title, lines in panels.items()}
    return {title: lines for title, lines in found.items() if lines}


def _draw_panels(plt, entries: list[dict], panels: dict[str, dict[str, str]]):
    num_rows = (len(panels) + 1) // 2
    figure, grid = plt.subplots(num_rows, 2, figsize=(10, 3.6 * num_rows), layout="constrained", squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (title, lines) in zip(grid.flat, panels.items(), strict=False):
        name = "" if len(lines) > 1 else next(iter(lines.values()))  # a single line has no legend
        axes.set(title=f"{title}: {name}" if name else title, xlabel="step")
        for number, (key, label) in enumerate(lines.items()):
            is_noisy = key.startswith(("reward/", "preference/", "loss/total"))
            if is_noisy:
                _line(axes, entries, key, color="C0", alpha=0.3, label=label)
            label = "the same, mean of 5 steps" if is_noisy else label
            _line(axes, entries, key, 5 if is_noisy else 1, color=f"C{number}", label=label)
        if title.startswith(("accuracy", "share")):
            axes.set_ylim(0, 1.02)
        elif axes.dataLim.ymin >= 0:
            axes.set_ylim(bottom=0)
        if len(lines) > 1:  # below the panel, where it covers no line
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
