"""Write `reasoned_sums.jsonl`: conversations with questions like the bundled ones, and their reasoning, to imitate.

The sums are distinct, and from the same pool as those of math_tasks.jsonl; none is held out for evaluation.

    python imitation/tiny_policy/make_reasoned_sums.py     # a second; the same bytes every time
"""

import random

from arithmetic_grammar import KINDS, draw_question, render
from data_files import write_rows
from warm_start import conversation, reasoned_answer

SEED = 20261127


def make_rows(num_rows: int) -> list[dict]:
    """Draw `num_rows` rows with distinct sums, the kinds in proportion to their weights."""
    rng = random.Random(SEED)
    rows: dict[str, dict] = {}
    while len(rows) < num_rows:
        question = draw_question(rng, rng.choices(list(KINDS), list(KINDS.values()))[0], "train")
        rows.setdefault(question.key, conversation(render(question), reasoned_answer(question, rng)))
    return list(rows.values())


if __name__ == "__main__":
    write_rows({"reasoned_sums": make_rows(1200)})
