"""The grammar of the bundled arithmetic questions. It is used to make data; reinforcement learning does not read it.

`make_math_tasks.py` draws the questions of the task from it, and `warm_start.py` the questions of the warm start.
"""

import hashlib
import itertools
import math
import random
from dataclasses import dataclass

MAX_TOTAL = 199  # every running total of a bundled question is in 0..MAX_TOTAL

# (num_terms, num_digits, has_product): weight among the bundled questions
KINDS: dict[tuple[int, int, bool], float] = {
    (2, 1, False): 0.04, (3, 1, False): 0.10, (4, 1, False): 0.13, (2, 2, False): 0.15, (3, 2, False): 0.23,
    (4, 2, False): 0.20, (2, 1, True): 0.02, (3, 2, True): 0.08, (4, 2, True): 0.05,
}  # fmt: skip


@dataclass(frozen=True)
class Term:
    """One summand: a sign, and a number or a product of two single digits."""

    sign: int  # +1 or -1
    factors: tuple[int, ...]

    @property
    def value(self) -> int:
        return math.prod(self.factors)


@dataclass(frozen=True)
class Question:
    """A sum of terms, e.g. 47 + 7 * 8 - 18; `wording` chooses how `render` asks for it."""

    terms: tuple[Term, ...]
    wording: int = 0

    @property
    def answer(self) -> int:
        return sum(term.sign * term.value for term in self.terms)

    @property
    def num_terms(self) -> int:
        """How many numbers the question contains: 3 for `7 * 8 + 23`."""
        return sum(len(term.factors) for term in self.terms)

    @property
    def num_digits(self) -> int:
        return max(len(str(number)) for term in self.terms for number in term.factors)

    def has_totals_up_to(self, limit: int) -> bool:
        """Whether every running total is in 0..`limit`."""
        return all(0 <= total <= limit for total in itertools.accumulate(t.sign * t.value for t in self.terms))

    @property
    def key(self) -> str:
        """The question, up to the order of commuting terms and factors.

        >>> a = Question((Term(1, (47,)), Term(1, (7, 8)), Term(-1, (18,))))
        >>> b = Question((Term(1, (8, 7)), Term(-1, (18,)), Term(1, (47,))))
        >>> a.key, a.key == b.key
        ('+47 +7*8 -18', True)
        """
        parts = (f"{'+-'[term.sign < 0]}{'*'.join(map(str, sorted(term.factors)))}" for term in self.terms)
        return " ".join(sorted(parts))


def pool(question: Question) -> str:
    """Which of three disjoint sets a question belongs to: "heldout", "train" or "warm_start".

    A hash of `key` decides, so the same sum in another order or wording is never in two sets.
    """
    bucket = hashlib.sha256(question.key.encode()).digest()[0]
    return "heldout" if bucket < 26 else "train" if bucket < 90 else "warm_start"


def draw_question(rng: random.Random, kind: tuple[int, int, bool], only_pool: str) -> Question:
    """Draw a question of the given kind from one pool, with every running total in 0..MAX_TOTAL."""
    num_terms, num_digits, has_product = kind
    while True:
        terms = [Term(1, _draw_number(rng, num_digits)) for _ in range(num_terms - 2 * has_product)]
        if has_product:
            terms.insert(rng.randint(0, len(terms)), Term(1, (rng.randint(2, 9), rng.randint(2, 9))))
        terms = [terms[0], *(Term(rng.choice((1, -1)), term.factors) for term in terms[1:])]
        question = Question(tuple(terms), wording=rng.randrange(1_000_000))
        has_form = question.num_digits == num_digits and question.has_totals_up_to(MAX_TOTAL)
        if has_form and pool(question) == only_pool:
            return question


def _draw_number(rng: random.Random, num_digits: int) -> tuple[int]:
    """A number of one digit if `num_digits` is 1; otherwise of two digits with probability 0.8, else of one."""
    return (rng.randint(1, 9) if num_digits == 1 or rng.random() < 0.2 else rng.randint(10, 99),)


def render(question: Question) -> str:
    """The question as text: one of 24 wordings (30 for two numbers), chosen by `question.wording`.

    >>> render(Question((Term(1, (47,)), Term(-1, (18,)))))
    'What is 47 - 18?'
    """
    return _wordings(question)[question.wording % len(_wordings(question))]


def _wordings(question: Question) -> list[str]:
    expressions = []
    for plus, minus, times in ((" + ", " - ", " * "), (" plus ", " minus ", " times "), ("+", "-", "*")):
        parts = [(plus if term.sign > 0 else minus) + times.join(map(str, term.factors)) for term in question.terms]
        expressions.append("".join(parts).removeprefix(plus))
    frames = (
        "What is {}?", "Compute {}.", "Calculate {}.", "Work out {}.", "How much is {}?", "{} = ?",
        "Find {}.", "Solve {}.",
    )  # fmt: skip
    wordings = [frame.format(expression) for frame in frames for expression in expressions]
    if question.num_terms > 2:
        return wordings
    a, b = (number for term in question.terms for number in term.factors)
    if len(question.terms) == 1:
        return wordings + [f"Multiply {a} by {b}.", f"What is the product of {a} and {b}?"] * 3
    if question.terms[1].sign > 0:
        return wordings + [f"Add {a} and {b}.", f"What is the sum of {a} and {b}?"] * 3
    return wordings + [f"Subtract {b} from {a}.", f"Take {b} away from {a}."] * 3


def to_row(question: Question) -> dict:
    """A question as a row of the bundled files."""
    return {
        "question": render(question),
        "answer": str(question.answer),
        "num_terms": question.num_terms,
        "num_digits": question.num_digits,
    }
