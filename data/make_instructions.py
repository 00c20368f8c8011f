"""Write prompts with instructions: `instructions.jsonl` (training) and `instructions_heldout.jsonl` (evaluation).

Half of the held-out rows ask for known kinds of instructions on topics that training does not name (`split` is
"topics"), half for kinds that training does not know (`split` is "kinds"); they take turns. Every row has a solution.

    python data/make_instructions.py     # a second; the same bytes every time
"""

import json
import random
from pathlib import Path

from tasks.grammars.instructions_grammar import HELD_OUT, TOPICS, TRAINED, draw_row
from tasks.instructions import solution

SEED = 20260104


def make_rows(split: str, topics: list[str], rules: list[str], num_rows: int) -> list[dict]:
    """Draw `num_rows` rows with distinct prompts that can be answered."""
    rng = random.Random(f"{SEED} {split}")
    rows: dict[str, dict] = {}
    while len(rows) < num_rows:
        row = draw_row(rng, topics, rules, split)
        if solution(row) is not None:
            rows.setdefault(row["prompt"], row)
    return list(rows.values())


def main() -> None:
    here = Path(__file__).parent
    held_out = TOPICS[4::5]
    known = [topic for topic in TOPICS if topic not in held_out]
    topics, kinds = make_rows("topics", held_out, TRAINED, 128), make_rows("kinds", held_out, HELD_OUT, 128)
    files = {
        "instructions.jsonl": make_rows("train", known, TRAINED, 1024),
        "instructions_heldout.jsonl": [row for pair in zip(topics, kinds, strict=True) for row in pair],
    }
    for name, rows in files.items():
        (here / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{here / name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
