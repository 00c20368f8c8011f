"""The tables and the figure of docs/takeaways.md, from the committed runs; the page has the commands of the runs.

    python benchmarks/takeaways.py

The GRPO runs with 128 completions a step come from benchmarks/algorithms.py, the SmolLM2 runs from
benchmarks/smollm2.py. The other runs are in benchmarks/results/takeaways/, where gradient_norms.csv is of the runs that
compare batches, made again, since the first ones kept no norms.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from viewer.results import KeptRun, read_runs
from viewer.save_figure import save_figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "takeaways.png"
BUNDLED = "16 questions, 128 completions a step"
# Label: folder of results, beginning of the names, questions a step
GROUPS = {
    "4 questions, 32 completions a step": ("takeaways", "batch32_seed", 4),
    BUNDLED: ("algorithms", "base-one-seed", 16),
    "64 questions, 512 completions a step": ("takeaways", "batch512_seed", 64),
    "64 questions, with four times the learning rate": ("takeaways", "batch512_lr4_seed", 64),
    "a fifth of the lessons": ("takeaways", "fifth_seed", 16),
    "a fifth of the lessons, format reward 0.5": ("takeaways", "fifth_format_seed", 16),
    "SmolLM2 on GSM8K, right answers only": ("takeaways", "gsm8k_correct_seed", 4),
    "SmolLM2 on GSM8K, and rewards for the form": ("takeaways", "gsm8k_form_seed", 4),
    "SmolLM2, smallest and largest number of words": ("smollm2", "seed", 8),
    "SmolLM2, largest number only": ("smollm2", "one_word", 8),
}
GROUP_SIZE = 8
BUDGET = 4096  # completions of the runs that compare batches
WINDOW = 512  # completions over which an accuracy is averaged
REACHED = 0.8

Rows = list[dict[str, float]]  # of the steps of a run


def read_group(label: str) -> list[Rows]:
    """The steps of the runs of a group, by seed."""
    folder, prefix, _ = GROUPS[label]
    runs: dict[str, KeptRun] = read_runs(RESULTS / folder)
    chosen = [run for name, run in runs.items() if name.startswith(prefix)]
    return [[row for row in run.metrics.rows if "reward/correct" in row] for run in chosen]


def over_steps(runs: list[Rows], key: str, first: int, last: int) -> str:
    """Mean, lowest and highest value of the runs; each run's value is its mean over the steps `first` to `last`."""
    if len(runs[0]) < last:
        return "-"
    return spread([fmean(row[key] for row in rows if first <= row["step"] <= last) for rows in runs])


def spread(values: Sequence[float]) -> str:
    """
    >>> spread([0.5, 0.25]), spread([12.0, 30.0]), spread([0.5])
    ('0.375 (0.250 to 0.500)', '21.0 (12.0 to 30.0)', '0.500')
    """
    digits = 1 if max(values) >= 5 else 3
    mean, low, high = (f"{value:.{digits}f}" for value in (fmean(values), min(values), max(values)))
    return f"{mean} ({low} to {high})" if len(values) > 1 else mean


def accuracies(rows: Rows, questions: int) -> list[tuple[int, float]]:
    """Completions so far, and the sampled accuracy over the last `WINDOW` of them, from the first full window on."""
    each = questions * GROUP_SIZE
    size = WINDOW // each
    values = [row["reward/correct"] for row in rows[: BUDGET // each]]
    return [(end * each, fmean(values[end - size : end])) for end in range(size, len(values) + 1)]


def table_of_batches() -> str:
    lines = [
        f"| | updates | sampled accuracy of the last {WINDOW} completions | completions until it is {REACHED:g} |",
        "|---|---|---|---|",
    ]
    for label in list(GROUPS)[:4]:
        questions = GROUPS[label][2]
        curves = [accuracies(rows, questions) for rows in read_group(label)]
        reached = [next((at for at, value in curve if value >= REACHED), None) for curve in curves]
        until = ", ".join("-" if at is None else f"{at:,}" for at in reached)
        updates = BUDGET // (questions * GROUP_SIZE)
        lines.append(f"| {label} | {updates} | {spread([curve[-1][1] for curve in curves])} | {until} |")
    return "\n".join(lines)


def table_of_gradients() -> str:
    """How much the gradient's norm differs from step to step, for three sizes of batches."""
    norms: dict[str, list[float]] = {}
    with (RESULTS / "takeaways" / "gradient_norms.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            norms.setdefault(row["run"], []).append(float(row["loss/grad_norm"]))
    lines = ["| | gradient norm, mean over the steps | its standard deviation over the steps, divided by this mean |"]
    lines.append("|---|---|---|")
    for label in list(GROUPS)[:3]:
        size = GROUPS[label][2] * GROUP_SIZE
        runs = [found for name, found in norms.items() if name.startswith(f"batch{size}_")]
        spreads = spread([stdev(found) / fmean(found) for found in runs])
        lines.append(f"| {label} | {spread([fmean(found) for found in runs])} | {spreads} |")
    return "\n".join(lines)


def table_of_steps(labels: Sequence[str], keys: dict[str, str], blocks: Sequence[tuple[int, int]]) -> str:
    """A row for each group and key, a column for each block of steps."""
    lines = ["| | | " + " | ".join(f"steps {first} to {last}" for first, last in blocks) + " |"]
    lines.append("|---|---|" + "---|" * len(blocks))
    for key, name in keys.items():
        for label in labels:
            cells = [over_steps(read_group(label), key, *block) for block in blocks]
            shown = "all lessons" if label == BUNDLED else label
            lines.append(f"| {name} | {shown} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """By the question that they answer."""
    labels = list(GROUPS)
    blocks = [(1, 5), (21, 25), (36, 40)]
    accuracy, length, entropy = "reward/correct", "completion/length", "policy/entropy"
    form = {"completion/reasoned": "reasoned", "reward/format": "format"}
    return {
        "batches": table_of_batches(),
        "gradients": table_of_gradients(),
        "lessons": table_of_steps([BUNDLED, labels[4]], {accuracy: "sampled accuracy", length: "tokens"}, blocks),
        "format": table_of_steps(labels[4:6], {accuracy: "sampled accuracy", **form}, blocks),
        "form": table_of_steps(
            labels[6:8], {accuracy: "sampled accuracy", "reward/strict_format": "form"}, [(1, 2), (9, 10)]
        ),
        "collapse": table_of_steps(
            [BUNDLED, labels[4], *labels[8:]], {entropy: "entropy", length: "tokens"}, [*blocks, (56, 60)]
        ),
    }


def draw() -> None:
    """Sampled accuracy over completions; entropy and length over steps: means of the seeds, and their range."""
    import matplotlib

    matplotlib.use("Agg")  # works without a display
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(13, 3.6))

    def curve(axes, xs: Sequence[float], runs: list[list[float]], label: str) -> None:
        [line] = axes.plot(xs, [fmean(x) for x in zip(*runs, strict=True)], label=label)
        low, high = ([pick(x) for x in zip(*runs, strict=True)] for pick in (min, max))
        axes.fill_between(xs, low, high, color=line.get_color(), alpha=0.15, linewidth=0)

    for label in list(GROUPS)[:4]:
        curves = [accuracies(rows, GROUPS[label][2]) for rows in read_group(label)]
        curve(panels[0], [at for at, _ in curves[0]], [[value for _, value in run] for run in curves], label)
    for axes, key in zip(panels[1:], ("policy/entropy", "completion/length"), strict=True):
        for label in (BUNDLED, list(GROUPS)[4]):
            runs = read_group(label)
            steps = [row["step"] for row in runs[0]]
            curve(axes, steps, [[row[key] for row in rows] for rows in runs], label.replace(BUNDLED, "all lessons"))
    for axes, title in zip(panels, ("sampled accuracy", "entropy (nats per token)", "tokens"), strict=True):
        axes.set(title=title, xlabel="completions" if axes is panels[0] else "step", ylim=(0, None))
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    save_figure(figure, PICTURE, dpi=80)


if __name__ == "__main__":
    draw()
    for text in tables().values():
        print(f"{text}\n")
