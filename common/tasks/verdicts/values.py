r"""Refusing a wrong answer by its value, some hundred times as fast as reading it with the library.

Expressions that are equal have equal values, whatever their symbols are. So two texts that this file can read, and
whose values differ, are different. It reads only what can be read in one way (`1/2x` and `\sin 2x` cannot), and says
nothing about equality: that is the library's. Capital and small letters are one symbol, as in the library.
"""

import cmath
import re

from common.tasks.verdicts.text import as_number, clean

DEEPEST = 20  # of nested brackets
_TOKEN = re.compile(r"\s*+(?:(\d+\.?\d*|\.\d+)|(\\[A-Za-z]+|\\.)|(.))", re.DOTALL)
_LETTERS = re.compile(r"\\(alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|omega|hbar|infty)", re.I)
_FUNCTIONS = {"\\sin": cmath.sin, "\\cos": cmath.cos, "\\tan": cmath.tan, "\\ln": cmath.log, "\\exp": cmath.exp}
_CONSTANTS = {"\\pi": cmath.pi, "e": cmath.e, "i": 1j}
_OPEN = {"(": ")", "[": "]", "\\{": "\\}"}
_NAME = re.compile(r"(?:^|(?<=,))[A-Za-z](?:\([a-z]\)|_\w|_\{[^{}]*+\})?(?:=(?!=)|\\in ?)")  # of what follows
Token = tuple[str, str]  # its kind, and itself


class UnreadableError(Exception):
    """Not an expression, or one that can be read in several ways."""


def values_differ(gold: str, answer: str) -> bool:
    r"""Whether two texts are expressions, or lists of them, with different values; False where that is not known.

    >>> values_differ(r"3\sqrt{13}", r"3\sqrt{14}"), values_differ("(x+1)^2", "x^2+1"), values_differ("(1,2)", "(1,3)")
    (True, True, True)
    >>> values_differ("(x+1)^2", "x^2+2x+1"), values_differ(r"\sin 2x", "1"), values_differ("1,2", "(2,1)")
    (False, False, False)
    """
    try:
        left, right = _values(gold), _values(answer)
    except (UnreadableError, ArithmeticError, ValueError, RecursionError):
        return False
    if not all(map(cmath.isfinite, left + right)):
        return False
    return not (_is_within(left, right) and _is_within(right, left))


def _is_within(some: list[complex], others: list[complex]) -> bool:
    return all(any(abs(a - b) <= 1e-5 * (1 + abs(a) + abs(b)) for b in others) for a in some)


def _values(text: str) -> list[complex]:
    """The values of the elements of a list, a tuple, a set, an interval or a matrix; of one expression, its own."""
    number = as_number(text)
    if number is not None and not number.is_percent:
        return [complex(number.value)]
    if re.search(r"\d(?:,|\\,|\\!|\{,\})+\s*\d{3}(?!\d)|%", text):  # a thousands comma, or none; a percentage
        raise UnreadableError
    text = re.sub(r"\\(?:begin|end)\{[bp]matrix\}", " ", text).replace("\\\\", ",").replace("&", ",")
    return _values_of(_tokens(clean(text)))


def _values_of(tokens: list[Token]) -> list[complex]:
    if tokens and tokens[0][1] in _OPEN and _closes_at_the_end(tokens):
        inner = _split(tokens[1:-1])
        if len(inner) > 1 or tokens[0][1] != "(":
            return [value for element in inner for value in _values_of(element)]
    elements = _split(tokens)
    if len(elements) > 1:
        return [value for element in elements for value in _values_of(element)]
    return [_Reader(tokens).value()]


def _tokens(text: str) -> list[Token]:
    text = _NAME.sub("", text)
    return [
        (("number", "command", "sign")[match.lastindex - 1], match[match.lastindex]) for match in _TOKEN.finditer(text)
    ]


def _closes_at_the_end(tokens: list[Token]) -> bool:
    depth = 0
    for index, (_, token) in enumerate(tokens):
        depth += (token in _OPEN) - (token in ("]", ")", "\\}"))
        if depth == 0:
            return index == len(tokens) - 1
    return False


def _split(tokens: list[Token]) -> list[list[Token]]:
    elements, depth = [[]], 0
    for kind, token in tokens:
        depth += (token in ("(", "[", "{", "\\{")) - (token in (")", "]", "}", "\\}"))
        if token == "," and depth == 0:
            elements.append([])
        else:
            elements[-1].append((kind, token))
    return elements


class _Reader:
    """Reads sums of products of powers."""

    def __init__(self, tokens: list[Token]):
        self._tokens, self._at, self._depth = tokens, 0, 0

    def value(self) -> complex:
        value = self._sum()
        if self._at < len(self._tokens):
            raise UnreadableError
        return value

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _kind(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def _take(self, *wanted: str) -> str:
        token = self._peek()
        if not token or (wanted and token not in wanted):
            raise UnreadableError
        self._at += 1
        return token

    def _sum(self) -> complex:
        self._depth += 1
        if self._depth > DEEPEST:
            raise UnreadableError
        sign = -1 if self._peek() in ("+", "-") and self._take() == "-" else 1
        total = sign * self._product()
        while self._peek() in ("+", "-"):
            sign = -1 if self._take() == "-" else 1
            total += sign * self._product()
        self._depth -= 1
        return total

    def _product(self) -> complex:
        value, is_divided, last = self._power(), False, self._tokens[self._at - 1]
        while self._at < len(self._tokens):
            token = self._peek()
            if token in ("*", "\\cdot", "\\times"):
                self._take()
                value *= self._power()
            elif token == "/":
                self._take()
                value /= self._power()
                is_divided = True
            elif token in ("+", "-", ")", "]", "}", "\\}"):
                return value
            elif is_divided or self._kind() == "number" or (token == "\\frac" and last[0] == "number"):
                raise UnreadableError  # 1/2x; two numbers; a mixed number
            else:
                value *= self._power()
            last = self._tokens[self._at - 1]
        return value

    def _power(self) -> complex:
        base = self._atom()
        if self._peek() != "^":
            return base
        self._take("^")
        if self._kind() == "number" and len(self._peek()) > 1:  # x^10, which LaTeX reads as x^1 0
            raise UnreadableError
        exponent = self._group() if self._peek() == "{" else self._atom()
        if self._peek() == "^" or (base.real <= 0 and exponent != int(exponent.real)) or abs(exponent) > 60:
            raise UnreadableError
        return base**exponent

    def _group(self, opening: str = "{", closing: str = "}") -> complex:
        self._take(opening)
        value = self._sum()
        self._take(closing)
        return value

    def _atom(self) -> complex:
        kind, token = self._kind(), self._take()
        if kind == "number":
            if self._peek() == "_":  # the base of a number, which the library leaves out
                self._subscript()
            return complex(float(token))
        if token in ("(", "{"):
            self._at -= 1
            return self._group(token, ")" if token == "(" else "}")
        if token == "\\frac":
            over = self._group() if self._peek() == "{" else self._digit()
            return over / (self._group() if self._peek() == "{" else self._digit())
        if token == "\\sqrt":
            root = self._group("[", "]") if self._peek() == "[" else 2
            of = self._group() if self._peek() == "{" else self._digit()
            if of.imag or of.real < 0:
                raise UnreadableError
            return of ** (1 / root)
        if token in _FUNCTIONS:
            is_bare = self._peek() not in ("(", "{")
            value = self._atom()
            if is_bare and self._peek() not in ("", "+", "-", ")", "}", "]", ","):  # \\sin 2x
                raise UnreadableError
            return _FUNCTIONS[token](value)
        if token in _CONSTANTS:
            return complex(_CONSTANTS[token])
        if (kind == "sign" and token.isascii() and token.isalpha()) or _LETTERS.fullmatch(token):
            return self._symbol(token)
        raise UnreadableError

    def _digit(self) -> complex:
        """The argument of `\\frac12`: one digit or letter, which a number token of one digit is."""
        if len(self._peek()) != 1 or not self._peek().isalnum():
            raise UnreadableError
        return self._atom()

    def _symbol(self, name: str) -> complex:
        if self._peek() == "_":
            name += self._subscript()
        if self._peek() == "'":
            raise UnreadableError
        return complex(0.6 + sum(place * ord(letter) for place, letter in enumerate(name.lower(), 1)) % 97 / 71)

    def _subscript(self) -> str:
        self._take("_")
        name = self._take()
        while name[0] == "{" and not name.endswith("}"):
            name += self._take()
        return name.strip("{}")
