"""The tiny policy's lessons before any reinforcement learning: three lessons with correct targets only.

1. *copying*: write the question's sum in symbols. A small transformer learns last, and abruptly, to find the operands
   in the question, so this is practised alone first.
2. *reasoning*: all kinds of questions, and as many sums of five to seven numbers, always reasoned, until the steps are
   right. Long sums practise more steps per token. Direct answers must wait: they are guesses at first, and when we
   mixed them in here, their noise destroyed the copying again.
3. *answering*: the bundled kinds of questions, in three styles:
   - direct: `<answer>58</answer>`, which is right if the network can do the sum in one pass, and wrong otherwise;
   - step by step: `<think>47+29=76 76-18=58</think><answer>58</answer>`;
   - careful: tens before units, and the result checked a random number of times:
     `<think>47+20=67 67+9=76 76-10=66 66-8=58 check 58+18=76</think><answer>58</answer>`.

Most answers of lesson 3 are direct. So the policy ends up able to reason but mostly does not: it knows several styles,
but not which style pays. All questions come from the pool "warm_start", which shares no sum with the task's files.
"""

import random
from collections.abc import Iterator

from arithmetic_grammar import KINDS, Question, draw_question, render

from tasks.arithmetic import messages

Kind = tuple[int, int, bool]  # (num_terms, num_digits, has_product)

# The share of reasoned answers in lesson 3, by how many numbers a question has; more for products
REASONED_SHARE = {2: 0.12, 3: 0.19, 4: 0.24}
REASONED_SHARE_PRODUCT_BONUS = 0.10
CAREFUL_SHARE = 0.3  # of the reasoned answers
CHECK_AGAIN = 0.4  # probability of one more check, in the careful style

LONG_SHARE = 0.5  # of lesson 2
LONG_KINDS = [(5, 2, False), (6, 2, False), (7, 2, False)]

COPY_FRAMES = ("Write {} in symbols.", "Copy {}.", "Repeat {}.", "Say {} in symbols.")


def conversations(num_copying: int, num_reasoning: int, num_answering: int, seed: int) -> Iterator[dict]:
    """Yield rows `{"messages": [user, assistant]}` of the three lessons in order; the same rows for the same seed."""
    rng = random.Random(seed)
    kinds, weights = list(KINDS), list(KINDS.values())
    for _ in range(num_copying):
        question = draw_question(rng, rng.choices(kinds, weights)[0], "warm_start")
        yield conversation(rng.choice(COPY_FRAMES).format(expression_as_asked(question)), symbols(question))
    for _ in range(num_reasoning):
        is_long = rng.random() < LONG_SHARE
        kind = rng.choice(LONG_KINDS) if is_long else rng.choices(kinds, weights)[0]
        question = draw_question(rng, kind, "warm_start")
        yield conversation(render(question), reasoned_answer(question, rng))
    for _ in range(num_answering):
        kind = rng.choices(kinds, weights)[0]
        question = draw_question(rng, kind, "warm_start")
        yield conversation(render(question), answer_in_some_style(question, kind, rng))


def answer_in_some_style(question: Question, kind: Kind, rng: random.Random) -> str:
    """One target of lesson 3: direct, step by step, or careful."""
    num_terms, _, has_product = kind
    is_reasoned = rng.random() < REASONED_SHARE[num_terms] + REASONED_SHARE_PRODUCT_BONUS * has_product
    return reasoned_answer(question, rng) if is_reasoned else f"<answer>{question.answer}</answer>"


def reasoned_answer(question: Question, rng: random.Random) -> str:
    """The answer after its reasoning, step by step or careful."""
    reasoning = careful(question, rng) if rng.random() < CAREFUL_SHARE else step_by_step(question)
    return f"<think>{reasoning}</think><answer>{question.answer}</answer>"


def symbols(question: Question) -> str:
    """The sum as the reasoning writes it.

    >>> from arithmetic_grammar import Term
    >>> symbols(Question((Term(1, (47,)), Term(1, (7, 8)), Term(-1, (18,)))))
    '47+7*8-18'
    """
    parts = ("+-"[term.sign < 0] + "*".join(map(str, term.factors)) for term in question.terms)
    return "".join(parts).removeprefix("+")


def step_by_step(question: Question) -> str:
    """One step per operation, from left to right.

    >>> from arithmetic_grammar import Term
    >>> step_by_step(Question((Term(1, (47,)), Term(1, (7, 8)), Term(-1, (18,)))))
    '7*8=56 47+56=103 103-18=85'
    """
    return " ".join(_steps(question, split_tens=False))


def careful(question: Question, rng: random.Random) -> str:
    """Tens and units of every operand separately, then the last operation undone as a check, zero or more times."""
    steps = _steps(question, split_tens=True)
    last = question.terms[-1]
    if len(question.terms) > 1:
        undone = f"{question.answer}{'-+'[last.sign < 0]}{last.value}={question.answer - last.sign * last.value}"
        while rng.random() < CHECK_AGAIN:
            steps.append(f"check {undone}")
    return " ".join(steps)


def _steps(question: Question, split_tens: bool) -> list[str]:
    steps: list[str] = []
    total = 0
    for position, term in enumerate(question.terms):
        if len(term.factors) == 2:
            steps.append(f"{term.factors[0]}*{term.factors[1]}={term.value}")
        if position == 0:
            total = term.value
            continue
        tens, units = term.value // 10 * 10, term.value % 10
        for part in (tens, units) if split_tens and tens and units else (term.value,):
            steps.append(f"{total}{'+-'[term.sign < 0]}{part}={total + term.sign * part}")
            total += term.sign * part
    return steps


def expression_as_asked(question: Question) -> str:
    """The sum as the bundled questions write it: the wording without the words around it."""
    words = render(Question(question.terms, wording=question.wording % 3))
    return words.removeprefix("What is ").removesuffix("?")


def conversation(user: str, assistant: str) -> dict:
    return {"messages": [*messages({"question": user}), {"role": "assistant", "content": assistant}]}
