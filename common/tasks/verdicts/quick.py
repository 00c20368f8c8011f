"""Verdicts that need no library, and texts that it is not asked about."""

import re

from common.tasks.verdicts.text import as_number, normalize, same_number
from common.tasks.verdicts.values import values_differ

LONGEST = 300  # characters that the library is given
MOST_WORDS = 2  # of an answer to a gold without words; parsing prose as a product of letters takes long, and is wrong

_COMMAND = re.compile(r"\\(?:text|mathrm|mbox|operatorname)\{[^{}]*+\}|\\[A-Za-z]+|\\.")
_IS_WORD = re.compile(r"\\text\{[A-Za-z() ]++\}")
_WORD = re.compile(r"[A-Za-z]{3,}")
_TOWER = re.compile(r"\^\{*\d+\^\{*\d+\^|\^\{*\d{2,}\^\{*\d|\^\{*\d{6,}|\d{4,}!|!!")  # too large to be computed


def quick_verdict(gold: str, answer: str) -> bool | None:
    r"""Whether an answer is right, as far as text and exact numbers tell; None: the library has to be asked.

    >>> quick_verdict(r"\frac12", r"\dfrac{1}{2}"), quick_verdict("0.5", r"\frac12"), quick_verdict("0.5", "0.51")
    (True, True, False)
    >>> quick_verdict("(x+1)^2", "x^2+2x+1"), quick_verdict("", "")
    (None, False)
    """
    wanted, given = normalize(gold), normalize(answer)
    if not wanted or not given:
        return False
    if wanted == given:
        return True
    numbers = as_number(gold), as_number(answer)
    verdict = same_number(*numbers) if all(numbers) else None
    if verdict is not None:
        return verdict
    if _IS_WORD.fullmatch(gold) and any(letter.isdigit() for letter in given):
        return False
    return None if _is_for_library(gold, answer) and not values_differ(gold, answer) else False


def _is_for_library(gold: str, answer: str) -> bool:
    if max(len(gold), len(answer)) > LONGEST or not (_is_balanced(gold) and _is_balanced(answer)):
        return False
    wanted, given = _COMMAND.sub(" ", gold), _COMMAND.sub(" ", answer)
    if not _WORD.search(wanted) and len(_WORD.findall(given)) > MOST_WORDS:
        return False
    letters = set(wanted)
    return not any(letter.isupper() and letter.lower() in letters for letter in letters)  # the library sees no case


def is_too_large(answer: str) -> bool:
    """Whether an answer holds a number that would take longer than a verdict may.

    >>> [is_too_large(text) for text in ("9^9^9^9", "10^{10^{10}}", "2^{1009}", "x^{2^n}")]
    [True, True, False, False]
    """
    return _TOWER.search("".join(answer.split())) is not None


def _is_balanced(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return depth == 0
