"""Run an experiment with several seeds, keep the data for its figures, and draw its curve with the range of the seeds.

    python benchmarks/seeds.py experiment_base                # seeds 0 to 4; two to three minutes each on one core

Existing runs are not repeated. The script keeps the runs in <experiment>/results/ (metrics.csv and runs.json), and
draws <experiment>/curve.png, which also shows the runs of the experiment's parent or, if it has none, of that one's.
With a --prefix of which no runs are kept there, it only draws <runs-dir>/<experiment>/<prefix>_curve.png.
"""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from viewer.bands import draw_comparison
from viewer.groups import Groups, read_run
from viewer.results import keep_runs, names_in, read_runs
from viewer.runs import Run

ROOT = Path(__file__).resolve().parent.parent
PANELS = ("reward/correct", "completion/length", "completion/reasoned", "loss/kl")


@dataclass(frozen=True, kw_only=True)
class Config:
    experiment: tyro.conf.Positional[str]  # directory of the experiment
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)  # of the runs
    model: str | None = None  # the policy that each run starts from; None: the experiment's own
    prefix: str = "seed"  # runs are called <prefix><seed>; those of a new prefix stay in --runs-dir
    runs_dir: str = "runs"  # where the runs are written
    eval_every: int = 10  # steps between greedy evaluations
    flags: str = ""  # further flags of train.py, in one string
    panels: tuple[str, ...] = PANELS  # of the figure, by keys of metrics.jsonl
    also: tuple[str, ...] = ()  # PREFIX=LABEL: other runs of the experiment that the figure shows


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    places = {
        seed: Path(config.runs_dir) / Path(config.experiment).name / f"{config.prefix}{seed}" for seed in config.seeds
    }
    for seed, place in places.items():
        if not (place / "summary.json").exists():
            command = [sys.executable, str(ROOT / config.experiment / "train.py"), "--seed", str(seed)]
            command += ["--name", place.name, "--runs-dir", config.runs_dir, "--eval-every", str(config.eval_every)]
            command += (["--model", config.model] if config.model else []) + shlex.split(config.flags)
            print(shlex.join(command), flush=True)
            subprocess.run(command, check=True)
    runs, results = [read_run(place) for place in places.values()], ROOT / config.experiment / "results"
    if config.prefix in {"seed", *(name.rstrip("0123456789") for name in names_in(results))}:
        keep_runs(results, runs)  # only now: changed files here would mark the commit of later runs as changed
        own, figure = {}, ROOT / config.experiment / "curve.png"
    else:
        own = {f"{Path(config.experiment).name}/{config.prefix}*": runs}
        figure = Path(config.runs_dir) / Path(config.experiment).name / f"{config.prefix}_curve.png"
    draw(config.experiment, config.panels, dict(entry.split("=", 1) for entry in config.also), figure, own)
    print(f"figure: {figure}")


def draw(experiment: str, panels: Sequence[str], also: dict[str, str], figure: Path, own: Groups) -> None:
    """Draw the curve of the experiment: its runs, its parent's runs on the same task, and other runs of the experiment.

    Args:
        also: labels of the other runs, by the beginning of their names.
        own: runs that are not kept, by their label.
    """
    places = {
        experiment: (experiment, "seed"),
        f"{experiment}, from a second warm start": (experiment, "second_policy_seed"),
    }
    places |= {label: (experiment, prefix) for prefix, label in also.items()}
    parent, of_parent = experiment, []
    while not of_parent and (parent := parent_of(parent)):
        of_parent = kept(parent, "seed")
    groups = {label: kept(*place) for label, place in places.items()} | own
    if len({run.config.get("task") for runs in (of_parent, *groups.values()) for run in runs}) == 1:
        groups = {parent: of_parent} | groups
    draw_comparison({label: runs for label, runs in groups.items() if runs}, figure, panels)


def kept(experiment: str, prefix: str) -> list[Run]:
    """The kept runs of an experiment whose names begin so."""
    return [run for name, run in read_runs(ROOT / experiment / "results").items() if name.startswith(prefix)]


def parent_of(experiment: str) -> str | None:
    """The parent of an experiment, as the docstring of its train.py names it."""
    docstring = ast.get_docstring(ast.parse((ROOT / experiment / "train.py").read_text(encoding="utf-8")))
    match = re.search(r"^Parent: (?!none)([\w/]+)", docstring, re.MULTILINE)
    return match[1] if match else None


if __name__ == "__main__":
    main()
