"""The countdown task: what counts as an answer, expressions that policies write, and the solver."""

import itertools
import random
import re
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from tasks import countdown

from harness.data.row_checks import try_solutions
from harness.data.task import Row, Task


def decisions() -> list[tuple[dict, str, int, int]]:
    """The table of the task's docstring: row, completion, and what it earns."""
    found = []
    for line in countdown.__doc__.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] != "numbers":
            numbers, target, text, correct, valid, _ = cells
            text = text if "<" in text else f"<answer>{text}</answer>"
            found.append(
                ({"nums": [*map(int, numbers.split())], "target": int(target)}, text, int(correct), int(valid))
            )
    return found


@pytest.mark.parametrize(("row", "text", "correct", "valid"), decisions(), ids=[text for _, text, *_ in decisions()])
def test_the_table_of_decisions_holds(row, text, correct, valid):
    rewards = countdown.reward(row, text)
    assert (rewards["correct"], rewards["valid"]) == (correct, valid)


def test_the_table_was_read():
    assert len(decisions()) > 45
    assert {decision[2:] for decision in decisions()} == {(0, 0), (0, 1), (1, 1)}


@pytest.mark.parametrize(
    ("text", "answered", "is_format"),
    [
        ("<think>3-5</think><answer>3*5</answer>", 1, 1),
        ("<answer>nonsense</answer>", 1, 1),
        ("I think <answer>3*5</answer>", 1, 0),
        ("<answer>3</answer><answer>5</answer>", 0, 0),
        ("3*5", 0, 0),
        ("", 0, 0),
    ],
)
def test_answered_and_format_do_not_depend_on_the_value(text, answered, is_format):
    rewards = countdown.reward({"nums": [3, 5], "target": 15}, text)
    assert (rewards["answered"], rewards["format"]) == (answered, is_format)


@pytest.mark.parametrize(
    ("text", "description"),
    [
        ("<think>3+5=8<15, 3*5=15</think><answer>3*5</answer>", (2, 0, 0, 0)),
        ("<think>3+5=8<15</think><answer>3+5</answer>", (1, 1, 0, 0)),
        ("<think>(3+5)*1=8*1=8<15 (3*5)*1=15*1=15=15</think><answer>3*5</answer>", (2, 0, 0, 0)),
        ("<answer>15</answer>", (0, 1, 0, 0)),
        ("<answer>none</answer>", (0, 0, 1, 0)),
        ("<answer>3*5=15</answer>", (0, 0, 0, 1)),
        ("<answer>15 = 3*5</answer>", (0, 0, 0, 1)),
        ("<answer>3+5=15</answer>", (0, 0, 0, 0)),
        ("<think>3+5=8", (1, 0, 0, 0)),
    ],
)
def test_a_description_says_how_it_was_tried(text, description):
    found = countdown.describe({"nums": [3, 5], "target": 15}, text)
    assert tuple(found.values()) == description
    assert list(found) == ["tries", "false_claim", "gives_up", "equation"]


# Expressions --------------------------------------------------------------------------------------------------------


def random_expression(rng: random.Random, numbers: list[int]) -> str:
    """Any tree of all the numbers, with signs and spaces."""
    if len(numbers) == 1:
        return rng.choice(["", "", "-", "+"]) + str(numbers[0])
    cut = rng.randrange(1, len(numbers))
    left, right = random_expression(rng, numbers[:cut]), random_expression(rng, numbers[cut:])
    return rng.choice(["", " ", "-"]) + f"({left}{rng.choice('+-*/')}{rng.choice(['', ' '])}{right})"


def test_random_expressions_have_the_value_that_python_gives():
    rng = random.Random(0)
    for _ in range(1000):
        numbers = [rng.randrange(12) for _ in range(rng.randint(1, 6))]
        text = random_expression(rng, numbers)
        try:
            value = eval(re.sub(r"\d+", r"Fraction(\g<0>)", text.strip()), {"Fraction": Fraction})
        except ZeroDivisionError:
            value = None
        found = countdown.read_expression(text)
        assert countdown.evaluate_expression(text) == value
        assert found is None or sorted(found[1]) == sorted(numbers)


@pytest.mark.parametrize(
    "text",
    [
        *("9**9**9", "9**9", "7//2", "7%2", "2(3)", "(2)(3)", "()", "", " ", "-", "1 2", "1\n+\n", "(1", "1)", "1,2"),
        *("1_000", "0x10", "1e3", "1E3", "1.", ".5", "1j", "007", "00", "1if 1else 2", "a", "x", "True", "None", "..."),
        *("٣", "²", "½", "1\x002", "\x00", "\ud800", "1;2", "1#2", "'1'", "[1]", "{1}", "1<2", "1=1", "1:=1", "~1"),
        *("1@2", "1^2", "1|2", "1&2", "1<<2", "not 1", "lambda:1", "f(1)", "1\\\n+2", "__import__('os')", "1+" * 150),
        *("(" * 150, "()" * 150, "-" * 299, "1" * 301, "1+" * 150 + "1", "1" + "*1" * 500_000, "(" * 1_000_000),
    ],
    ids=lambda text: ascii(text[:20]),
)
def test_what_is_not_an_expression_has_no_value(text, recwarn):
    assert countdown.evaluate_expression(text) is None
    assert countdown.reward({"nums": [1, 2], "target": 3}, f"<answer>{text}</answer>")["valid"] == 0
    assert not recwarn


def test_the_longest_and_deepest_expressions_are_read():
    most = countdown.MAX_EXPRESSION
    assert countdown.evaluate_expression("9" * most) == 10**most - 1
    assert countdown.evaluate_expression("-" * (most - 1) + "7") == -7
    assert countdown.evaluate_expression("(" * 140 + "7" + ")" * 140) in (7, None)  # as deep as Python's parser goes
    assert countdown.evaluate_expression("*".join(["99"] * 100)) == 99**100
    assert countdown.evaluate_expression("  " + "1+" * 149 + "1\n") == 150
    assert countdown.evaluate_expression("(1\n+ 2)") == 3


def test_an_expression_is_read_near_the_limit_of_recursion():
    def deeper(depth: int) -> Fraction | None:
        return deeper(depth - 1) if depth else countdown.evaluate_expression("-" * 250 + "7")

    frames = len(list(itertools.takewhile(bool, iterate(sys._getframe()))))
    assert deeper(sys.getrecursionlimit() - frames - 100) is None
    assert deeper(10) == 7


def iterate(frame):
    while True:
        yield frame
        frame = frame.f_back


PIECES = st.sampled_from(
    ["<answer>", "</answer>", "<think>", "</think>", *"1234 0()+-*/=\u00d7\u00f7\u2212.,x\n\\{}_", "1+2", "**", "//"]
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.one_of(PIECES, st.text(max_size=3)), max_size=30).map("".join), st.booleans())
def test_no_text_makes_the_reward_raise(text, is_answer):
    text = f"<answer>{text}</answer>" if is_answer else text
    row = {"nums": [1, 2], "target": 3}
    rewards = countdown.reward(row, text)
    assert set(rewards.values()) | {0, 1} == {0, 1}
    assert rewards["correct"] <= rewards["valid"] <= rewards["answered"]
    assert set(countdown.describe(row, text)) == {"tries", "false_claim", "gives_up", "equation"}


# Solutions ----------------------------------------------------------------------------------------------------------


def all_values(numbers: tuple[int, ...]) -> set[Fraction]:
    """Of every expression of all numbers, signs included, by replacing two values with one until one is left."""
    done, todo = set(), [tuple(map(Fraction, numbers))]
    found = set()
    while todo:
        values = tuple(sorted(todo.pop()))
        if values in done:
            continue
        done.add(values)
        if len(values) == 1:
            found |= {values[0], -values[0]}
        for i, j in itertools.permutations(range(len(values)), 2):
            a, b = values[i], values[j]
            rest = [value for k, value in enumerate(values) if k not in (i, j)]
            made = {a + b, a - b, -a - b, a * b, -a * b} | ({a / b, -a / b} if b else set())
            todo += [(*rest, value) for value in made]
    return found


@pytest.mark.parametrize(
    "numbers", [(4,), (0, 3), (2, 3), (3, 3), (0, 0, 5), (1, 2, 7), (2, 2, 3), (0, 1, 4, 4), (3, 3, 8, 8)]
)
def test_a_solution_is_found_exactly_if_there_is_one(numbers):
    possible = all_values(numbers)
    for target in {*possible, *map(Fraction, range(-30, 90))}:
        expression = countdown.find_expression(list(numbers), target)
        assert (expression is not None) == (target in possible), target
        if expression is not None:
            value, used = countdown.read_expression(expression)
            assert (value, sorted(used)) == (target, sorted(numbers))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"nums": [1, 1], "target": 3}, "No expression makes 3 from 1, 1."),
        ({"nums": [1, 4], "target": 9}, "No expression makes 9 from 1, 4."),
        ({"nums": [], "target": 3}, "whole"),
        ({"nums": [1, -2], "target": 3}, "1, -2; 3."),
        ({"nums": [1, None, {}], "target": 3}, "1, None, {}; 3."),
        ({"nums": [1, 2], "target": 2.5}, "1, 2; 2.5."),
        ({"nums": [1, 2], "target": "²"}, "1, 2; ²."),
        ({"nums": [1, 2], "target": "9" * 5000}, "9999."),
        ({"nums": list(range(50)), "target": 3}, "50 numbers are too many"),
    ],
)
def test_a_row_that_nobody_can_solve_is_refused(row, reason):
    row = Row(row)
    row.place = "rows.jsonl:7"
    with pytest.raises(UserError, match=r"rows\.jsonl:7: .*no completion can be right"):
        try_solutions(Task(countdown, "countdown"), [row], "countdown")
    assert reason in countdown.solution(row)
    assert countdown.reward(row, "<answer>1+2</answer>")["correct"] == 0
    assert countdown.messages(row)[0]["content"].startswith("Make ")


def test_rows_may_hold_numbers_as_text():
    for row in ({"nums": ["19", "36", " 55", "7"], "target": "65"}, {"nums": [19.0, 36, 55, 7], "target": 65.0}):
        assert countdown.reward(row, "<answer>55+36-19-7</answer>")["correct"] == 1
        assert countdown.reward(row, countdown.solution(row))["correct"] == 1


def test_weights_of_the_command_line_reach_the_total():
    task = Task(countdown, "countdown", ("correct=0.9", "answered=0.1"))
    row = {"nums": [3, 5], "target": 15}
    totals = [
        task.total_reward(task.reward(row, text)) for text in ("<answer>3*5</answer>", "<answer>3</answer>", "3*5")
    ]
    assert totals == pytest.approx([1, 0.1, 0])
