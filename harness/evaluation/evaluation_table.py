"""The table of an evaluation on the terminal."""

from collections.abc import Iterator

from harness.base.terminal import printable

# A row: label, greedy, sampled
Row = tuple[str, str, str]


def print_table(title: str, results: dict) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    greedy, sampled = results["greedy"], results.get("sampled")
    table = Table(title=Text(printable(title, 200)), title_justify="left")
    table.add_column("")
    table.add_column("greedy", justify="right")
    if sampled:
        table.add_column(f"{sampled['n']} samples", justify="right")
    for label, *cells in rows(greedy, sampled):
        table.add_row(Text(printable(label, 60)), *(Text(cell) for cell in (cells if sampled else cells[:1])))
    Console().print(table)


def rows(greedy: dict, sampled: dict | None) -> Iterator[Row]:
    sides = (greedy, sampled or greedy)  # without samples the second one is not shown
    yield f"accuracy (mean@{sampled['n']})" if sampled else "accuracy", *(interval(side["accuracy"]) for side in sides)
    for name in ("pass@k", "maj@k"):
        for k, estimate in sides[1].get(name, {}).items():
            if int(k) > (1 if name == "pass@k" else 2):  # pass@1 is mean@n; so are maj@1 and maj@2 if all answer
                yield name.replace("k", k), "", interval(estimate)
    for name in greedy["means"]:
        label = name.removeprefix("reward_").replace("_", " ")
        yield label, *(_number(side["means"].get(name)) for side in sides)
    for name in sides[0]["accuracy_if"] | sides[1]["accuracy_if"]:
        yield f"accuracy if {name}", *(_number(side["accuracy_if"].get(name)) for side in sides)
    lengths = [side["length"] for side in sides]
    form = "{mean:.1f} ({5%:.0f}, {50%:.0f}, {95%:.0f})"
    yield "tokens: mean (5 %, 50 %, 95 %)", *(form.format(**length) for length in lengths)
    pairs = ([_number(length[f"mean_if_{kind}"], 1) for kind in ("right", "wrong")] for length in lengths)
    yield "tokens if right, if wrong", *map(", ".join, pairs)
    yield "cut off", *(_number(side["cut_off"]) for side in sides)
    yield "no answer", *(_number(side["no_answer"]) for side in sides)


def interval(estimate: dict) -> str:
    """
    >>> interval({"value": 0.25, "low": 0.2, "high": 0.3125})
    '0.250 [0.200-0.312]'
    """
    return "{value:.3f} [{low:.3f}-{high:.3f}]".format(**estimate)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
