"""The table of an evaluation on the terminal: of one set of questions, or of the benchmarks of a suite."""

from collections.abc import Iterator

from harness.base.terminal import printable


def print_table(title: str, results: dict) -> None:
    greedy, sampled = results["greedy"], results.get("sampled")
    columns = ["", "greedy", *([f"{sampled['n']} samples"] if sampled else [])]
    _print(title, columns, [row[: len(columns)] for row in _rows(greedy, sampled)])


def print_suite(title: str, results: dict[str, dict], columns: dict[str, dict[str, dict]]) -> None:
    """`columns`: the `summary` of the results."""
    counts = {benchmark: found["num_questions"] for benchmark, found in results.items()}
    counts["average"] = sum(counts.values())
    rows = [
        (benchmark, str(count), *(interval(column[benchmark]) for column in columns.values()))
        for benchmark, count in counts.items()
    ]
    _print(title, ["", "questions", *columns], rows, width=120)


def _print(title: str, columns: list[str], rows: list[tuple[str, ...]], width: int | None = None) -> None:
    """`width`: used when stdout is not a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(printable(title, 200)), title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in rows:
        if row[0] == "average":
            table.add_section()
        table.add_row(*(Text(printable(cell, 60)) for cell in row))
    console = Console()
    (console if console.is_terminal else Console(width=width)).print(table)


def _rows(greedy: dict, sampled: dict | None) -> Iterator[tuple[str, ...]]:
    """Yields label, greedy, sampled."""
    sides = (greedy, sampled or greedy)  # without samples the second one is not shown
    if "accuracy" in greedy:
        label = f"accuracy (mean@{sampled['n']})" if sampled else "accuracy"
        yield label, *(interval(side["accuracy"]) for side in sides)
    for name, estimate in greedy.get("shares", {}).items():
        yield name, interval(estimate), ""
    for name in ("pass@k", "maj@k"):
        for k, estimate in sides[1].get(name, {}).items():
            if int(k) > (1 if name == "pass@k" else 2):  # pass@1 is mean@n; so are maj@1 and maj@2 if all answer
                yield name.replace("k", k), "", interval(estimate)
    for name in greedy.get("judged", {}):
        yield name, *(interval(side["judged"][name]) for side in sides)
    judged = {f"reward_{name}" for name in greedy.get("judged", {})}
    for name in [name for name in greedy["means"] if name not in judged]:
        label = name.removeprefix("reward_").replace("_", " ")
        yield label, *(_number(side["means"].get(name)) for side in sides)
    for name in sides[0]["accuracy_if"] | sides[1]["accuracy_if"]:
        yield f"accuracy if {name}", *(_number(side["accuracy_if"].get(name)) for side in sides)
    lengths = [side["length"] for side in sides]
    form = "{mean:.1f} ({5%:.0f}, {50%:.0f}, {95%:.0f})"
    yield "tokens: mean (5 %, 50 %, 95 %)", *(form.format(**length) for length in lengths)
    if "accuracy" in greedy:
        pairs = ([_number(length[f"mean_if_{kind}"], 1) for kind in ("right", "wrong")] for length in lengths)
        yield "tokens if right, if wrong", *map(", ".join, pairs)
    for name in [name for name in ("cut_off", "no_answer") if name in greedy]:
        yield name.replace("_", " "), *(_number(side[name]) for side in sides)


def interval(estimate: dict) -> str:
    """
    >>> interval({"value": 0.25, "low": 0.2, "high": 0.3125})
    '0.250 [0.200-0.312]'
    """
    return "{value:.3f} [{low:.3f}-{high:.3f}]".format(**estimate)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
