"""Compare runs: a table, and a figure with a line for each group of runs in a band from its lowest to its highest run.

    python -m viewer.compare runs/experiment_base/a runs/experiment_base/b
    python -m viewer.compare "experiment_base/results/*" --each
    python -m viewer.compare "GRPO=runs/experiment_base/*" "no KL=runs/other/*" --panels reward/correct loss/grad_norm

Runs are named by their directories, or by patterns in quotes. Runs whose names and settings differ only by their seed
are one group: seed0 and seed1 are `seed*`. The same holds for runs without --name; their groups are labelled with the
settings that differ. LABEL=PATTERN makes a group of all runs that it matches. An unfinished run is marked, and the
final figures of a group leave it out, unless none of its runs is finished.

The table. It shows the value of a single run, or the mean of several runs with the lowest and the highest in
parentheses. Accuracy is the share p of right greedy answers to n held-out questions. For one run (or several with the
same value) its 95 % interval of Wilson (1927) is in brackets, with z = 1.96:

    (p + z^2 / 2n  +-  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

It says how far the accuracy on all questions of this kind can be from that on these n, and nothing about other seeds.
All runs answer the same questions, so a difference between two runs can be surer than their intervals suggest. There is
no interval if n is not --eval-prompts (there were fewer questions), or if answers count in part: p n is not whole then.
"Sampled" is the accuracy of sampled answers. The last columns are the settings that differ. If one is the number of
updates per step, the labels of the figure say it.
"""

import difflib
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from viewer.bands import draw_comparison
from viewer.groups import Groups, name_of, plain, read_groups, series
from viewer.runs import RunError
from viewer.table import print_table

# The first panel is the first of these that a run has
FIRST_PANELS = ("reward/correct", "reward/total", "loss/total")
OTHER_PANELS = ("completion/length", "group/zero_reward_variance", "loss/kl", "loss/grad_norm")


@dataclass(frozen=True)
class Config:
    # directories of runs, patterns of them, or LABEL=PATTERN
    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN ...", help_behavior_hint="")]
    output: Path = Path("compare.png")  # the figure; .png, .svg or .pdf
    # keys of metrics.jsonl: a large panel, and others beside it; none given: accuracy (reward, loss), length, KL ...
    panels: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY ...", help_behavior_hint="")] = ()
    each: bool = False  # a row of the table for each run, instead of one for each group


def compare(config: Config) -> None:
    groups, left_out = read_groups(config.runs)
    panels = config.panels or default_panels(groups)
    known = {key for runs in groups.values() for run in runs for row in run.metrics.rows for key in row}
    for key in panels:
        if key not in known:
            like = difflib.get_close_matches(key, known, n=3) or sorted(key for key in known if "/" in key)[:3]
            raise RunError(f"--panels {key}: no run has logged it; known are, for example, {', '.join(like)}")
    if config.output.suffix not in (".png", ".svg", ".pdf"):
        raise RunError(f"--output {config.output}: the name of the figure must end with .png, .svg or .pdf")
    print_table(one_by_one(groups) if config.each else groups, left_out)
    try:
        draw_comparison(groups, config.output, panels)
    except OSError as error:
        raise RunError(f"--output {config.output} cannot be written ({error.strerror})") from error
    print(f"figure: {plain(config.output)}")


def one_by_one(groups: Groups) -> Groups:
    """A group for each run."""
    rows: Groups = {}
    for run in dict.fromkeys(run for runs in groups.values() for run in runs):
        rows[name_of(run) if name_of(run) not in rows else str(run.directory)] = [run]
    return rows


def default_panels(groups: Groups) -> tuple[str, ...]:
    runs = [run for members in groups.values() for run in members]
    first = next((key for key in FIRST_PANELS if any(series(run, key) for run in runs)), None)
    if first is None:
        raise RunError(f"{runs[0].directory} has logged no reward and no loss: name --panels")
    others = [key for key in OTHER_PANELS if any(series(run, key) for run in runs)]
    return first, *others[:3]


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__, config=(tyro.conf.DisallowNone,))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a label that the terminal cannot show
    try:
        compare(config)
    except RunError as error:
        print(f"error: {plain(error)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
