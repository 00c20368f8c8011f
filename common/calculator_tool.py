"""A calculator that is safe to offer: it parses an expression, and executes nothing.

>>> [calculator(text) for text in ("17*23", "2**70", "-7 // 2", "6/3", "2/3", "0.1 + 0.2", "max(2, sqrt(9))")]
['391', '1180591620717411303424', '-4', '2', '0.666666666667', '0.3', '3']
>>> calculator("1/0"), calculator("9**9**9")
('error: division by zero', 'error: a number has more than 200 digits')
"""

import ast
import math
import operator
import re
from decimal import Context, Decimal
from fractions import Fraction
from itertools import accumulate

MAX_EXPRESSION = 300  # characters, which bounds the number of operations, too
MAX_DEPTH = 100  # of parentheses, and of operations inside operations
MAX_DIGITS = 200  # of the numerator and denominator of every number on the way, which bounds an operation's time


def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly. It may use + - * / // % **, parentheses, abs, max, min, round and sqrt.

    Args:
        expression: The expression, for example "17*23" or "(3 + 4)**2 / 7".
    """
    # All numbers are fractions: an integer result is exact, and any other result is rounded only once, in the answer. A
    # comma only separates arguments: max(1,234) would be ambiguous if a comma could also separate thousands.
    try:
        if not isinstance(expression, str):
            raise ValueError("the expression is not text")
        if len(expression) > MAX_EXPRESSION:
            raise ValueError(f"the expression has more than {MAX_EXPRESSION} characters")
        text = expression.strip()
        return _as_text(_value(_parse(text), text))
    except ZeroDivisionError:
        return "error: division by zero"
    except TypeError:  # the only possible cause: all values are fractions
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
    """Halves go to the even neighbour, as in Python; here 2.675 is exactly a half."""
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
# Python's parser sees only these tokens: no attributes, no strings, no lines, and nothing that it warns about.
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
        case _:  # other things that these tokens can spell: 2(3), abs without an argument, max(*2)
            raise SyntaxError
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return value


def _as_text(number: Fraction) -> str:
    """An integer in full; else 12 significant digits, and at least three after the point."""
    if number.denominator == 1:
        return str(number.numerator)
    context = Context(prec=max(12, len(str(int(abs(number)))) + 3))
    decimal = context.divide(Decimal(number.numerator), Decimal(number.denominator)).normalize(context)
    return format(decimal, "f" if decimal.adjusted() >= -6 else "e")
