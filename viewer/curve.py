"""Draw a run: accuracy, completion length, share worked out, and KL against the step.

    python -m viewer.curve runs/experiment_base/<name>       # writes curve.png into it

Reads the run's directory and imports nothing of the training code.
"""

import json
import sys
from pathlib import Path


def draw_curve(directory: Path) -> Path:
    """Draw `metrics.jsonl` of a run's directory into its `curve.png`, and return that path.

    Raises:
        FileNotFoundError: the directory holds no metrics.jsonl.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    entries = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    has_rewards = any("reward/correct" in entry for entry in entries)
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
    figure, ((accuracy, length), (worked, kl)) = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True)
    _line(accuracy, entries, "reward/correct", label="training questions, sampled", alpha=0.3, color="C0")
    _line(accuracy, entries, "reward/correct", label="the same, mean of 5 steps", color="C0", window=5)
    _line(accuracy, entries, "eval/greedy/accuracy", label="held-out, greedy", marker="o", color="C1")
    _line(accuracy, entries, "eval/sampled/accuracy", label="held-out, mean@8", marker="s", color="C2", linestyle="")
    accuracy.set(title="accuracy", ylim=(0, 1.02))
    accuracy.legend(fontsize=8, loc="best")
    _line(length, entries, "completion/length")
    length.set(title="completion length (tokens)")
    length.set_ylim(bottom=0)
    _line(worked, entries, "completion/worked")
    worked.set(title="share worked out in <think>", ylim=(0, 1.02), xlabel="step")
    _line(kl, entries, "loss/kl")
    kl.set(title="KL to the policy at the start (nats a token)", xlabel="step")
    kl.set_ylim(bottom=0)
    return figure


def _draw_loss(plt, entries: list[dict]):
    figure, axes = plt.subplots(figsize=(8, 4.5))
    _line(axes, entries, "loss/total", alpha=0.3, color="C0")
    _line(axes, entries, "loss/total", color="C0", window=50)
    axes.set(title="loss (nats a token; mean of 50 steps)", xlabel="step", yscale="log")
    return figure


def _line(axes, entries: list[dict], key: str, window: int = 1, **style) -> None:
    points = [(entry["step"], entry[key]) for entry in entries if key in entry]
    if not points:
        return
    steps, values = zip(*points, strict=True)
    smooth = [sum(values[max(0, i + 1 - window) : i + 1]) / min(window, i + 1) for i in range(len(values))]
    axes.plot(steps, smooth, **{"markersize": 4, **style})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m viewer.curve RUN_DIRECTORY")
    print(draw_curve(Path(sys.argv[1])))
