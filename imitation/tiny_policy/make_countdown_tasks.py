"""Write Countdown's problems: `countdown_tasks.jsonl` (training) and `countdown_tasks_heldout.jsonl` (evaluation).

No problem is in both files, or in the lessons of the tiny policy, also with its numbers in another order: `pool` of
countdown_grammar.py assigns every problem to exactly one of the three.

    python imitation/tiny_policy/make_countdown_tasks.py     # a second; the same bytes every time
"""

import random

from countdown_grammar import draw_problem, to_row
from data_files import write_rows

SEED = 20260103


def make_rows(only_pool: str, num_rows: int) -> list[dict]:
    """Draw `num_rows` rows with distinct problems from one pool."""
    rng = random.Random(f"{SEED} {only_pool}")
    rows: dict[str, dict] = {}
    while len(rows) < num_rows:
        problem = draw_problem(rng, only_pool)
        rows.setdefault(problem.key, to_row(problem))
    return list(rows.values())


if __name__ == "__main__":
    write_rows({"countdown_tasks": make_rows("train", 2048), "countdown_tasks_heldout": make_rows("heldout", 512)})
