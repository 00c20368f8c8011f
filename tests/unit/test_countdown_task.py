"""The countdown task: valid answers, expressions as policies write them, and the solver."""

import itertools
import random
import re
import sys
from fractions import Fraction

import pytest
from decisions import decisions, tagged

from common.errors import UserError
from tasks import countdown

from harness.data.rows import Row
from harness.task.row_checks import try_solutions
from harness.task.scorer import Scorer
from harness.task.task_file import TaskFile

ROW = {"nums": [3, 5], "target": 15}


def value_of(text: str) -> Fraction | None:
    found = countdown.read_expression(text)
    return found and found[0]


def test_the_table_of_decisions_holds():
    table = list(decisions(countdown, num_columns=3))
    assert len(table) > 45
    assert {column for *_, column in table} == {0, 1, 2}
    for problem, answer, column in table:
        numbers, target = problem.split(" = ")
        rewards = countdown.reward({"nums": [*map(int, numbers.split())], "target": int(target)}, tagged(answer))
        assert (rewards["correct"], rewards["valid"]) == (column == 0, column <= 1), (problem, answer)


@pytest.mark.parametrize(("text", "answered", "is_format", "description"), [
    ("<think>3-5</think><answer>3*5</answer>", 1, 1, (0, 0, 0, 0)),
    ("<think>3+5=8<15, 3*5=15</think><answer>3*5</answer>", 1, 1, (2, 0, 0, 0)),
    ("<think>3+5=8<15</think><answer>3+5</answer>", 1, 1, (1, 1, 0, 0)),
    ("<think>(3+5)*1=8*1=8<15 (3*5)*1=15*1=15=15</think><answer>3*5</answer>", 1, 1, (2, 0, 0, 0)),
    ("<answer>15</answer>", 1, 1, (0, 1, 0, 0)), ("<answer>none</answer>", 1, 1, (0, 0, 1, 0)),
    ("<answer>3*5=15</answer>", 1, 1, (0, 0, 0, 1)), ("<answer>15 = 3*5</answer>", 1, 1, (0, 0, 0, 1)),
    ("<answer>3+5=15</answer>", 1, 1, (0, 0, 0, 0)), ("I think <answer>3*5</answer>", 1, 0, (0, 0, 0, 0)),
    ("<answer>3</answer><answer>5</answer>", 0, 0, (0, 0, 0, 0)), ("<think>3+5=8", 0, 0, (1, 0, 0, 0)),
    ("3*5", 0, 0, (0, 0, 0, 0)), ("", 0, 0, (0, 0, 0, 0)),
])  # fmt: skip
def test_what_else_is_said_of_a_completion(text, answered, is_format, description):
    rewards, found = countdown.reward(ROW, text), countdown.describe(ROW, text)
    assert (rewards["answered"], rewards["format"]) == (answered, is_format)
    assert list(found.values()) == list(description)


# Expressions --------------------------------------------------------------------------------------------------------


def exact(text: str) -> tuple[Fraction, list[int]] | None:
    """Python's result for an expression, with each number as a fraction; the text is our own."""
    text = text.replace("\u00d7", "*").replace("\u00f7", "/").replace("\u2212", "-")
    is_none = re.search(r"[^0-9+*/() \n-]|[*]\s*[*]|/\s*/|(?<![0-9])0[0-9]|[0-9]\s+[0-9]", text)
    try:
        code = re.sub(r"[0-9]+", r"Fraction('\g<0>')", " ".join(text.split()))
        return None if is_none else (eval(code, {"Fraction": Fraction}), [*map(int, re.findall("[0-9]+", text))])
    except (SyntaxError, TypeError, ZeroDivisionError):
        return None


def an_expression(rng: random.Random, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    cut = rng.randrange(1, len(numbers))
    parts = [an_expression(rng, part) for part in (numbers[:cut], numbers[cut:])]
    left, right = [f"({part})" if not part.isdecimal() and rng.random() < 0.8 else part for part in parts]
    space, sign = rng.choice(["", " "]), rng.choice("+-*/" if rng.random() < 0.9 else "\u00d7\u00f7\u2212")
    return f"{left}{space}{sign}{space}{right}"


def spoilt(rng: random.Random, text: str) -> str:
    """An expression with a fault that the two may or may not both notice."""
    place = rng.randrange(len(text) + 1)
    more = rng.choice("0123456789+-*/() .,=xe_\u0663\u00b2")
    faults = [text[:place] + more + text[place:], text[:place] + text[place + 1 :]]
    faults += [text.replace(*pair, 1) for pair in (("*", "**"), ("/", "//"), ("(", ""), ("+", "-"), ("(", "["))]
    faults += [form.replace("E", text) for form in ("E+0", "E*1", "E = 5", "-E", "(E)", "E+E", "E\n", "abs(E)", "E#")]
    return rng.choice(faults)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_generated_expressions_are_judged_as_by_python():
    rng, outcomes = random.Random(0), set()
    for _ in range(3000):
        numbers = [rng.randrange(1, 100) for _ in range(rng.randrange(2, 5))]
        text = an_expression(rng, rng.sample(numbers, len(numbers)))
        found = exact(text)
        target = found[0] if found is not None and found[0].denominator == 1 else Fraction(7)
        answer = spoilt(rng, text) if rng.random() < 0.6 else text
        judged = exact(answer)
        is_valid = judged is not None and sorted(judged[1]) == sorted(numbers)
        row = {"nums": numbers, "target": int(target)}
        rewards = countdown.reward(row, f"<think>{text}</think><answer>{answer}</answer>")
        assert rewards["valid"] == is_valid, (row, answer)
        assert rewards["correct"] == (is_valid and judged[0] == target), (row, answer)
        assert value_of(answer) == (judged and judged[0]), answer
        outcomes.add((rewards["correct"], rewards["valid"]))
    assert len(outcomes) == 3


NO_EXPRESSIONS = [
    *("9**9**9", "9**9", "7//2", "7%2", "2(3)", "(2)(3)", "()", "", " ", "-", "1 2", "1\n+\n", "(1", "1)", "1,2"),
    *("1_000", "0x10", "1e3", "1E3", "1.", ".5", "1j", "007", "00", "1if 1else 2", "a", "x", "True", "None", "..."),
    *("٣", "²", "½", "1\x002", "\x00", "\ud800", "1;2", "1#2", "'1'", "[1]", "{1}", "1<2", "1=1", "1:=1", "~1"),
    *("1@2", "1^2", "1|2", "1&2", "1<<2", "not 1", "lambda:1", "f(1)", "1\\\n+2", "__import__('os')", "1+" * 150),
    *("(" * 150, "()" * 150, "-" * 299, "1" * 301, "1+" * 150 + "1", "1" + "*1" * 500_000, "(" * 1_000_000),
]


def test_what_is_not_an_expression_has_no_value(recwarn):
    assert [text for text in NO_EXPRESSIONS if value_of(text) is not None] == []
    rewards = [countdown.reward({"nums": [1, 2], "target": 3}, f"<answer>{text}</answer>") for text in NO_EXPRESSIONS]
    assert {reward["valid"] for reward in rewards} == {0}
    assert value_of("9" * countdown.MAX_EXPRESSION) == 10**countdown.MAX_EXPRESSION - 1  # the longest that is one
    assert not recwarn


def test_an_expression_is_read_near_the_limit_of_recursion():
    def deeper(depth: int) -> Fraction | None:
        return deeper(depth - 1) if depth else value_of("-" * 250 + "7")

    frame, frames = sys._getframe(), 0
    while frame:
        frame, frames = frame.f_back, frames + 1
    assert deeper(sys.getrecursionlimit() - frames - 100) is None
    assert deeper(10) == 7


# Solutions ----------------------------------------------------------------------------------------------------------


def all_values(values: tuple[Fraction, ...]) -> set[Fraction]:
    """The values of every expression of all numbers, signs included, by repeatedly replacing two numbers with one."""
    if len(values) == 1:
        return {values[0], -values[0]}
    found = set()
    for i, j in itertools.permutations(range(len(values)), 2):
        a, b = values[i], values[j]
        made = {a + b, a - b, -a - b, a * b, -a * b} | ({a / b, -a / b} if b else set())
        rest = tuple(value for k, value in enumerate(values) if k not in (i, j))
        found |= set().union(*(all_values((*rest, value)) for value in made))
    return found


@pytest.mark.parametrize(
    "numbers", [(4,), (0, 3), (2, 3), (3, 3), (0, 0, 5), (1, 2, 7), (2, 2, 3), (0, 1, 4, 4), (3, 3, 8, 8)]
)
def test_a_solution_is_found_exactly_if_there_is_one(numbers):
    possible = all_values(tuple(map(Fraction, numbers)))
    for target in {*possible, *map(Fraction, range(-30, 90))}:
        expression = countdown.find_expression(list(numbers), target)
        assert (expression is not None) == (target in possible), target
        if expression is not None:
            value, used = countdown.read_expression(expression)
            assert (value, sorted(used)) == (target, sorted(numbers))


@pytest.mark.parametrize(("nums", "target", "reason"), [
    ([1, 1], 3, "No expression makes 3 from 1, 1."), ([1, 4], 9, "No expression makes 9 from 1, 4."),
    ([], 3, "whole"), ([1, -2], 3, "1, -2; 3."), ([1, None, {}], 3, "1, None, {}; 3."),
    ([1, 2], 2.5, "1, 2; 2.5."), ([1, 2], "²", "1, 2; ²."), ([1, 2], "9" * 5000, "9999."),
    (list(range(50)), 3, "50 numbers are too many"),
])  # fmt: skip
def test_a_row_that_nobody_can_solve_is_refused(nums, target, reason):
    row = Row({"nums": nums, "target": target})
    row.place = "rows.jsonl:7"
    with pytest.raises(UserError, match=r"rows\.jsonl:7: .*no completion can be right"):
        try_solutions(Scorer(TaskFile(countdown, "countdown")), [row])
    assert reason in countdown.solution(row)
    assert countdown.reward(row, "<answer>1+2</answer>")["correct"] == 0
    assert countdown.messages(row)[0]["content"].startswith("Make ")
