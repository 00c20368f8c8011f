"""Calculations that GSM8K writes into its worked solutions, `<<48/2=24>>`, and whether they are right."""

import re
from fractions import Fraction

from common.tasks.audit.findings import Finding
from common.tasks.countdown import evaluate_expression

from common.plumbing.task import Row

_ANNOTATION = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)")


def find_wrong_calculations(rows: list[Row], of: str) -> Finding:
    """Rows with a calculation whose result is another one, beyond rounding to the digits that are written."""
    wrong = Finding(
        f"{of}_wrong_calculations", f"{of}: a calculation of the worked solution is wrong", False, len(rows)
    )
    for row in rows:
        answer = row.get("answer")
        for left, right in _ANNOTATION.findall(answer if isinstance(answer, str) else ""):
            if is_wrong(left, right):
                wrong.add(row, f"{left}={right}")
                break
    return wrong


def is_wrong(left: str, right: str) -> bool:
    """Whether both sides are numbers, and differ by more than one unit in the last digit of the right one.

    >>> is_wrong("48/2", "24"), is_wrong("2/3", ".67"), is_wrong("10*.5", "5.0"), is_wrong("9*2", "16")
    (False, False, False, True)
    """
    value, result = _value(left), _value(right)
    if value is None or result is None:
        return False
    digits = len(right.partition(".")[2].strip())
    return abs(value - result) >= Fraction(1, 10**digits)


def _value(text: str) -> Fraction | None:
    """The exact value of an expression that may hold decimals, thousands commas, percent and currency signs."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))|[$ ]", "", text)
    text = re.sub(r"([\d.]+)%", r"(\1/100)", text)
    text = _DECIMAL.sub(lambda found: f"({int(found[1] + found[2])}/1{'0' * len(found[2])})", text)
    return evaluate_expression(re.sub(r"(?<!\d)0+(?=\d)", "", text))
