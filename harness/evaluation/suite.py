"""Several benchmarks in one table, as papers print it."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError

from harness.base.checks import local_path
from harness.base.config import ModelConfig
from harness.base.terminal import printable
from harness.evaluation.evaluation_table import interval


class Benchmark(NamedTuple):
    title: str
    hub: str  # the source of its published form
    renamed: tuple[tuple[str, str], ...] = ()  # fields of the published form, and what the task calls them


# By suite: the task that asks, and its benchmarks by the names of their files without .jsonl
SUITES: dict[str, tuple[str, dict[str, Benchmark]]] = {
    "math": (
        "math",
        {
            "math500": Benchmark("MATH-500", "HuggingFaceH4/MATH-500::test"),
            "aime24": Benchmark("AIME 2024", "HuggingFaceH4/aime_2024::train"),
            "amc": Benchmark("AMC", "AI-MO/aimo-validation-amc::train"),
            "minerva": Benchmark("Minerva", "math-ai/minervamath::test", (("question", "problem"),)),
            "olympiad_bench": Benchmark(
                "OlympiadBench",
                "Hothan/OlympiadBench:OE_TO_maths_en_COMP:train",
                (("question", "problem"), ("final_answer", "answer")),
            ),
        },
    )
}


class Part(NamedTuple):
    """One benchmark of a suite, as it is evaluated."""

    title: str
    config: ModelConfig
    directory: Path
    renamed: dict[str, str]


def parts(config: ModelConfig, directory: Path) -> list[Part]:
    """The benchmarks of `--suite`, with data from the directory `--data`, or from the hub."""
    found = []
    folder = None if config.data is None else local_path(config.data, "--data")
    if folder is not None and not folder.is_dir():
        names = ", ".join(f"{name}.jsonl" for name in SUITES[config.suite][1])
        raise UserError(f"--data {config.data}: with --suite this is a directory that holds {names}")
    for name, benchmark in SUITES[config.suite][1].items():
        source, renamed = benchmark.hub, dict(benchmark.renamed)
        if folder is not None:
            source, renamed = str((folder / f"{name}.jsonl").absolute()), {}
            if not Path(source).is_file():
                raise UserError(f"--data {config.data} has no file {name}.jsonl, which --suite {config.suite} needs")
        compare = None if config.compare is None else str(Path(config.compare).expanduser() / name)
        own = dataclasses.replace(config, data=source, compare=compare, output=str(directory / name))
        found.append(Part(benchmark.title, own, directory / name, renamed))
    return found


def average(estimates: list[dict]) -> dict:
    """The mean over benchmarks, each with the same weight, with a 95 % interval.

        low = mean - sqrt(sum_b (p_b - low_b)^2) / B,      high likewise

    The distances of independent intervals from their estimates are added like standard errors (Newcombe 1998; Zou and
    Donner 2008, "Construction of confidence limits about effect measures").

    >>> {name: round(bound, 3) for name, bound in average([{"value": 0.5, "low": 0.4, "high": 0.6}] * 4).items()}
    {'value': 0.5, 'low': 0.45, 'high': 0.55}
    """
    count = len(estimates)
    value = sum(estimate["value"] for estimate in estimates) / count
    below, above = (
        sum((estimate["value"] - estimate[bound]) ** 2 for estimate in estimates) ** 0.5 / count
        for bound in ("low", "high")
    )
    return {"value": value, "low": value - below, "high": value + above}


def summary(results: dict[str, dict]) -> dict[str, dict[str, dict]]:
    """Column by column of the table: an estimate for each benchmark, by its title, and their average."""
    columns = {"greedy": {title: found["greedy"]["accuracy"] for title, found in results.items()}}
    sampled = [found.get("sampled") for found in results.values()]
    if all(sampled):
        n = sampled[0]["n"]
        columns[f"mean@{n}"] = {title: found["sampled"]["accuracy"] for title, found in results.items()}
        for name in ("pass@k", "maj@k") if n > 1 else ():
            if all(name in side for side in sampled):
                columns[name.replace("k", str(n))] = {
                    title: found["sampled"][name][str(n)] for title, found in results.items()
                }
    return {name: column | {"average": average(list(column.values()))} for name, column in columns.items()}


def print_suite(title: str, results: dict[str, dict]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = summary(results)
    table = Table(title=Text(printable(title, 200)), title_justify="left")
    table.add_column("")
    table.add_column("questions", justify="right")
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    for benchmark, found in results.items():
        cells = [interval(column[benchmark]) for column in columns.values()]
        table.add_row(benchmark, str(found["num_questions"]), *map(Text, cells))
    table.add_section()
    total = sum(found["num_questions"] for found in results.values())
    table.add_row("average", str(total), *(Text(interval(column["average"])) for column in columns.values()))
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)
