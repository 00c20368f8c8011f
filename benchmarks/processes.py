"""The gain of several processes, whether they train exactly like one, and mistakes that break it: figures and tables.

    python benchmarks/processes.py

Draws the figures equality.png, scaling.png and broken*.png of experiment_accelerate and experiment_accelerate_ddp, and
prints the tables of their READMEs. The data are the entry processes of benchmarks/results/measurements.json and the
runs in the results/ of the two experiments. The measurement itself is finished, see benchmarks/README.md.
"""

from pathlib import Path
from statistics import median

import matplotlib

from viewer.bands import draw_comparison
from viewer.results import read_json, read_runs
from viewer.save_figure import save_figure

ROOT = Path(__file__).resolve().parent.parent
ACCELERATE, DDP = "experiment_accelerate", "experiment_accelerate_ddp"
EQUAL = {ACCELERATE: (2,), DDP: (1, 2, 3)}  # experiment: numbers of processes
PANELS = {
    ACCELERATE: ("reward/correct", "completion/length", "policy/entropy", "loss/kl"),
    DDP: ("reward/correct", "loss/grad_norm", "policy/entropy", "loss/kl"),
}
AS_IT_IS = "as it is, {} processes"
BROKEN = (  # experiment, figure, and the runs by label: the beginning of their names
    (ACCELERATE, "broken", {AS_IT_IS.format(2): "minibatches", "mean of the ranks' means": "broken_mean"}),
    (DDP, "broken", {AS_IT_IS.format(3): "cut_groups", "advantages within each rank's part": "broken_groups"}),
    (DDP, "broken_forward", {AS_IT_IS.format(2): "two_processes", "called past the wrapper": "broken_forward"}),
)


def main() -> None:
    matplotlib.use("Agg")  # works without a display
    data = read_json(ROOT / "benchmarks" / "results" / "measurements.json", "processes")
    equality, scaling, broken = (data[part]["measured"] for part in ("equality", "scaling", "broken"))
    for experiment in EQUAL:
        draw_equality(equality["runs"], experiment)
    draw_scaling(scaling)
    for experiment, picture, names in BROKEN:
        runs = read_runs(ROOT / experiment / "results")
        groups = {label: [runs[f"{name}_seed{seed}"] for seed in (0, 1)] for label, name in names.items()}
        draw_comparison(groups, ROOT / experiment / f"{picture}.png", PANELS[experiment])
    print_equality(equality["runs"])
    for policy, found in scaling.items():
        print_scaling(policy, found)
    for name, found in broken.items():
        print_broken(name, found)


def draw_equality(runs: dict[str, list[dict]], experiment: str) -> None:
    """Differences from experiment_base in one process, by step."""
    import matplotlib.pyplot as plt

    figure, places = plt.subplots(1, 3, figsize=(11, 3.6))
    headings = {
        "grad_norm": "gradient norm, relative difference",
        "entropy": "entropy, difference (nats)",
        "equal_completions": "share of completions with equal tokens",
    }
    for axes, (key, heading) in zip(places, headings.items(), strict=True):
        for count in EQUAL[experiment]:
            rows = runs[f"{experiment}, {count}"]
            label = f"{count} process{'es' if count > 1 else ''}"
            style = {"color": f"C{count - 1}", "markersize": 3, "label": label}
            axes.plot([row["step"] for row in rows], [row[key] for row in rows], "o-", **style)
        axes.set_title(heading, fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if key == "equal_completions":
            lowest = min(row[key] for count in EQUAL[experiment] for row in runs[f"{experiment}, {count}"])
            axes.set_ylim(min(0.9, lowest - 0.01), 1.003)
        else:
            axes.set_yscale("symlog", linthresh=1e-9)
            axes.set_yticks([0, 1e-9, 1e-7, 1e-5, 1e-3, 1e-1])
            axes.set_ylim(0, 1)
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=len(labels), fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    save_figure(figure, ROOT / experiment / "equality.png")


def draw_scaling(measured: dict[str, dict]) -> None:
    """One row per policy: seconds of a step with its parts, tokens per second, memory of a process.

    Bars show the fastest repetition, because other work on the machine can only lengthen it; dots show the medians.
    """
    import matplotlib.pyplot as plt

    figure, places = plt.subplots(len(measured), 3, figsize=(11, 5.5), width_ratios=(2, 1, 1), squeeze=False)
    parts = {"sampling": "C2", "reference": "C4", "update": "C0", "waiting": "C1"}
    for (policy, found), row in zip(measured.items(), places, strict=True):
        names = list(found["runs"])[::-1]  # the first one at the top
        limit = 1.5 * max(min(run["seconds"] for run in runs) for runs in found["runs"].values())
        row[0].set_xlim(0, limit)
        for place, name in enumerate(names):
            runs = found["runs"][name]
            fastest = min(runs, key=lambda run: run["seconds"])
            left = 0.0
            for part, color in parts.items():
                row[0].barh(place, fastest[part], left=left, color=color, label=part if place == 0 else None)
                left += fastest[part]
            rest = max(0.0, fastest["seconds"] - left)
            row[0].barh(place, rest, left=left, color="0.7", label="rest" if place == 0 else None)
            middle = median(run["seconds"] for run in runs)
            if middle < limit:
                label = "median of the repetitions" if place == 0 else None
                row[0].plot(middle, place, "o", color="black", markersize=4, label=label)
            else:
                row[0].text(
                    limit, place, f"median {middle:.1f} \N{RIGHTWARDS ARROW}", ha="right", va="center", fontsize=8
                )
            row[1].barh(place, fastest["tokens_per_second"], color="C0")
            row[1].plot(median(run["tokens_per_second"] for run in runs), place, "o", color="black", markersize=4)
            row[2].barh(place, median(max(run["peak_bytes"]) for run in runs) / 1e9, color="C0")
        row[0].set_yticks(range(len(names)), names, fontsize=8)
        headings = (f"{policy}: seconds per step", "tokens per second", "peak memory of a process (GB)")
        for axes, heading in zip(row, headings, strict=True):
            axes.set_title(heading, fontsize=10)
            axes.grid(alpha=0.3, axis="x")
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in row[1:]:
            axes.set_yticks([])
    handles, labels = places[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=len(labels), fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    save_figure(figure, ROOT / DDP / "scaling.png")


def print_equality(runs: dict[str, list[dict]]) -> None:
    """The largest differences over the steps before the first different token, and the number of that step."""
    some = next(iter(runs.values()))
    print("\ndraws nearest to a boundary:", sorted((row["nearest_boundary"], row["step"]) for row in some)[:3])
    print("\n| | first other token | gradient norm | entropy | parameters between ranks |\n|---|---|---|---|---|")
    for name, rows in runs.items():
        first = next((row["step"] for row in rows if row["equal_completions"] < 1), None)
        equal = [row for row in rows if first is None or row["step"] < first]
        cells = (f"{max((row[key] for row in equal), default=0):.1e}" for key in ("grad_norm", "entropy"))
        apart = max(row["parameters_between_ranks"] for row in rows)
        print(f"| {name} | {f'step {first}' if first else 'none'} | {' | '.join(cells)} | {apart:g} |")


def print_scaling(policy: str, found: dict) -> None:
    """Medians over the repetitions, with minimum and maximum."""
    reduce = found["all_reduce_seconds"]
    print(f"\n{policy}, {found['parameters']:,} parameters; {found['flags']}; all-reduce of the gradients alone: "
          f"{median(reduce):.4f} s ({min(reduce):.4f} to {max(reduce):.4f})")  # fmt: skip
    parts = ("sampling", "reference", "update", "waiting", "logged_waiting", "startup")
    columns = ("seconds", "tokens_per_second", *parts)
    print(f"| | {' | '.join(columns)} | peak GB | load |\n|---{'|---' * (len(columns) + 2)}|")
    for name, runs in found["runs"].items():
        cells = []
        for key in columns:
            values = [run[key] for run in runs]
            digits = 0 if key == "tokens_per_second" else 2
            cells.append(f"{median(values):,.{digits}f} ({min(values):,.{digits}f}-{max(values):,.{digits}f})")
        peak = "/".join(f"{median(run['peak_bytes'][rank] for run in runs) / 1e9:.2f}"
                        for rank in range(len(runs[0]["peak_bytes"])))  # fmt: skip
        loads = [run["load_before"] for run in runs]
        print(f"| {name} | {' | '.join(cells)} | {peak} | {min(loads):.1f}-{max(loads):.1f} |")


def print_broken(name: str, found: dict) -> None:
    """The first gradient of a broken variant, and of the correct one, for several numbers of processes."""
    print(f"\n{name}\n| | processes | norm | difference | parameters between ranks |\n|---|---|---|---|---|")
    for kind in ("correct", "broken"):
        for count, first in found[kind].items():
            apart = first["parameters_between_ranks"]
            numbers = f"{first['gradient_norm']:.5f} | {first['gradient_difference']:.1e}"
            between = f"{apart[0]:.1e} (step 1), {apart[-1]:.1e} (step {len(apart)})"
            print(f"| {kind} | {count} | {numbers} | {between} |")


if __name__ == "__main__":
    main()
