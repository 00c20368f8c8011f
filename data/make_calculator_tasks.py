"""Write the calculator's task: `calculator_tasks.jsonl` (training) and `calculator_tasks_heldout.jsonl` (evaluation).

No question is in both files, or in the lessons of the tiny policy, also up to the order of commuting terms: `pool` of
tasks/grammars/arithmetic_grammar.py assigns every sum to exactly one of the three.

    python data/make_calculator_tasks.py     # a few seconds; the same bytes every time
"""

import json
import random
from pathlib import Path

from tasks.grammars.calculator_grammar import KINDS, draw_calculator_question, to_row

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


def main() -> None:
    here = Path(__file__).parent
    for suffix, only_pool, num_rows in (("", "train", 3840), ("_heldout", "heldout", 512)):
        rows = make_rows(only_pool, num_rows)
        path = here / f"calculator_tasks{suffix}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
