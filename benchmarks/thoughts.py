"""Reads the thought of a completion step by step: which style it has, and what its first mistake is.

A thought is `47+29=76 76-18=58`, or carefully, tens before units, `47+20=67 67+9=76 76-10=66 66-8=58 check 58+18=76`.
The text is a policy's: it is only ever searched.
"""

import itertools
import re
from typing import NamedTuple

from tasks.arithmetic import given_answer, normalize_answer

STYLES = ("step by step", "careful", "mixed", "neither")
# The first thing that is wrong in a completion, from left to right
MISTAKES = ("operand", "carried", "arithmetic", "left out", "answer", "form", "none")

_STEP = re.compile(r"(check )?(\d{1,9})([-+*])(\d{1,9})=(-?\d{1,9})")


class Step(NamedTuple):
    is_check: bool
    left: int
    sign: str
    right: int
    result: int

    @property
    def number(self) -> int:
        """What is added, with its sign."""
        return _value(0, self.sign, self.right)

    @property
    def is_wrong(self) -> bool:
        return self.result != _value(self.left, self.sign, self.right)


def terms_of(question: str) -> list[int]:
    """The signed numbers of a sum without products, in their order.

    >>> terms_of("How much is 47 plus 29 minus 18?"), terms_of("83+67-11 = ?")
    ([47, 29, -18], [83, 67, -11])
    """
    text = question.replace(" plus ", "+").replace(" minus ", "-").replace(" ", "")
    return [int(number) for number in re.findall(r"[-+]?\d+", text)]


def steps_of(text: str) -> list[Step]:
    """The steps of a completion's thought, checks included.

    >>> [step.is_wrong for step in steps_of("<think>47+29=76 76-18=59 check 59+18=77</think><answer>59</answer>")]
    [False, True, False]
    """
    thought = text.partition("<think>")[2].partition("</think>")[0]
    found = _STEP.findall(thought)
    return [Step(bool(check), int(left), sign, int(right), int(result)) for check, left, sign, right, result in found]


def style_of(steps: list[Step], terms: list[int]) -> str:
    """Whether numbers with tens and units are added whole ("step by step"), in two parts ("careful"), or both.

    >>> style_of(steps_of("<think>47+20=67 67+9=76 76-18=58</think>"), [47, 29, -18])
    'mixed'
    """
    work = [step for step in steps if not step.is_check]
    has_whole = any(step.right > 10 and step.right % 10 for step in work)
    has_parts = any(
        tens.right % 10 == 0 and 0 < units.right < 10 and tens.number + units.number in terms
        for tens, units in itertools.pairwise(work)
        if tens.sign == units.sign != "*"
    )
    return STYLES[{(True, False): 0, (False, True): 1, (True, True): 2}.get((has_whole, has_parts), 3)]


def first_mistake(text: str, terms: list[int]) -> str:
    """What is wrong first in a completion that should add up `terms`; "none" if thought and answer are both right.

    "operand": a number that the question does not have, or not once more; "carried": a step that does not go on from
    the result before it; "arithmetic": a wrong result; "left out": a number is missing at the end; "answer": not the
    last result; "form": no answer, or several. Numbers in another order are no mistake. Checks are not read: they come
    after the result.

    >>> first_mistake("<think>47-18=29 29+29=58</think><answer>58</answer>", [47, 29, -18])
    'none'
    >>> [first_mistake(f"<think>{thought}</think><answer>58</answer>", [47, 29, -18]) for thought in (
    ...     "47+28=75 75-18=57", "47+29=76 67-18=49", "47+29=77 77-18=58", "47+29=76", "47+20=67 67+9=76 76-18=59")]
    ['operand', 'carried', 'arithmetic', 'left out', 'arithmetic']
    """
    total, waiting = None, {tuple(terms)}  # what can be left of them: 20 can be a number, or the tens of 27
    for step in (step for step in steps_of(text) if not step.is_check):
        if total is None:
            total, waiting = step.left, {rest for rest in _take(tuple(terms), step.left) if len(rest) < len(terms)}
        if step.left != total:
            return "carried"
        waiting = {rest for each in waiting for rest in _take(each, step.number) if step.sign != "*"}
        if not waiting:
            return "operand"
        if step.is_wrong:
            return "arithmetic"
        total = step.result
    if () not in waiting:
        return "left out"
    answer = given_answer(text)
    if answer is None:
        return "form"
    return "none" if normalize_answer(answer) == str(total) else "answer"


def keeps_order(text: str, terms: list[int]) -> bool:
    """Whether a thought without a mistake takes the numbers as they come, each whole or its tens before its units.

    >>> keeps_order("<think>47+20=67 67+9=76 76-18=58</think>", [47, 29, -18])
    True
    >>> keeps_order("<think>47-18=29 29+29=58</think>", [47, 29, -18])
    False
    """
    work = [step for step in steps_of(text) if not step.is_check]
    waiting = list(terms)
    for number in [work[0].left, *(step.number for step in work)] if work else ():
        if not waiting or number not in (waiting[0], _tens(waiting[0])):
            return False
        waiting[0] -= number
        if waiting[0] == 0:
            waiting.pop(0)
    return not waiting


def _take(numbers: tuple[int, ...], number: int) -> list[tuple[int, ...]]:
    """What can be left of some numbers, if one of them is taken, or the tens of one, whose units are left; sorted."""
    left = []
    for position, each in enumerate(numbers):
        others = numbers[:position] + numbers[position + 1 :]
        if each == number:
            left.append(tuple(sorted(others)))
        elif abs(each) > 9 and _tens(each) == number:
            left.append(tuple(sorted((*others, each - number))))
    return left


def _tens(number: int) -> int:
    """Its tens, with its sign: -18 has -10."""
    return (abs(number) // 10 * 10) * (1 if number > 0 else -1)


def _value(left: int, sign: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[sign]
