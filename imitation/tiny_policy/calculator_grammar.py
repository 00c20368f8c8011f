"""The grammar of the calculator's questions: sums that the tiny policy cannot do in its head, and some easy sums.

`make_calculator_tasks.py` draws the questions of the task from it, and `tool_lessons.py` the questions of its
lessons. Terms, wordings and pools are the same as for the bundled arithmetic questions; only the numbers are larger.
"""

import random

from arithmetic_grammar import Question, Term, draw_question, pool, render

MAX_RESULT = 99_999_999  # eight digits, also for every running total

KINDS: dict[str, float] = {"easy": 0.25, "product": 0.35, "chain": 0.40}  # weight among the questions

# easy: bundled sums of two and three numbers, which a direct answer gets right now and then
EASY_KINDS = {(2, 1, False): 0.04, (2, 2, False): 0.36, (3, 1, False): 0.15, (3, 2, False): 0.45}

# The digits of the factors of each term, one shape per row: "product" has one term, "chain" several
PRODUCT_SHAPES: list[list[tuple[int, ...]]] = [[(3, 2)], [(3, 3)], [(4, 2)], [(4, 3)], [(4, 4)]]
CHAIN_SHAPES: list[list[tuple[int, ...]]] = [
    [(3, 2), (4,)], [(4,), (3, 2)], [(3, 3), (3,)], [(4, 2), (4,)],  # the first one is 347*58+1204, for example
    [(2, 2), (3, 2)], [(4,), (4,), (4,)], [(4,), (4,), (4,), (4,)],
]  # fmt: skip


def draw_calculator_question(rng: random.Random, kind: str, only_pool: str) -> Question:
    """Draw a question of one of `KINDS` from one pool, with every running total in 0..MAX_RESULT."""
    if kind == "easy":
        return draw_question(rng, rng.choices(list(EASY_KINDS), list(EASY_KINDS.values()))[0], only_pool)
    while True:
        shape = rng.choice(PRODUCT_SHAPES if kind == "product" else CHAIN_SHAPES)
        terms = []
        for digits in shape:
            factors = [rng.randint(10 ** (count - 1), 10**count - 1) for count in digits]
            rng.shuffle(factors)
            terms.append(Term(rng.choice((1, 1, -1)) if terms else 1, tuple(factors)))
        question = Question(tuple(terms), wording=rng.randrange(1_000_000))
        if question.has_totals_up_to(MAX_RESULT) and pool(question) == only_pool:
            return question


def to_row(question: Question, kind: str) -> dict:
    """A question as a row of the calculator's files.

    >>> to_row(Question((Term(1, (347, 58)), Term(1, (1204,))), wording=1), "chain")["question"]
    'What is 347 times 58 plus 1204?'
    """
    answer, num_digits = str(question.answer), question.num_digits
    return {"question": render(question), "answer": answer, "kind": kind, "num_digits": num_digits}
