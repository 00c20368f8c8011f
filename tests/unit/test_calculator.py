"""The calculator agrees with exact arithmetic, and answers everything else with a short error.

Its task: the questions, disjoint pools, the rewards, and the bundled files.
"""

import json
import math
import random
import re
import warnings
from fractions import Fraction

import pytest
from calculator_grammar import KINDS
from hypothesis import given, settings
from hypothesis import strategies as st
from run_files import read_lines
from transformers.utils import get_json_schema

from common import calculator_tool
from common.calculator_tool import MAX_DEPTH, MAX_EXPRESSION, calculator
from tasks import calculator as calculator_task

pytestmark = pytest.mark.all_questions

# Exact arithmetic, against Python's own parser and fractions ---------------------------------------------------------

NUMERALS = ("0", "1", "2", "3", "7", "10", "17", "999", "4821", "0.5", "2.", ".25", "1.10", "2.675", "1e3", "25e-1")
NAMES = {
    "Fraction": Fraction,
    "round": lambda x, digits=0: round(x, int(digits)),
    "sqrt": lambda x: Fraction(math.isqrt(x.numerator), math.isqrt(x.denominator)),
}


def make_text(rng: random.Random, depth: int) -> str:
    """A random expression, with more or fewer parentheses and spaces than precedence requires."""
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(NUMERALS) if rng.random() < 0.7 else str(rng.randrange(10 ** rng.randint(1, 12)))
    x, y = make_text(rng, depth - 1), make_text(rng, depth - 1)
    square = f"({make_text(rng, 0)})"
    space = rng.choice(("", " "))
    forms = [f"{x}{space}{sign}{space}{y}" for sign in ("+", "-", "*", "/", "//", "%")]
    forms += [f"-{x}", f"+{space}{x}", f"({x})**{rng.randint(-3, 9)}", f"({x}){space}", f"abs({x})"]
    forms += [f"max({x},{space}{y})", f"min({x}, {y}, {square})", f"round({x})", f"round({x}, {rng.randint(0, 3)})"]
    return rng.choice([*forms, f"sqrt({square}*{square})"])


def exact(text: str) -> Fraction | None:
    """Python's result, with each number as a fraction; None for a division by zero. The text is our own."""
    try:
        return Fraction(eval(re.sub(r"[\d.]+(e-?\d+)?", r"Fraction('\g<0>')", text), NAMES))
    except ZeroDivisionError:
        return None


def test_agrees_with_exact_rational_arithmetic():
    rng, values = random.Random(0), 0
    for _ in range(1000):
        text = make_text(rng, rng.randint(0, 4)).strip()
        value, answer = exact(text), calculator(text)
        if is_an_error(answer):
            assert value is None or len(text) > MAX_EXPRESSION or "200 digits" in answer, text
            continue
        values += 1
        if value.denominator == 1:
            assert answer == str(value), text
        else:
            assert abs(Fraction(answer) - value) <= min(abs(value) / (2 * 10**11), Fraction(1, 2000)), text
    assert values > 500


# Errors ---------------------------------------------------------------------------------------------------------------

ESCAPES = [
    "().__class__", "().__class__.__bases__[0].__subclasses__()", "__import__('os').system('true')",
    "abs.__self__.open('/etc/passwd')", "abs.__globals__", "(1).real", "1 .real", "1..real", "getattr(1, 'real')",
    "eval('1')", "exec('1')", "open('/etc/passwd').read()", "globals()", "lambda: 1", "(lambda: 1)()",
    "[x for x in (1,)]", "[].append(1)", "{1: 2}", "(1, 2)[0]", "f'{1}'", "'a' * 3", "b'a'", '"\\d"', "x := 1",
    "(abs := 1)", "1 if 1 else 2", "1 and 2", "not 1", "1 < 2", "1 is 1", "1or 2", "0x1for x in (1,)", "await 1",
    "yield", "print(1)", "round(1, ndigits=2)", "max(*(1, 2))", "max(**1)", "abs", "abs(abs)", "-abs", "2(3)",
    "(2)(3)", "abs(1)(2)", "abs(-1)abs(2)", "1 # 2", "1; 2", "1\\\n+2", "@abs", "...",
]  # fmt: skip
NO_VALUE = [
    "9**9**9", "9**9**9**9", "10**10000", "-9**9**9", "(1/9)**9**9", "2**-99999", "10**200", "1/10**200", "1e200",
    "1e999", "1e-999", "1e9999", "0**-1", "1/0", "1//0", "1%0", "1/(1-1)", "(-8)**0.5", "2**0.5", "2**(1/3)",
    "sqrt(-1)", "sqrt(1e-199)*sqrt(1e-199)", "round(1, 10**100)", "round(1, -10**9)", "round(1, 0.5)", "abs()",
    "abs(1, 2)", "max()", "min()", "round()", "round(1, 2, 3)", "sqrt(1, 2)", "*".join(["9999999999"] * 25),
]  # fmt: skip
HOSTILE_TEXTS = [
    "", " ", "\n", "2 +\n2", "2\r+2", "2\t+2", "2\x00", "\x00", "\x1b[31m", "\udc80", "2+\ud83d", "😀", "٣+٤",
    "\uff12+\uff12", "²", "2\xd73", "2\u22121", "\uff41\uff42\uff53(1)", "\N{MATHEMATICAL BOLD SMALL A}bs(1)",
    "True", "None", "inf", "nan", "1_000", "1,000", "1,234*2", "(1,)", "()", "1j", "1+2j", "0x10", "0b1", "007",
    "1.2.3", "1e", "1e+", "5!", "20%", "2^3", "$5", "1 2", "2 * * 3", "1 +", "* 1", "= 1", "17*23=", "(" * 50,
    ")" * 50, "(" * 150 + "1" + ")" * 150, "(" * MAX_DEPTH + "(1)" + ")" * MAX_DEPTH, "-" * 299 + "1",
    "1" + "+1" * 149, "2" + "**1" * 99 + "**1", "abs(" * 60 + "1" + ")" * 60, "9" * 300, "a" * 300,
    "\U0001f600" * 300, "(" * 1_000_000, "(" * 500_000 + ")" * 500_000, "٣" * 1_000_000, "9" * 1_000_000,
    "-" * 1_000_000, " " * 1_000_000 + "1",
    *(None, 17, 1.5, True, b"1+1", ["1+1"], {"expression": "1"}),  # only text is an expression
]  # fmt: skip


def is_an_error(answer: str) -> bool:
    """The answer is an error that a policy can read, whatever provoked it."""
    is_short = len(answer) <= 130 and answer.isascii() and answer.isprintable()
    return answer.startswith("error: ") and is_short and "Traceback" not in answer


def test_what_has_no_value_is_an_error(capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers = [(repr(text)[:100], calculator(text)) for text in ESCAPES + NO_VALUE + HOSTILE_TEXTS]
    assert [(text, answer) for text, answer in answers if not is_an_error(answer)] == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.text(max_size=40) | st.text("0123456789.eE+-*/%(), abmaxround_\n", max_size=40))
def test_any_text_has_a_short_answer(text):
    answer = calculator(text)
    assert is_an_error(answer) or Fraction(answer) is not None


def test_python_never_parses_what_is_not_arithmetic(monkeypatch):
    parsed, parse = [], calculator_tool.ast.parse
    monkeypatch.setattr(calculator_tool.ast, "parse", lambda text, **more: parsed.append(text) or parse(text, **more))
    for text in (*ESCAPES, *HOSTILE_TEXTS, "2+2"):
        calculator(text)
    assert "2+2" in parsed
    assert all(set(text) <= set("0123456789.eE+-*/%(), absmxinroundqt") for text in parsed)
    assert max(map(len, parsed)) <= MAX_EXPRESSION


# Answers --------------------------------------------------------------------------------------------------------------


def test_answers_are_exact_or_rounded_once():
    expected = {
        " 17 * 23\n": "391", "-7/2": "-3.5", "0.1+0.2": "0.3", "1/3": "0.333333333333", "2/3": "0.666666666667",
        "1/3*3": "1", "3/1000000": "0.000003", "2/3/10**6": "6.66666666667e-7", "1e-20": "1e-20",
        "2/3/10**6*10**6": "0.666666666667", "123456789012.5": "123456789012.5",
        "(10**20+1)/3": "33333333333333333333.667", "1200+1/10**13": "1200", "-2**2": "-4", "2**3**2": "512",
        "0**0": "1", "(-1)**(10**150+1)": "-1", "round(1234, -2)": "1200", "sqrt(2/8)": "0.5",
        "sqrt(2)": "1.41421356237", "sqrt(2)**2": "2", "min(3)": "3", "(" * 100 + "1" + ")" * 100: "1",
        "1" + "+1" * 100: "101", "10**199": "1" + "0" * 199, "9" * 200: "9" * 200,
    }  # fmt: skip
    assert {text: calculator(text) for text in expected} == expected


def test_a_deep_stack_is_no_exception():
    answers = []

    def dig() -> None:
        try:
            dig()
        except RecursionError:
            answers.append(calculator("1" + "+1" * 50))
            raise

    with pytest.raises(RecursionError):
        dig()
    assert set(answers) >= {"error: the expression is nested too deeply", "51"}


def test_its_docstring_describes_it():
    function = get_json_schema(calculator)["function"]
    assert function["parameters"]["required"] == ["expression"]
    assert all(name in function["description"] for name in calculator_tool._FUNCTIONS)
    assert ">>>" not in json.dumps(function)  # every prompt contains all of it


# The task -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files() -> dict[str, list[dict]]:
    return {"train": read_lines(calculator_task.TRAIN_DATA), "heldout": read_lines(calculator_task.EVAL_DATA)}


def test_the_bundled_files_are_what_the_script_writes(files, load_script):
    make_rows = load_script("imitation/tiny_policy/make_calculator_tasks.py").make_rows
    for only_pool, rows in files.items():
        assert make_rows(only_pool, 256) == rows[:256]
        assert {row["kind"] for row in rows} == set(KINDS)
        assert 0.2 < sum(row["kind"] == "easy" for row in rows) / len(rows) < 0.3


def test_training_and_held_out_questions_share_no_hard_sum(files):
    asked = [
        {tuple(sorted(map(int, re.findall(r"\d+", row["question"])))) for row in rows if row["kind"] != "easy"}
        for rows in files.values()
    ]
    assert len(asked[0]) > 2000
    assert not asked[0] & asked[1]


def test_every_answer_is_what_python_computes(files):
    computed = 0
    for row in files["heldout"]:
        text = row["question"].replace(" plus ", "+").replace(" minus ", "-").replace(" times ", "*")
        expression = re.sub(r"[^\d+*-]", "", text)
        if not expression.isdigit():
            assert str(eval(expression)) == row["answer"]  # from our own file
            computed += 1
        assert calculator_task.reward(row, calculator_task.solution(row)) == {"correct": 1.0, "format": 1.0}
    assert computed > 400


@pytest.mark.parametrize(("text", "correct", "well_formed"), [
    ("<answer>21330</answer>", 1, 1), ("\n<answer>21,330</answer>", 1, 1),
    ("<think>a</think>\n<think>b</think>\n<answer>21330</answer>", 1, 1),
    ("<think>a</think>\nIt is\n<answer>21330</answer>", 1, 0),
    ("<answer>21330</answer>\n<answer>21330</answer>", 0, 0),
    ("<answer>1</answer>\n<answer>21330</answer>", 0, 0), ("<think><answer>21330</answer></think>", 0, 0),
    ("<answer>21331</answer>", 0, 1), ("<answer>21330", 0, 0), ("<think>" * 1000, 0, 0), ("", 0, 0),
])  # fmt: skip
def test_the_reward_of_what_was_said_in_all_turns(text, correct, well_formed):
    row = {"question": "What is 347 times 58 plus 1204?", "answer": "21330", "kind": "chain"}
    assert calculator_task.reward(row, text) == {"correct": correct, "format": well_formed}
    assert calculator_task.describe(row, text) == {"reasoned": float(text.startswith("<think>a</think>"))}
