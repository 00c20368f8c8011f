"""Tools: Python functions that the policy calls by writing JSON, and a calculator that is safe to offer it.

A tool's docstring and types are what the policy is told of it. Its answer is a text; one that begins with "error:" is a
failure, which the policy reads like any other answer. Nothing that a policy writes raises an exception here.

>>> [calculator(text) for text in ("17*23", "2**70", "-7 // 2", "6/3", "2/3", "0.1 + 0.2", "max(2, sqrt(9))")]
['391', '1180591620717411303424', '-4', '2', '0.666666666667', '0.3', '3']
>>> calculator("1/0"), calculator("9**9**9")
('error: division by zero', 'error: a number has more than 200 digits')
>>> text = 'So <tool_call>{"name": "calculator", "arguments": {"expression": "17*23"}}</tool_call>'
>>> calls, rest = parse_calls(text, "hermes")
>>> rest, calls[0].name, calls[0].arguments
('So ', 'calculator', {'expression': '17*23'})
>>> call_tool({"calculator": calculator}, calls[0])
('391', True)
"""

import ast
import inspect
import json
import math
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from itertools import accumulate
from os.path import commonprefix
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from common.errors import UserError

# The calculator ------------------------------------------------------------------------------------------------------

MAX_EXPRESSION = 300  # characters, which bounds the number of operations, too
MAX_DEPTH = 100  # of parentheses, and of operations inside operations
MAX_DIGITS = 200  # of the numerator and denominator of every number on the way, which bounds an operation's time


def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly. It may use + - * / // % **, parentheses, abs, max, min, round and sqrt.

    Args:
        expression: The expression, for example "17*23" or "(3 + 4)**2 / 7".
    """
    # All numbers are fractions: an integer result is exact, and another is rounded only once, in the answer. A comma
    # separates arguments and nothing else: max(1,234) would mean two things if it could also separate thousands.
    try:
        if not isinstance(expression, str):
            raise ValueError("the expression is not text")
        if len(expression) > MAX_EXPRESSION:
            raise ValueError(f"the expression has more than {MAX_EXPRESSION} characters")
        text = expression.strip()
        return _as_text(_value(_parse(text), text))
    except ZeroDivisionError:
        return "error: division by zero"
    except TypeError:  # the only one that can be: all values are fractions
        return "error: wrong number of arguments of a function"
    except (RecursionError, MemoryError):
        return "error: the expression is nested too deeply"
    except SyntaxError:
        return "error: not an arithmetic expression"
    except ValueError as error:
        return f"error: {error}"


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent must be an integer; a root is written sqrt(x)")
    doublings = max(abs(base.numerator), base.denominator).bit_length() - 1  # |base| or its inverse is >= 2**doublings
    if doublings * abs(exponent) > math.log2(10) * MAX_DIGITS:  # do not even begin
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return base**exponent


def _round(number: Fraction, digits: Fraction = Fraction(0)) -> Fraction:
    """Halves go to the even neighbour, as in Python; here 2.675 is such a half."""
    if digits.denominator != 1 or abs(digits) > MAX_DIGITS:
        raise ValueError(f"round takes a whole number of digits, {MAX_DIGITS} at most")
    return round(number, int(digits))


def _sqrt(number: Fraction) -> Fraction:
    """Exact for the square of a fraction, else to 30 digits: sqrt(p / q) = sqrt(p q 10^60) / (q 10^30)."""
    if number < 0:
        raise ValueError("the square root of a negative number")
    return Fraction(math.isqrt(number.numerator * number.denominator * 10**60), number.denominator * 10**30)


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS = {
    "abs": abs,
    "max": lambda number, *others: max((number, *others)),
    "min": lambda number, *others: min((number, *others)),
    "round": _round,
    "sqrt": _sqrt,
}
# Python's parser sees only texts of these tokens: no attributes, no strings, no lines, and nothing that it warns of.
_NUMERAL = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?(?![\w.])"
_TOKEN = re.compile(rf"{_NUMERAL}|[-+*/%(), ]|(?P<name>[A-Za-z_]\w*)", re.ASCII)


def _parse(text: str) -> ast.expr:
    end = 0
    while end < len(text):
        token = _TOKEN.match(text, end)
        if token is None:
            raise ValueError(f"cannot read {text[end : end + 10]!a}")
        if token["name"] and token["name"] not in _FUNCTIONS:
            raise ValueError(f"unknown name '{token['name'][:20]}'; known are {', '.join(_FUNCTIONS)}")
        end = token.end()
    if max(accumulate((letter == "(") - (letter == ")") for letter in text), default=0) > MAX_DEPTH:
        raise RecursionError
    return ast.parse(text, mode="eval").body


def _value(node: ast.expr, text: str, depth: int = 0) -> Fraction:
    if depth > MAX_DEPTH:
        raise RecursionError

    def values(*nodes: ast.expr) -> list[Fraction]:
        return [_value(inner, text, depth + 1) for inner in nodes]

    match node:
        case ast.Constant():
            value = Fraction(text[node.col_offset : node.end_col_offset])  # as it is written: 0.1 is 1/10
        case ast.UnaryOp(op=sign, operand=operand):
            value = _OPERATORS[type(sign)](*values(operand))
        case ast.BinOp(left=left, op=sign, right=right):
            value = Fraction(_OPERATORS[type(sign)](*values(left, right)))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            value = _FUNCTIONS[name](*values(*arguments))
        case ast.Tuple():
            raise ValueError("a comma may only separate the arguments of a function")
        case _:  # what else these tokens can spell: 2(3), abs without an argument, max(*2)
            raise SyntaxError
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return value


def _as_text(number: Fraction) -> str:
    """An integer in full; else 12 significant digits, and not less than three behind the point."""
    if number.denominator == 1:
        return str(number.numerator)
    context = Context(prec=max(12, len(str(int(abs(number)))) + 3))
    decimal = context.divide(Decimal(number.numerator), Decimal(number.denominator)).normalize(context)
    return format(decimal, "f" if decimal.adjusted() >= -6 else "e")


# Calls in a text -----------------------------------------------------------------------------------------------------

MAX_CALL = 10_000  # characters


class ToolCall(NamedTuple):
    """What the policy asks for; `error` says in one line why a call is malformed, which then has no name."""

    name: str
    arguments: dict
    error: str | None = None


_THOUGHT = r"<think>.*?(?:</think>|\Z)"
_BLOCK = re.compile(rf"<tool_call>(.*?)(</tool_call>|\Z)|{_THOUGHT}", re.DOTALL)
_END = re.compile(r"\Z")
_SEPARATOR = re.compile(r"\s*(?:[;\n]\s*|\Z)")


def parse_calls(text: str, form: str) -> tuple[list[ToolCall], str]:
    """The calls in what the assistant says, and the text without them. What stands inside `<think>` is no call.

    "hermes": each `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` is a call, and one that is never closed a
    malformed call. "llama3": the whole text is `{"name": ..., "parameters": {...}}`, or several, separated by ";" or
    new lines; if it only begins like one it is a malformed call, and else none. Both forms take either key. The time is
    linear in the length of the text, whatever it is.
    """
    if form == "hermes":
        blocks = [block for block in _BLOCK.finditer(text) if block[1] is not None]
        calls = [_read(block[1], _END)[0] if block[2] else _malformed("it is not closed") for block in blocks]
        return calls, _BLOCK.sub(lambda block: block[0] if block[1] is None else "", text)
    if form != "llama3":
        raise ValueError(f"unknown form of calls: {form}")
    said = re.sub(_THOUGHT, "", text, flags=re.DOTALL).strip().removeprefix("<|python_tag|>").strip()
    calls = _read(said, _SEPARATOR)
    if calls[0].error and not re.match(r'\{\s*"name"', said):
        return [], text
    return calls, "".join(re.findall(_THOUGHT, text, flags=re.DOTALL))


def _malformed(reason: str) -> ToolCall:
    return ToolCall("", {}, reason)


def _read(text: str, separator: re.Pattern) -> list[ToolCall]:
    """The calls that a text consists of; one malformed call if it does not consist of calls."""
    text, calls, end = text.strip(), [], 0
    try:
        if len(text) > MAX_CALL:
            raise ValueError(f"it has more than {MAX_CALL} characters")
        while not calls or end < len(text):
            value, end = _DECODER.raw_decode(text, end)
            calls.append(_call(value))
            match = separator.match(text, end)
            if match is None:
                raise ValueError("something follows its JSON")
            end = match.end()
    except RecursionError:
        return [_malformed("it is nested too deeply")]
    except json.JSONDecodeError:
        return [_malformed("it is not valid JSON")]
    except ValueError as error:
        return [_malformed(str(error))]
    return calls


def _call(value: object) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("it is not a JSON object with a name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # an object inside a string, as OpenAI writes it
        arguments = _DECODER.decode(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("its arguments are not a JSON object")
    return ToolCall(value["name"], arguments)


def _object(pairs: list[tuple[str, object]]) -> dict:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key appears twice")
    return dict(pairs)


def _float(text: str) -> float:
    """Python's reader takes NaN and Infinity, too, and makes an infinity of 1e999."""
    if not math.isfinite(float(text)):
        raise ValueError("a number is not finite")
    return float(text)


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_float)

# Tools ---------------------------------------------------------------------------------------------------------------

MAX_RESULT = 500  # characters
_CUT = " ... (cut)"
_JSON_TYPES = {kind: (kind,) for kind in (int, str, bool, list, dict, type(None))} | {float: (int, float)}


def call_tool(tools: dict[str, Callable], call: ToolCall) -> tuple[str, bool]:
    """What the tool answers, and whether it did what was asked: an answer that begins with "error:" is a failure.

    A malformed call, an unknown tool, arguments that do not fit and an exception of the tool are such answers; only
    `KeyboardInterrupt` and `UserError` pass. Lists and objects become JSON; a long answer is cut to `MAX_RESULT`
    characters.
    """
    text = _answer(tools, call).encode("utf-8", "replace").decode("utf-8")  # a tokenizer refuses half a character
    text = text if len(text) <= MAX_RESULT else text[: MAX_RESULT - len(_CUT)] + _CUT
    return text, not text.startswith("error:")


def _answer(tools: dict[str, Callable], call: ToolCall) -> str:
    if call.error is not None:
        return f"error: malformed call: {call.error}"
    if call.name not in tools:
        return f"error: unknown tool {call.name[:40]!r}; known tools: {', '.join(tools)}"
    tool = tools[call.name]
    try:
        inspect.signature(tool).bind(**call.arguments)
        hints = get_type_hints(tool)
    except Exception as error:
        return f"error: {call.name}: {error}"
    for name, value in call.arguments.items():
        if not _fits(value, hints.get(name, Any)):
            return f"error: {call.name}: {name} must be {inspect.formatannotation(hints[name])}"
    try:
        result = tool(**call.arguments)
        return json.dumps(result, ensure_ascii=False) if isinstance(result, dict | list | tuple) else str(result)
    except UserError:  # for people: the tool could not even be tried
        raise
    except (Exception, SystemExit) as error:
        return f"error: {type(error).__name__}: {error}"


def _fits(value: object, hint: object) -> bool:
    """Whether a value from JSON is of the type of a parameter; true and 1 are not the same here."""
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    kinds = _JSON_TYPES.get(get_origin(hint) or hint)
    return kinds is None or type(value) in kinds


def schemas(tools: dict[str, Callable]) -> list[dict]:
    """The JSON schemas of the tools, as a chat template takes them, from their docstrings and types.

    Raises:
        UserError: a function lacks either.
    """
    from transformers.utils import get_json_schema

    found = []
    for name, tool in tools.items():
        try:
            schema = get_json_schema(tool)
        except Exception as error:  # of several kinds
            raise UserError(
                f"no JSON schema can be made of the tool {name} ({' '.join(str(error).split())}): give it a docstring "
                "with a section 'Args:' that describes every parameter, and every parameter a type"
            ) from error
        schema["function"]["name"] = name
        found.append(schema)
    return found


def call_form(tokenizer) -> str:
    """The form in which a tokenizer's chat template writes calls, and the policy should: "hermes" or "llama3".

    Raises:
        UserError: the template refuses calls, leaves them out, or writes them in another form.
    """
    expected = ToolCall("calculator", {"expression": "17*23"})
    function = {"name": expected.name, "arguments": expected.arguments}  # and an id of the nine letters that some want
    turns = (
        {"content": "(an answer)"},
        {"content": "", "tool_calls": [{"id": "call00000", "type": "function", "function": function}]},
    )
    offered = schemas({"calculator": calculator})

    def render(turn: dict) -> str:
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", **turn}]
        return tokenizer.apply_chat_template(messages, tools=offered, tokenize=False)

    try:
        answered, called = map(render, turns)
    except Exception as error:  # whatever a template raises
        raise UserError(f"the chat template refuses tool calls ({error}): take a model made for tools") from error
    call = called.removeprefix(commonprefix([answered, called]))  # noqa: RUF071
    if expected.name not in call:
        raise UserError("the chat template leaves tool calls out: take a model made for tools")
    text = tokenizer.decode(tokenizer.encode(call, add_special_tokens=False), skip_special_tokens=True)
    for form in ("hermes", "llama3"):
        if parse_calls(text, form)[0] == [expected]:
            return form
    raise UserError(
        f"the chat template writes a tool call as {text.strip()[:100]!r}, which is not known here: take a model "
        "whose calls are in the Hermes form or in that of Llama 3"
    )
