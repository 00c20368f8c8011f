r"""Countdown: make a target from given numbers, each used exactly once, with + - * / and parentheses.

A row is `{"nums": [19, 36, 55, 7], "target": 65}`, as in the dataset Jiayi-Pan/Countdown-Tasks-3to4. The policy should
end with `<answer>55+36-19-7</answer>`. Many answers are right, so the reward evaluates the expression: exactly, as a
fraction, over a syntax tree that allows only a few kinds of nodes. Nothing that a policy writes is executed.

The table shows how answers are judged; texts without tags stand for one `<answer>`. Right answers earn `correct` and
`valid`, answers with another value only `valid`. Invalid answers, which do not use each number exactly once, earn
neither:

| numbers = target | right | another value | invalid | because |
|---|---|---|---|---|
| `19 36 55 7 = 65` | `55+36-19-7`, `( 55 + 36 ) - (19 + 7)` | `55+36-19+7` | `55+36-19` | the last one misses 7 |
| `19 36 55 7 = 79` | `55+36-19+7` | | | |
| `1 4 = 8` | | | `4+4` | uses 4 twice, and misses 1 |
| `3 3 = 9` | `3*3` | | | 3 is given twice |
| `3 5 = 11` | | | `3+5+3` | uses 3 twice |
| `1 2 = 12` | | | `12` | digits are not joined |
| `2 3 = 8` | | | `2**3` | powers are no operation here |
| `7 2 = 3` | | `7/2` | `7//2` | the value is 7/2, and nothing is rounded |
| `7 2 = 1` | | | `7%2` | |
| `7 2 4 = 14` | `7/2*4` | | | fractions on the way are exact |
| `8 3 3 = 8` | `8/3*3` | | | also those that floats round |
| `5 5 3 = 3` | | | `3/(5-5)` | division by zero has no value |
| `3 5 = 2` | `-3+5` | | | a sign: the number used is 3 |
| `3 5 = -8` | `-(3+5)` | | | |
| `3 5 = 8` | `5--3` | | | |
| `3 5 = 15` | `3×5` | | `3x5` | × ÷ − are the same operations; x is a letter |
| `6 3 1 = 1` | `6÷3−1` | | | |
| `3 5 = 15` | | | `3(5)`, `[3*5]` | products need their sign, and parentheses are round |
| `3 5 = 15` | | | `\(3 \times 5\)`, `$3*5$` | LaTeX is not an expression |
| `3 5 = 15` | | | `3*5=15`, `15=3*5`, `15` | an equation is no expression |
| `3 5 = 15` | | | `3.0*5`, `03*5`, `3*5.`, `٣*5` | numbers are used as given, in digits of ASCII |
| `1000 2 = 1002` | | | `1,000+2`, `1_000+2`, `1e3+2` | |
| `16 2 = 18` | | | `0x10+2` | |
| `3 5 = 15` | | | `The answer is 3*5`, `3*5 # 1`, `3*` | words are not an expression |
| `3 5 = 15` | | | `<answer></answer>`, `<think>3*5</think>`, `<answer>3*5` | no answer, or one that never ends |
| `3 5 = 15` | | | `<think><answer>3*5</answer></think>` | an answer inside the thought |
| `3 5 = 15` | | | `<answer>3</answer><answer>3*5</answer>`, `<answer>3*5</answer><answer>3*5</answer>` | two answers |
| `3 5 = 15` | | | `<answer><answer>3*5</answer></answer>` | nested tags |
| `3 5 = 15` | `So <answer>3*5</answer>, I think.` | | | words outside the answer |

An equation is refused although its meaning is clear: the policy is asked for an expression, and the reward of TinyZero,
our reference for figures, refuses equations, too. `describe` logs how often that happens (`equation`).
"""  # noqa: RUF002

import ast
import functools
import itertools
import operator
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from tasks import arithmetic
from tasks.arithmetic import given_answer
from tasks.calculator import is_well_formed

_DATA = Path(__file__).resolve().parents[1] / "data"
TRAIN_DATA = _DATA / "countdown_tasks.jsonl"
EVAL_DATA = _DATA / "countdown_tasks_heldout.jsonl"
FIELDS = {"nums": list, "target": (int, float, str)}  # every row must have these
KIND_FIELDS = ("num_numbers",)  # questions that agree in these are of one kind
REWARD_WEIGHTS = {"correct": 1.0, "valid": 0.0, "answered": 0.0, "format": 0.0}
SYSTEM_PROMPT = (
    "You are given some numbers and a target. Find an expression whose value is the target. It must use each of the "
    "numbers exactly once, and may use +, -, *, / and parentheses. Think step by step inside <think> and </think>, "
    "then give only the expression inside <answer> and </answer>, for example <answer>(1 + 2) * 4 / 3</answer>."
)
MAX_EXPRESSION = 300  # characters, which bounds the depth and all numbers on the way
MAX_NUMBERS = 6  # of a row, so that `solution` takes at most half a second

_SIGNS = str.maketrans("\u00d7\u00f7\u2212", "*/-")
_EXPRESSION = re.compile(r"(?!.*(?<![0-9])0[0-9])[0-9()+*/ -]+")  # no leading zeros; all else is for Python's parser
_RESULT = re.compile(r"=[0-9()+*/<>=-]*+")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def messages(row: dict, system_prompt: str = "") -> list[dict]:
    """The conversation that asks for an expression, with a system turn unless `system_prompt` is empty.

    >>> messages({"nums": [19, 36, 55, 7], "target": 65})
    [{'role': 'user', 'content': 'Make 65 from 19, 36, 55, 7.'}]
    """
    return arithmetic.messages({"question": f"Make {_shown(row['target'])} from {_listed(row)}."}, system_prompt)


def reward(row: dict, text: str) -> dict[str, float]:
    """Reward one completion, by named components; only `correct` has a weight unless `--reward-weight` gives more.

    - `correct`: the only `<answer>` outside `<think>` is an expression that uses each number exactly once and has the
      target's value;
    - `valid`: the same for any value;
    - `answered`: there is such an answer, whatever it holds. With weight 0.9 for `correct` and 0.1 for this component,
      the reward is 1 or 0.1 or 0, as in TinyZero;
    - `format`: the text is any number of thoughts, then one answer, and nothing else.

    >>> row = {"nums": [19, 36, 55, 7], "target": 65}
    >>> reward(row, "<think>55+36-19+7=79</think><answer>55+36-19-7</answer>")
    {'correct': 1.0, 'valid': 1.0, 'answered': 1.0, 'format': 1.0}
    >>> reward(row, "<answer>55+36-19+7</answer>")
    {'correct': 0.0, 'valid': 1.0, 'answered': 1.0, 'format': 1.0}
    """
    answer = given_answer(text)
    is_right, is_valid = judge(row, answer or "")
    found = (is_right, is_valid, answer is not None, is_well_formed(text))
    return dict(zip(REWARD_WEIGHTS, map(float, found), strict=True))


def describe(row: dict, text: str) -> dict[str, float]:
    """More values to log.

    - `tries`: how many results (`=`) are written outside the answer; `(7+5)*2=12*2=24<55` is one;
    - `false_claim`: the answer is an expression, but not a right one;
    - `gives_up`: the answer is no expression, as in `<answer>none</answer>`;
    - `equation`: the answer is an equation with a right expression on its left or right side.

    >>> describe({"nums": [3, 5], "target": 2}, "<think>3-5=-2<2</think><answer>5-3=2</answer>")
    {'tries': 1.0, 'false_claim': 0.0, 'gives_up': 0.0, 'equation': 1.0}
    """
    answer = given_answer(text)
    given = answer or ""
    is_expression = read_expression(given) is not None
    is_equation = given.count("=") == 1 and any(judge(row, side)[0] for side in given.split("="))
    return {
        "tries": float(len(_RESULT.findall(text)) - len(_RESULT.findall(given))),
        "false_claim": float(is_expression and not judge(row, given)[0]),
        "gives_up": float(answer is not None and not is_expression and "=" not in given),
        "equation": float(is_equation),
    }


def vote(row: dict, text: str) -> str | None:
    """Optional: the answer of a completion, in one spelling; two expressions with the same value are two answers.

    >>> vote({}, "<answer> 3 \u00d7 5 </answer>")
    '3*5'
    """
    answer = given_answer(text)
    return None if answer is None else "".join(answer.translate(_SIGNS).split())


def solution(row: dict) -> str:
    """A completion that earns `correct` = 1. If there is none: a sentence that says so, and earns nothing.

    >>> solution({"nums": [19, 36, 55, 7], "target": 65})
    '<answer>((36+55)-19)-7</answer>'
    >>> solution({"nums": [1, 1], "target": 3})
    'No expression makes 3 from 1, 1.'
    """
    numbers, target, listed = _numbers(row), _whole(row["target"]), _listed(row)
    if not numbers or target is None:
        return f"Numbers must be whole and not negative, and the target whole: {listed}; {row['target']}."
    if len(numbers) > MAX_NUMBERS:
        return f"{len(numbers)} numbers are too many to search: {MAX_NUMBERS} at most."
    expression = find_expression(numbers, target)
    return f"<answer>{expression}</answer>" if expression else f"No expression makes {target} from {listed}."


def judge(row: dict, expression: str) -> tuple[bool, bool]:
    """Whether an expression is right for a row, and whether it uses each number exactly once, whatever its value."""
    value, used = read_expression(expression) or (None, None)
    is_valid = used is not None and sorted(used) == sorted(_numbers(row))
    return is_valid and value == _whole(row["target"]), is_valid


def read_expression(text: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression, and the numbers in it; None if the text is no expression, or has no value.

    Its length is limited, which also limits the depth of its tree and the digits of intermediate numbers. Python's
    parser sees only digits, + - * / and parentheses.

    >>> [read_expression(text) for text in ("7/2", "3 × (5 − 7)", "1/(2-2)", "2**3", "__import__('os')")]
    [(Fraction(7, 2), [7, 2]), (Fraction(-6, 1), [3, 5, 7]), None, None, None]
    """  # noqa: RUF002
    text = text.strip()
    if len(text) > MAX_EXPRESSION:
        return None
    text = " ".join(text.translate(_SIGNS).split())
    if _EXPRESSION.fullmatch(text) is None:
        return None
    used: list[int] = []
    try:
        return _value(ast.parse(text, mode="eval").body, used), used
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, used: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            used.append(number)
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            value = _value(operand, used)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(left, used), _value(right, used))
    raise SyntaxError  # other things that these characters can spell: 2**3, 7//2, 2(3), ()


def find_expression(numbers: list[int], target: int | Fraction) -> str | None:
    """An expression that uses each number once and has the target's value; None if there is none.

    Any sign inside an expression can be moved to its front, so the search uses absolute values. It goes down from the
    target: an expression is a op b, where a and b share no number. For every value a of the smaller part, b is one of
    five values, which are searched for in the greater part. A table has all values of up to three numbers. Four numbers
    take a millisecond, six at most half a second; if there is no solution, each further number takes fifty times as
    long.

    >>> find_expression([3, 3, 8, 8], 24), find_expression([2, 3], -5), find_expression([1, 1], 3)
    ('8/(3-(8/3))', '-(2+3)', None)
    """
    found = _search(tuple(sorted(numbers)), abs(Fraction(target)))
    return f"-({found})" if found and target < 0 else found


def _search(numbers: tuple[int, ...], target: Fraction) -> str | None:
    if len(numbers) <= 3:
        return _values(numbers).get(target)
    for small, great in _splits(numbers):
        for a, expression in _values(small).items():
            needed = [(target - a, "{0}+{1}") if target >= a else (a - target, "{0}-{1}"), (target + a, "{1}-{0}")]
            if a:
                needed += [(target / a, "{0}*{1}"), (target * a, "{1}/{0}")]
            if a and target:
                needed.append((a / target, "{0}/{1}"))
            for b, pattern in needed:
                if found := _search(great, b):
                    return pattern.format(_term(expression), _term(found))
            if a == target == 0:  # any expression of the others works
                return f"{_term(expression)}*({'+'.join(map(str, great))})"
    return None


@functools.lru_cache(maxsize=1024)
def _values(numbers: tuple[int, ...]) -> dict[Fraction, str]:
    """The absolute values of all expressions of all the numbers, and an expression of each."""
    if len(numbers) == 1:
        return {Fraction(numbers[0]): str(numbers[0])}
    found: dict[Fraction, str] = {}
    for small, great in _splits(numbers):
        for (a, x), (b, y) in itertools.product(_values(small).items(), _values(great).items()):
            x, y = _term(x), _term(y)
            made = [(a + b, f"{x}+{y}"), (a - b, f"{x}-{y}") if a >= b else (b - a, f"{y}-{x}"), (a * b, f"{x}*{y}")]
            made += [(a / b, f"{x}/{y}")] if b else []
            made += [(b / a, f"{y}/{x}")] if a else []
            for value, expression in made:
                found.setdefault(value, expression)
    return found


def _splits(numbers: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All ways to divide numbers into a smaller and a greater part, neither empty; each once, small ones first.

    >>> list(_splits((1, 2, 2)))
    [((1,), (2, 2)), ((2,), (1, 2))]
    """
    seen = set()
    for size in range(1, len(numbers) // 2 + 1):
        for chosen in itertools.combinations(range(len(numbers)), size):
            small = tuple(numbers[i] for i in chosen)
            great = tuple(numbers[i] for i in range(len(numbers)) if i not in chosen)
            if not {(small, great), (great, small)} & seen:
                seen.add((small, great))
                yield small, great


def _term(expression: str) -> str:
    return expression if expression.isdecimal() else f"({expression})"


def _numbers(row: dict) -> list[int]:
    """The numbers of a row; none if one of them cannot be used."""
    numbers = [_whole(number) for number in row["nums"]]
    return numbers if all(number is not None and number >= 0 for number in numbers) else []


def _whole(number: object) -> int | None:
    """A whole number, also one in a text or a float, as files and tables have it.

    >>> [_whole(number) for number in (7, "7", 7.0, "-7", 7.5, "x", True, None)]
    [7, 7, 7, -7, None, None, None, None]
    """
    if isinstance(number, str):
        return int(number) if re.fullmatch(r"-?[0-9]{1,100}", number.strip()) else None
    is_whole = isinstance(number, int | float) and not isinstance(number, bool) and number % 1 == 0
    return int(number) if is_whole else None


def _shown(number: object) -> str:
    return str(number if (whole := _whole(number)) is None else whole)


def _listed(row: dict) -> str:
    return ", ".join(map(_shown, row["nums"]))
