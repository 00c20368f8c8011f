"""What the log-probs of an inference engine do to training: an exact engine, a rounded one, an outdated one.

    python benchmarks/engine_lesson.py --float32-url http://127.0.0.1:8000 --bfloat16-url http://127.0.0.1:8001

The two servers are started before, on the bundled policy: the README of experiment_engine has the command.
Each variant is experiment_engine with other flags, with seeds 0 to 2: three to six minutes per run on two busy cores.
Runs that exist already are not repeated. Keeps the runs in experiment_engine/results/, draws curve.png and outdated.png
beside it, and prints what the table of the README is made from, as CSV.
"""

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import tyro
from seeds import Config as SeedsConfig
from seeds import make_runs

from viewer.bands import draw_comparison
from viewer.groups import series
from viewer.results import read_runs
from viewer.runs import Run

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENT = "experiment_engine"
NEVER = "--push-every 1000"  # more steps than there are
VARIANTS = {  # label: beginning of the runs' names, and flags
    "float32 engine": ("float32_seed", ""),
    "bfloat16 engine": ("bfloat16_corrected_seed", "--engine-dtype bfloat16"),
    "bfloat16 engine, uncorrected": ("bfloat16_uncorrected_seed", "--engine-dtype bfloat16 --importance-cap 0"),
    "one step ahead": ("ahead_seed", "--steps-ahead 1"),
    "pushed every 4th step": ("every_4_corrected_seed", "--push-every 4"),
    "pushed every 4th step, uncorrected": ("every_4_uncorrected_seed", "--push-every 4 --importance-cap 0"),
    "never pushed": ("never_corrected_seed", NEVER),
    "never pushed, uncorrected": ("never_uncorrected_seed", f"{NEVER} --importance-cap 0"),
}
FIGURES = {  # of the variants, by position
    "curve.png": range(4),
    "outdated.png": (0, 4, 5, 6, 7),
}
DIFFERENCE = "policy/sampling_log_prob_difference"
PANELS = ("reward/correct", DIFFERENCE, "policy/importance_weight", "loss/kl")


@dataclass(frozen=True, kw_only=True)
class Config:
    float32_url: str | None = None  # address of an engine in float32; None: draw from the results that exist
    bfloat16_url: str | None = None  # address of an engine in bfloat16
    seeds: tuple[int, ...] = (0, 1, 2)  # of the runs
    runs_dir: str = "runs"  # where the runs are written


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    for prefix, flags in VARIANTS.values():
        url = config.bfloat16_url if "bfloat16" in flags else config.float32_url
        if url is None:
            continue
        make_runs(
            SeedsConfig(
                experiment=EXPERIMENT,
                seeds=config.seeds,
                prefix=prefix,
                runs_dir=config.runs_dir,
                eval_every=0 if NEVER in flags else 20,  # an evaluation pushes weights
                flags=f"--engine-url {url} {flags}",
            )
        )
    kept = read_runs(ROOT / EXPERIMENT / "results")
    groups = {
        label: [run for name, run in kept.items() if name.startswith(prefix)] for label, (prefix, _) in VARIANTS.items()
    }
    print_table(groups)
    labels = list(VARIANTS)
    for name, numbers in FIGURES.items():
        draw_comparison(
            {labels[number]: groups[labels[number]] for number in numbers}, ROOT / EXPERIMENT / name, PANELS
        )


def print_table(groups: dict[str, list[Run]]) -> None:
    """One row per variant: means over its runs, and the lowest and the highest run where that says more."""
    rows = []
    for label, runs in groups.items():
        row: dict[str, object] = {"engine": label, "runs": len(runs)}
        for name in ("greedy", "sampled"):
            row[f"{name} accuracy"] = spread([list(series(run, f"eval/{name}/accuracy").values())[-1] for run in runs])
        row["accuracy on training questions, steps 71 to 80"] = spread(
            [over(run, "reward/correct", 71) for run in runs]
        )
        for first, last in ((1, 1), (2, 10), (41, 80)):
            row[f"difference, steps {first} to {last}"] = (
                f"{mean(over(run, DIFFERENCE, first, last) for run in runs):.1e}"
            )
        row["largest difference"] = f"{max(max(series(run, f'{DIFFERENCE}_max').values()) for run in runs):.1e}"
        for first, last in ((10, 15), (71, 80)):
            row[f"KL, steps {first} to {last}"] = f"{mean(over(run, 'loss/kl', first, last) for run in runs):.3f}"
        row["importance weight, steps 41 to 80"] = (
            f"{mean(over(run, 'policy/importance_weight', 41) for run in runs):.3f}"
        )
        row["share of capped tokens"] = f"{mean(over(run, 'policy/importance_capped', 1) for run in runs):.4f}"
        rows.append(row)
    writer = csv.DictWriter(sys.stdout, rows[0])
    writer.writeheader()
    writer.writerows(rows)


def spread(values: list[float]) -> str:
    return f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def over(run: Run, key: str, first: int, last: int = 80) -> float:
    """The mean of a metric over the steps from `first` to `last`."""
    return mean(value for step, value in series(run, key).items() if first <= step <= last)


if __name__ == "__main__":
    main()
