"""Write the bundled task: `math_tasks.jsonl` (training) and `math_tasks_heldout.jsonl` (evaluation).

No question is in both files, or in the warm start of the tiny policy, also up to the order of commuting terms:
`pool` of arithmetic_grammar.py assigns every sum to exactly one of the three.

    python imitation/tiny_policy/make_math_tasks.py     # a few seconds; the same bytes every time
"""

import random

from arithmetic_grammar import KINDS, draw_question, to_row
from data_files import write_rows

SEED = 20260101


def make_rows(only_pool: str, num_rows: int) -> list[dict]:
    """Draw `num_rows` rows with distinct sums from one pool, the kinds in proportion to their weights."""
    rng = random.Random(f"{SEED} {only_pool}")
    rows: dict[str, dict] = {}
    attempts = 0
    while len(rows) < num_rows and attempts < 50 * num_rows:  # small kinds run out of distinct sums, which is fine
        attempts += 1
        kind = rng.choices(list(KINDS), weights=list(KINDS.values()))[0]
        question = draw_question(rng, kind, only_pool)
        rows.setdefault(question.key, to_row(question))
    return list(rows.values())


if __name__ == "__main__":
    write_rows({"math_tasks": make_rows("train", 4096), "math_tasks_heldout": make_rows("heldout", 512)})
