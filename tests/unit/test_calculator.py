"""The calculator agrees with exact arithmetic, and answers everything else with a short error.

Its task: the questions, that no two pools share one, the rewards, and the bundled files.
"""

import json
import math
import random
import warnings
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import get_json_schema

import common.calculator_tool
from common.calculator_tool import MAX_DEPTH, MAX_DIGITS, MAX_EXPRESSION, calculator
from tasks import calculator as calculator_task
from tasks.grammars.arithmetic_grammar import pool
from tasks.grammars.calculator_grammar import KINDS, MAX_RESULT, draw_calculator_question

pytestmark = pytest.mark.all_questions

# Exact arithmetic, over trees that are written out rather than read ---------------------------------------------------

LEVELS = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2, "neg": 3, "pos": 3, "**": 4}  # how tightly they bind
NUMERALS = ("0", "1", "2", "3", "7", "10", "17", "999", "4821", "0.5", "2.", ".25", "1.10", "2.675", "1e3", "25e-1")


class NoValueError(Exception):
    """Division by zero, an exponent that is not an integer, or a number with too many digits."""


def make_tree(rng: random.Random, depth: int) -> tuple:
    if depth == 0 or rng.random() < 0.15:
        return ("number", rng.choice(NUMERALS) if rng.random() < 0.7 else str(rng.randrange(10 ** rng.randint(1, 12))))
    name = rng.choice((*LEVELS, *"+-*/", "abs", "max", "min", "round", "sqrt"))
    if name == "**":  # few have a value with any exponent
        exponents = [("number", str(rng.randint(0, 9))), ("neg", ("number", "3")), make_tree(rng, 1)]
        return (name, make_tree(rng, depth - 1), rng.choice(exponents))
    if name == "round":
        return (name, make_tree(rng, depth - 1), *[("number", str(rng.randint(0, 3)))] * rng.randint(0, 1))
    if name == "sqrt":  # of a square; other roots have a test of their own
        root = make_tree(rng, min(depth - 1, 1))
        return (name, ("*", root, root))
    operands = {"neg": 1, "pos": 1, "abs": 1, "max": rng.randint(1, 3), "min": rng.randint(1, 3)}.get(name, 2)
    return (name, *(make_tree(rng, depth - 1) for _ in range(operands)))


def written(rng: random.Random, tree: tuple, least: int = 0) -> str:
    """With parentheses where precedence asks for them, `least` being how tightly the tree must bind, and some more."""
    name, *operands = tree
    space = " " * (rng.random() < 0.3)
    if name == "number":
        text, level = operands[0], 5
    elif name not in LEVELS:
        text, level = f"{name}{space}({f',{space}'.join(written(rng, operand) for operand in operands)})", 5
    elif len(operands) == 1:
        text, level = {"neg": "-", "pos": "+"}[name] + space + written(rng, operands[0], 3), 3
    else:
        level = LEVELS[name]
        left, right = (5, 3) if name == "**" else (level, level + 1)
        text = f"{written(rng, operands[0], left)}{space}{name}{space}{written(rng, operands[1], right)}"
    return f"({space}{text})" if level < least or rng.random() < 0.05 else text


def exact(tree: tuple) -> Fraction:
    name, *operands = tree
    value = Fraction(operands[0]) if name == "number" else exact_operation(name, *map(exact, operands))
    if max(len(str(abs(value.numerator))), len(str(value.denominator))) > MAX_DIGITS:
        raise NoValueError
    return value


def exact_operation(name: str, x: Fraction, *others: Fraction) -> Fraction:
    y = others[0] if others else Fraction(0)
    if name in ("/", "//", "%") and y == 0:
        raise NoValueError
    if name == "**":
        return exact_power(x, y)
    if name == "round":
        return nearest(x, int(y))
    if name == "sqrt":
        return Fraction(math.isqrt(x.numerator), math.isqrt(x.denominator))
    quotient = math.floor(x / y) if name in ("//", "%") else 0
    values = {"+": x + y, "-": x - y, "*": x * y, "//": Fraction(quotient), "%": x - y * quotient, "abs": abs(x)}
    values |= {"neg": -x, "pos": x, "max": max(x, *others, x), "min": min(x, *others, x)}
    return x / y if name == "/" else values[name]


def nearest(x: Fraction, digits: int) -> Fraction:
    """The nearest number of so many digits; of two, the even one."""
    scaled = x * 10**digits
    below = math.floor(scaled)
    gap = scaled - below - Fraction(1, 2)
    return Fraction(below + (gap > 0 or (gap == 0 and below % 2 == 1))) / 10**digits


def exact_power(x: Fraction, y: Fraction) -> Fraction:
    if y.denominator != 1 or (x == 0 and y < 0):
        raise NoValueError
    if abs(x) in (0, 1):
        return x ** (int(y) if abs(y) < 2 else 2 + y % 2)
    if abs(y) > 10 * MAX_DIGITS:  # 2**2000 is too long
        raise NoValueError
    value = Fraction(1)
    for _ in range(abs(int(y))):
        value *= x
        if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
            raise NoValueError
    return value if y >= 0 else 1 / value


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**32))
def test_agrees_with_exact_rational_arithmetic(seed):
    """A hundred expressions for each of a hundred seeds."""
    rng = random.Random(seed)
    num_values = 0
    for _ in range(100):
        tree = make_tree(rng, rng.randint(0, 4))
        text = written(rng, tree)
        answer = calculator(text)
        try:
            value = exact(tree)
        except NoValueError:
            assert is_an_error(answer), text
            continue
        if len(text) > MAX_EXPRESSION:
            assert answer == f"error: the expression has more than {MAX_EXPRESSION} characters"
            continue
        num_values += 1
        if value.denominator == 1:
            assert answer == str(value), text
        else:
            assert abs(Fraction(answer) - value) <= min(abs(value) / (2 * 10**11), Fraction(1, 2000)), text
    assert num_values > 50


# What is refused ------------------------------------------------------------------------------------------------------

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
]  # fmt: skip


def is_an_error(answer: str) -> bool:
    """And one that a policy can read, whatever provoked it."""
    is_short = len(answer) <= 130 and answer.isascii() and answer.isprintable()
    return answer.startswith("error: ") and is_short and "Traceback" not in answer


@pytest.mark.parametrize("texts", [ESCAPES, NO_VALUE, HOSTILE_TEXTS], ids=["escapes", "no_value", "hostile_texts"])
def test_what_has_no_value_is_an_error(texts, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers = {text: calculator(text) for text in texts}
    assert {text[:100]: answer for text, answer in answers.items() if not is_an_error(answer)} == {}
    assert capfd.readouterr() == ("", "")


def test_only_text_is_an_expression():
    for value in (None, 17, 1.5, True, b"1+1", ["1+1"], {"expression": "1"}, object()):
        assert calculator(value) == "error: the expression is not text"


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.text(max_size=40) | st.text("0123456789.eE+-*/%(), abmaxround_\n", max_size=40))
def test_any_text_has_a_short_answer(text):
    answer = calculator(text)
    assert is_an_error(answer) or Fraction(answer) is not None


def test_python_never_parses_what_is_not_arithmetic(monkeypatch):
    """Not even a text with which its parser would only warn."""
    parsed = []
    parse = common.calculator_tool.ast.parse
    monkeypatch.setattr(
        common.calculator_tool.ast, "parse", lambda text, **settings: parsed.append(text) or parse(text, **settings)
    )
    for text in (*ESCAPES, *HOSTILE_TEXTS, "2+2"):
        calculator(text)
    assert "2+2" in parsed
    assert all(set(text) <= set("0123456789.eE+-*/%(), absmxinroundqt") for text in parsed)
    assert max(map(len, parsed)) <= MAX_EXPRESSION


def test_an_error_says_what_to_change():
    expected = {
        "1/0": "division by zero",
        "": "not an arithmetic expression",
        "17*23=": "cannot read '='",
        "1e9999": "cannot read '1e9999'",
        "1_000": "cannot read '1_000'",
        "2\x00": "cannot read '\\x00'",
        "sin(1)": "unknown name 'sin'; known are abs, max, min, round, sqrt",
        "1,234*2": "a comma may only separate the arguments of a function",
        "2**0.5": "an exponent must be an integer; a root is written sqrt(x)",
        "10**200": "a number has more than 200 digits",
        "9**9**9": "a number has more than 200 digits",
        "sqrt(-4)": "the square root of a negative number",
        "round(2, 0.5)": "round takes a whole number of digits, 200 at most",
        "max()": "wrong number of arguments of a function",
        "(" * 101 + "1" + ")" * 101: "the expression is nested too deeply",
        "1" + "+1" * 149: "the expression is nested too deeply",
        "1" * 301: "the expression has more than 300 characters",
    }
    assert {text: calculator(text) for text in expected} == {text: f"error: {say}" for text, say in expected.items()}


# What is answered -----------------------------------------------------------------------------------------------------


def test_answers_are_exact_or_rounded_once():
    expected = {
        " 17 * 23\n": "391",
        "6/3": "2",
        "-7/2": "-3.5",
        "0.1+0.2": "0.3",
        "1/3": "0.333333333333",
        "2/3": "0.666666666667",
        "1/3*3": "1",
        "3/1000000": "0.000003",
        "2/3/10**6": "6.66666666667e-7",
        "1e-20": "1e-20",
        "2/3/10**6*10**6": "0.666666666667",
        "123456789012.5": "123456789012.5",
        "(10**20+1)/3": "33333333333333333333.667",
        "1200+1/10**13": "1200",  # rounded
        "1e3": "1000",
        "-2**2": "-4",
        "2**-1": "0.5",
        "2**3**2": "512",
        "0**0": "1",
        "(-1)**(10**150+1)": "-1",
        "-7//2": "-4",
        "-7%3": "2",
        "7.5%2": "1.5",
        "round(2.5)": "2",
        "round(2.675, 2)": "2.68",
        "round(1234, -2)": "1200",
        "sqrt(9)": "3",
        "sqrt(2/8)": "0.5",
        "sqrt(2)": "1.41421356237",
        "sqrt(2)**2": "2",
        "max(1,2)": "2",
        "min(3)": "3",
        "(" * 100 + "1" + ")" * 100: "1",
        "1" + "+1" * 100: "101",
        "10**199": "1" + "0" * 199,
        "9" * 200: "9" * 200,
    }
    assert {text: calculator(text) for text in expected} == expected


def test_a_deep_stack_is_no_exception():
    """Where the interpreter's own limit is near, the answer is an error, too."""
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
    assert function["name"] == "calculator"
    assert function["parameters"]["required"] == ["expression"]
    assert "17*23" in function["parameters"]["properties"]["expression"]["description"]
    assert all(name in function["description"] for name in common.calculator_tool._FUNCTIONS)
    assert ">>>" not in json.dumps(function)  # all of it stands in every prompt


# The task -------------------------------------------------------------------------------------------------------------


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def files() -> dict[str, list[dict]]:
    return {"train": rows_of(calculator_task.TRAIN_DATA), "heldout": rows_of(calculator_task.EVAL_DATA)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("only_pool", ["train", "heldout", "warm_start"])
def test_questions_are_of_their_kind_and_pool(kind, only_pool):
    rng = random.Random(1)
    for _ in range(50):
        question = draw_calculator_question(rng, kind, only_pool)
        numbers = [number for term in question.terms for number in term.factors]
        assert pool(question) == only_pool
        assert 0 <= question.answer <= MAX_RESULT
        assert (len(question.terms) == 1) == (kind == "product")
        assert (max(numbers) < 100) == (kind == "easy")


def test_the_bundled_files_are_what_the_script_writes(files, load_script):
    make_rows = load_script("data/make_calculator_tasks.py").make_rows
    for only_pool, rows in files.items():
        assert make_rows(only_pool, len(rows)) == rows
        assert {row["kind"] for row in rows} == set(KINDS)
        assert 0.2 < sum(row["kind"] == "easy" for row in rows) / len(rows) < 0.3


def numbers_in(question: str) -> tuple[int, ...]:
    digits = "".join(letter if letter.isdigit() else " " for letter in question)
    return tuple(sorted(map(int, digits.split())))


def test_training_and_held_out_questions_share_no_hard_sum(files):
    """By the numbers in their texts, so independently of the grammar's own keys."""
    asked = [{numbers_in(row["question"]) for row in rows if row["kind"] != "easy"} for rows in files.values()]
    assert len(asked[0]) > 2000
    assert not asked[0] & asked[1]


def test_every_answer_is_what_python_computes(files):
    words = {" plus ": "+", " minus ": "-", " times ": "*"}
    computed = 0
    for row in files["heldout"]:
        text = row["question"]
        for word, symbol in words.items():
            text = text.replace(word, symbol)
        expression = "".join(letter for letter in text if letter in "0123456789+-*")
        if "+" in expression or "*" in expression or "-" in expression:
            assert str(eval(expression)) == row["answer"]  # of our own file
            computed += 1
        assert calculator_task.reward(row, calculator_task.solution(row)) == {"correct": 1.0, "format": 1.0}
    assert computed > 400


@pytest.mark.parametrize(
    ("text", "correct", "well_formed"),
    [
        ("<answer>21330</answer>", 1, 1),
        ("\n<answer>21,330</answer>", 1, 1),  # the call of the first turn is removed
        ("<think>a</think>\n<think>b</think>\n<answer>21330</answer>", 1, 1),
        ("<think>a</think>\nIt is\n<answer>21330</answer>", 1, 0),
        ("<answer>21330</answer>\n<answer>21330</answer>", 0, 0),
        ("<answer>1</answer>\n<answer>21330</answer>", 0, 0),
        ("<think><answer>21330</answer></think>", 0, 0),
        ("<answer>21331</answer>", 0, 1),
        ("<answer>21330", 0, 0),
        ("<think>" * 1000, 0, 0),
        ("", 0, 0),
    ],
)  # fmt: skip
def test_the_reward_of_what_was_said_in_all_turns(text, correct, well_formed):
    row = {"question": "What is 347 times 58 plus 1204?", "answer": "21330", "kind": "chain"}
    assert calculator_task.reward(row, text) == {"correct": correct, "format": well_formed}
    assert calculator_task.describe(row, text) == {"reasoned": float(text.startswith("<think>a</think>"))}
