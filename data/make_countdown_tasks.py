"""Write Countdown's problems: `countdown_tasks.jsonl` (training) and `countdown_tasks_heldout.jsonl` (evaluation).

No problem is in both files, or in the lessons of the tiny policy, also with its numbers in another order: `pool` of
tasks/grammars/countdown_grammar.py assigns every problem to exactly one of the three.

    python data/make_countdown_tasks.py     # a second; the same bytes every time
"""

import json
import random
from pathlib import Path

from tasks.grammars.countdown_grammar import draw_problem, to_row

SEED = 20260103


def make_rows(only_pool: str, num_rows: int) -> list[dict]:
    """Draw `num_rows` rows with distinct problems from one pool."""
    rng = random.Random(f"{SEED} {only_pool}")
    rows: dict[str, dict] = {}
    while len(rows) < num_rows:
        problem = draw_problem(rng, only_pool)
        rows.setdefault(problem.key, to_row(problem))
    return list(rows.values())


def main() -> None:
    here = Path(__file__).parent
    for suffix, only_pool, num_rows in (("", "train", 2048), ("_heldout", "heldout", 512)):
        rows = make_rows(only_pool, num_rows)
        path = here / f"countdown_tasks{suffix}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
