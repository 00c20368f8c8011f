"""Benchmarks by name: a single one, or several in one table, as papers print it."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError

from harness.base.checks import local_path
from harness.base.config import ModelConfig
from harness.data.benchmarks import SUITES, Read
from harness.evaluation.figures import average


class Part(NamedTuple):
    """One benchmark of a suite, ready to be evaluated."""

    title: str
    config: ModelConfig
    directory: Path
    read: Read | None


def parts(config: ModelConfig, directory: Path) -> list[Part]:
    """The benchmarks of `--suite`; the data are in the directory (or file, for one) `--data`, or on the hub."""
    found, benchmarks = [], SUITES[config.suite][1]
    is_single = len(benchmarks) == 1
    folder = None if config.data is None else local_path(config.data, "--data")
    if folder is not None and not (folder.is_dir() or (is_single and folder.is_file())):
        names = ", ".join(f"{name}.jsonl" for name in benchmarks)
        raise UserError(f"--data {config.data}: with --suite this is a directory that holds {names}")
    for name, benchmark in benchmarks.items():
        source, inside = benchmark.hub, "" if is_single else name
        if folder is not None:
            file = folder if folder.is_file() else folder / f"{name}.jsonl"
            source = str(file.absolute())
            if not file.is_file():
                raise UserError(f"--data {config.data} has no file {name}.jsonl, which --suite {config.suite} needs")
        compare = None if config.compare is None else str(Path(config.compare).expanduser() / inside)
        own = dataclasses.replace(config, data=source, compare=compare, output=str(directory / inside))
        found.append(Part(benchmark.title, own, directory / inside, benchmark.read))
    return found


def summary(results: dict[str, dict]) -> dict[str, dict[str, dict]]:
    """The table by columns: an estimate for each benchmark, by its title, and their average."""
    columns = {"greedy": {title: found["greedy"]["accuracy"] for title, found in results.items()}}
    sampled = {title: found["sampled"] for title, found in results.items() if "sampled" in found}
    if sampled:
        n = next(iter(sampled.values()))["n"]
        columns[f"mean@{n}"] = {title: side["accuracy"] for title, side in sampled.items()}
        for name in ("pass@k", "maj@k") if n > 1 else ():
            if all(name in side for side in sampled.values()):
                columns[name.replace("k", str(n))] = {title: side[name][str(n)] for title, side in sampled.items()}
    return {name: column | {"average": average(list(column.values()))} for name, column in columns.items()}
