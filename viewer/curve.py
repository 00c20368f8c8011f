"""Draw a run: accuracy (or reward), completion length, what its task describes, and KL against the step.

    python -m viewer.curve runs/experiment_base/<name>       # writes curve.png into it

Reads the run's directory and imports nothing of the training code.
"""

import sys
from pathlib import Path

from viewer.results import open_run
from viewer.runs import RunError, rolling_means

# Of every task; what else a run logs of its completions is what its own task describes.
KNOWN = {f"completion/{name}" for name in ("length", "length_right", "length_wrong", "stopped", "truncated")}


def draw_curve(directory: Path) -> Path:
    """Draw the metrics of a run into `curve.png` in its directory, and return that path."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    entries = open_run(directory).metrics.rows
    directory.mkdir(exist_ok=True)  # that of a kept run is only a name
    has_rewards = any("reward/total" in entry for entry in entries)
    figure = _draw_rewards(plt, entries) if has_rewards else _draw_loss(plt, entries)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{directory.resolve().parent.name}/{directory.resolve().name}")
    figure.tight_layout()
    path = directory / "curve.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _draw_rewards(plt, entries: list[dict]):
    figure, ((success, length), (described, kl)) = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True)
    has_accuracy = any("reward/correct" in entry for entry in entries)
    key = "reward/correct" if has_accuracy else "reward/total"
    _line(success, entries, key, label="training questions, sampled", alpha=0.3, color="C0")
    _line(success, entries, key, label="the same, mean of 5 steps", color="C0", window=5)
    _line(success, entries, "eval/greedy/accuracy", label="held-out, greedy", marker="o", color="C1")
    keys = list(dict.fromkeys(key for entry in entries for key in entry))  # in the order in which they first appear
    kinds = [key.removeprefix("eval/greedy/") for key in keys if _is_kind(entries, key)]
    for kind in kinds:
        label = f"held-out, greedy, {kind.replace('_', ' ')}"
        _line(success, entries, f"eval/greedy/accuracy_{kind}", label=label, linestyle=":")
    _line(success, entries, "eval/sampled/accuracy", label="held-out, mean@8", marker="s", color="C2", linestyle="")
    success.set(title="accuracy" if has_accuracy else "total reward")
    if has_accuracy:
        success.set_ylim(0, 1.02)
    _line(length, entries, "completion/length")
    length.set(title="completion length (tokens)")
    length.set_ylim(bottom=0)
    own = [key for key in keys if key.startswith("completion/") and key not in KNOWN]
    own = [key for key in own if key.partition("/")[2] not in kinds]
    own = [key for key in own if any(entry.get(key) for entry in entries)]  # what never happened needs no line
    for key in own or ["group/zero_reward_variance"]:
        _line(described, entries, key, label=key.partition("/")[2].replace("_", " "))
    described.set(title="completions, as the task describes them" if own else "groups", xlabel="step")
    if described.dataLim.ymin >= 0:
        described.set_ylim(bottom=0)
    for axes in (success, described):
        axes.legend(fontsize=8, loc="best")
    _line(kl, entries, "loss/kl")
    kl.set(title="KL to the policy at the start (nats per token)", xlabel="step")
    kl.set_ylim(bottom=0)
    return figure


def _is_kind(entries: list[dict], key: str) -> bool:
    """Whether a key tells kinds of questions apart, not answers: its share is the same in every evaluation."""
    shares = {entry[key] for entry in entries if key in entry}
    accuracy = key.replace("eval/greedy/", "eval/greedy/accuracy_")
    return accuracy != key and len(shares) == 1 and 0 < min(shares) < 1 and any(accuracy in entry for entry in entries)


def _draw_loss(plt, entries: list[dict]):
    figure, axes = plt.subplots(figsize=(8, 4.5))
    _line(axes, entries, "loss/total", alpha=0.3, color="C0")
    _line(axes, entries, "loss/total", color="C0", window=50)
    axes.set(title="loss (nats per token; mean of 50 steps)", xlabel="step", yscale="log")
    return figure


def _line(axes, entries: list[dict], key: str, window: int = 1, **style) -> None:
    points = [(entry["step"], entry[key]) for entry in entries if key in entry]
    if not points:
        return
    steps, values = zip(*points, strict=True)
    axes.plot(steps, rolling_means(values, window), **{"markersize": 4, **style})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m viewer.curve RUN_DIRECTORY")
    try:
        print(draw_curve(Path(sys.argv[1])))
    except RunError as error:
        sys.exit(f"error: {error}")
