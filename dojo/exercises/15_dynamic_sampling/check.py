"""Dynamic sampling, one group at a time."""

from collections.abc import Callable

import torch

from dojo.judge import Call


def call(returns: list[list[float]], needed: int, about: str) -> Call:
    return Call("dynamic_sampling", {"returns": torch.tensor(returns), "needed": needed}, about=about)


CALLS = [
    call([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [1.0, 1.0, 0.0]], 2, "as many useful groups as needed"),
    call([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0]], 2, "one useful group, two needed"),
    call([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], 2, "three useful groups, two needed"),
    call([[0.2, 0.9, 0.2], [0.2, 0.2, 1.0], [0.5, -1.0, 0.0]], 3, "partial and negative rewards"),
    call([[0.9] * 6], 1, "six times the same return of 0.9"),
    call([[0.0, 0.0], [1.0, 1.0]], 1, "no useful group"),
]


def differs(row: list[float]) -> bool:
    return any(x != row[0] for x in row)


def slow(call: Call, is_useful: Callable = differs, cut: bool = True, more_at: int = 0) -> dict[str, list[int] | bool]:
    """`more_at`: 1 if more are sampled even where the number is right."""
    needed, groups = call.arguments["needed"], []
    for q, row in enumerate(call.arguments["returns"].tolist()):
        if is_useful(row) and (len(groups) < needed or not cut):
            groups.append(q)
    return {"groups": groups, "more": len(groups) < needed + more_at}


def expected(call: Call) -> dict[str, list[int] | bool]:
    return slow(call)


MISTAKES = {
    "A group of equal returns is kept because of rounding: the mean of equal numbers need not be that number in "
    "float32, so that their standard deviation need not be 0.": lambda call: slow(
        call, lambda row: torch.tensor([row]).std(dim=1).item() > 0
    ),
    "Only groups without a single success are left out. If all completions are right, there is nothing to compare "
    "either.": lambda call: slow(call, lambda row: any(x > 0 for x in row)),
    "Only groups without a failure are left out. If all completions are wrong, there is nothing to compare "
    "either.": lambda call: slow(call, lambda row: any(x < 1 for x in row)),
    "The rewards are not only 0 and 1: compare the returns of a group with each other, and not with 0 or "
    "1.": lambda call: slow(call, lambda row: 0 < sum(x > 0 for x in row) < len(row)),
    "The rewards are not only 0 and 1: compare the returns of a group with each other, and not their sum with "
    "G.": lambda call: slow(call, lambda row: 0 < sum(row) < len(row)),
    "There are more than `needed` groups: keep only the first ones.": lambda call: slow(call, cut=False),
    "Nothing more must be sampled if exactly as many groups as needed were found.": lambda call: slow(call, more_at=1),
}
