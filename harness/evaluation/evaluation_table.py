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
    many = sampled or {}
    n = many.get("n")
    yield f"accuracy (mean@{n})" if n else "accuracy", interval(greedy["accuracy"]), interval(many.get("accuracy"))
    for name in ("pass@k", "maj@k"):
        for k, estimate in many.get(name, {}).items():
            if int(k) > (1 if name == "pass@k" else 2):  # pass@1 is mean@n; so are maj@1 and maj@2 if all answer
                yield name.replace("k", k), "", interval(estimate)
    for name in greedy["means"]:
        yield name.removeprefix("reward_").replace("_", " "), *(_number(side, "means", name) for side in (greedy, many))
    for name in greedy["accuracy_if"] | many.get("accuracy_if", {}):
        yield f"accuracy if {name}", *(_number(side, "accuracy_if", name) for side in (greedy, many))
    yield "tokens: mean (5 %, 50 %, 95 %)", _lengths(greedy), _lengths(many)
    yield "tokens if right, if wrong", _lengths_if(greedy), _lengths_if(many)
    yield "cut off", _number(greedy, "cut_off"), _number(many, "cut_off")
    yield "no answer", _number(greedy, "no_answer"), _number(many, "no_answer")


def interval(estimate: dict | None) -> str:
    """
    >>> interval({"value": 0.25, "low": 0.2, "high": 0.3125})
    '0.250 [0.200-0.312]'
    """
    return "" if not estimate else "{value:.3f} [{low:.3f}-{high:.3f}]".format(**estimate)


def _number(side: dict, *names: str) -> str:
    value = side
    for name in names:
        value = (value or {}).get(name)
    return "-" if value is None else f"{value:.3f}"


def _lengths(side: dict) -> str:
    if not side:
        return ""
    return "{mean:.1f} ({5%:.0f}, {50%:.0f}, {95%:.0f})".format(**side["length"])


def _lengths_if(side: dict) -> str:
    if not side:
        return ""
    values = [side["length"][f"mean_if_{kind}"] for kind in ("right", "wrong")]
    return ", ".join("-" if value is None else f"{value:.1f}" for value in values)
