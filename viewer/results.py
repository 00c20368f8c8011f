"""Results as they are committed: the runs of an experiment or a benchmark in one metrics.csv and one runs.json.

    python -m viewer.results experiment_base/results runs/experiment_base/seed0 runs/experiment_base/seed1

keeps runs in a folder; runs of the same names are replaced, and others stay. metrics.csv has a row for each line of
their metrics.jsonl, with floats of five significant digits (eight near 1, three for time and memory); a cell is empty
where the line lacks the key. The column `run` names a run in its first row. runs.json has the settings and the summary
of each run by its name. Neither names a path of the machine: paths are relative to the repository, and those in the
directory of runs begin with runs/.
"""

import csv
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from viewer.runs import Run, RunError

ROOT = Path(__file__).resolve().parent.parent
RUNS, METRICS = "runs.json", "metrics.csv"
MACHINE = ("versions", "machine", "gpu", "commit", "processes")  # of the settings; a summary repeats them
ABSOLUTE = re.compile(r"(?<![^\s'\"=])/[^\s'\"]+")  # a path: at the beginning of a word, or behind a flag's =
BIG = 100_000  # characters; longer JSON files are written without indentation


@dataclass(frozen=True)
class Config:
    folder: tyro.conf.Positional[Path]  # folder of the results
    runs: tyro.conf.Positional[tuple[Path, ...]]  # directories of the runs to keep
    columns: tuple[str, ...] = ()  # keys of metrics.jsonl to keep, besides step; none given: all
    every: int = 1  # steps from one row to the next, for long runs; the first and the last row are always kept


class KeptRun(Run):
    """A run of committed results: its directory is only a name, and it has no samples."""

    def __init__(self, directory: Path, config: dict, summary: dict | None, rows: list[dict]):
        self.directory, self.config, self.summary = directory, config, summary
        self.is_finished = summary is not None
        self._read_lines()  # there are none
        self.metrics.rows = rows


def names_in(folder: Path) -> list[str]:
    """The names of the runs that are kept in a folder; none if it holds no results."""
    path = folder / RUNS
    return list(json.loads(path.read_text(encoding="utf-8"))) if os.path.isfile(path) else []


def open_run(directory: Path) -> Run:
    """The run of a directory, or the one that is kept under this name in the folder around it."""
    return read_runs(directory.parent).get(directory.name) or Run(directory)


def read_runs(folder: Path) -> dict[str, KeptRun]:
    """The runs that are kept in a folder, by name; none if it holds no results."""
    rows: dict[str, list[dict]] = {name: [] for name in names_in(folder)}
    if not rows:
        return {}
    folder = folder.resolve()
    with (folder / METRICS).open(newline="", encoding="utf-8") as file:
        name = ""
        for row in csv.DictReader(file):
            name = row.pop("run") or name
            rows[name].append({key: _number(text) for key, text in row.items() if text})
    found = {}
    for name, entry in json.loads((folder / RUNS).read_text(encoding="utf-8")).items():
        config, summary = entry["config"], entry["summary"]
        if summary is not None:
            summary = {key: config[key] for key in MACHINE if key in config} | summary
        found[name] = KeptRun(folder / name, config, summary, rows[name])
    return found


def keep_runs(folder: Path, runs: Iterable[Run], columns: Sequence[str] = (), every: int = 1) -> None:
    """Keep runs in a folder: runs of the same names are replaced, and others stay.

    Args:
        columns: keys of metrics.jsonl to keep of these runs, besides step; none: all.
        every: steps from one row to the next; the first and the last row are always kept.
    """
    kept = read_runs(folder)
    for run in runs:
        first, last = run.metrics.rows[:1], run.metrics.rows[-1:]
        rows = [row for row in run.metrics.rows if row["step"] % every == 0 or row in (*first, *last)]
        if columns:
            rows = [{key: row[key] for key in row if key in ("step", *columns)} for row in rows]
        kept[run.directory.name] = KeptRun(run.directory, run.config, run.summary, rows)
    kept = dict(sorted(kept.items()))
    folder.mkdir(parents=True, exist_ok=True)
    keys = dict.fromkeys(key for run in kept.values() for row in run.metrics.rows for key in row)  # as they appear
    with (folder / METRICS).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["run", *keys], lineterminator="\n")
        writer.writeheader()
        for name, run in kept.items():
            for number, row in enumerate(run.metrics.rows):
                writer.writerow(
                    {"run": "" if number else name} | {key: _text(key, value) for key, value in row.items()}
                )
    entries = {name: relative_paths(_entry(run), run.config.get("runs_dir")) for name, run in kept.items()}
    (folder / RUNS).write_text(_line_by_line(entries), encoding="utf-8")


def _entry(run: Run) -> dict:
    """The summary omits the machine if the settings name the same one; `read_runs` puts it back."""
    summary = run.summary
    if summary is not None:
        repeated = {key for key in MACHINE if key in run.config and summary.get(key) == run.config[key]}
        summary = {key: value for key, value in summary.items() if key not in repeated}
    return {"config": run.config, "summary": summary}


def _text(key: str, value: float) -> str:
    if not isinstance(value, float):
        return str(value)
    if key.startswith(("time/", "memory/")) or key.endswith("_difference"):  # vary from run to run
        return f"{value:.3g}"
    return f"{value:.8g}" if abs(value - 1) < 0.01 else f"{value:.5g}"  # of a ratio, the distance from 1 is shown


def _number(text: str) -> float:
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def relative_paths(value: object, runs_dir: str | None = None) -> object:
    """The content of a JSON file without paths of this machine: paths outside the repository keep their last two parts.

    >>> relative_paths({"model": "/tmp/a/sft/b/final", "flags": ["--out=/x/y/z/data.jsonl"]}, "/tmp/a")
    {'model': 'runs/sft/b/final', 'flags': ['--out=z/data.jsonl']}
    """
    if isinstance(value, dict):
        return {name: relative_paths(entry, runs_dir) for name, entry in value.items()}
    if isinstance(value, list):
        return [relative_paths(entry, runs_dir) for entry in value]
    return ABSOLUTE.sub(lambda match: _shorten(Path(match[0]), runs_dir), value) if isinstance(value, str) else value


def _shorten(path: Path, runs_dir: str | None) -> str:
    for folder, name in ((ROOT, "."), (runs_dir, "runs")):
        if folder is not None and path.is_relative_to(folder):
            return (name / path.relative_to(folder)).as_posix()
    return "/".join(path.parts[2:][-2:]) or path.as_posix()  # a word such as /no_think is no path


def write_json(path: Path, data: dict, entry: str | None = None) -> None:
    """Write a benchmark's measurements, or one entry: eight significant digits, no paths of this machine."""
    if entry is not None:
        data = (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}) | {entry: data}
    data = json.loads(json.dumps(relative_paths(data)), parse_float=lambda text: float(f"{float(text):.8g}"))
    text = json.dumps(data, indent=1, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_line_by_line(data) if len(text) > BIG else text + "\n", encoding="utf-8")


def _line_by_line(data: dict) -> str:
    """JSON with a line for each entry."""
    dense = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
    return "{\n" + ",\n".join(f"{dense(name)}:{dense(value)}" for name, value in data.items()) + "\n}\n"


def read_json(path: Path, entry: str) -> dict:
    """An entry of a file that `write_json` has written; empty if there is none."""
    return json.loads(path.read_text(encoding="utf-8")).get(entry, {}) if path.exists() else {}


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__, config=(tyro.conf.DisallowNone,))
    keep_runs(config.folder, [Run(directory) for directory in config.runs], config.columns, config.every)


if __name__ == "__main__":
    try:
        main()
    except RunError as error:
        sys.exit(f"error: {error}")
