"""Write the calculator's task: `calculator_tasks.jsonl` (training) and `calculator_tasks_heldout.jsonl` (evaluation).

No question is in both files, or in the lessons of the tiny policy, also up to the order of commuting terms: `pool` of
arithmetic_grammar.py assigns every sum to exactly one of the three.

    python imitation/tiny_policy/make_calculator_tasks.py     # a few seconds; the same bytes every time
"""

import random

from calculator_grammar import KINDS, draw_calculator_question, to_row
from data_files import write_rows

SEED = 20260102


def make_rows(only_pool: str, num_rows: int) -> list[dict]:
    """Draw `num_rows` rows with distinct sums from one pool, the kinds in proportion to their weights."""
    rng = random.Random(f"{SEED} {only_pool}")
    rows: dict[str, dict] = {}
    while len(rows) < num_rows:
        kind = rng.choices(list(KINDS), weights=list(KINDS.values()))[0]
        question = draw_calculator_question(rng, kind, only_pool)
        rows.setdefault(question.key, to_row(question, kind))
    return list(rows.values())


if __name__ == "__main__":
    write_rows({"calculator_tasks": make_rows("train", 3840), "calculator_tasks_heldout": make_rows("heldout", 512)})
