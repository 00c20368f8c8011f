"""Write prompts with instructions: `instructions.jsonl` (training) and `instructions_heldout.jsonl` (evaluation).

`instructions_short.jsonl` and `instructions_short_heldout.jsonl` are the same, but every prompt asks for a number
of words between a smallest and a largest one: a laptop can train a real model on them.

Half of the held-out rows ask for known kinds of instructions on topics that training does not name (`split` is
"topics"). The other half ask for kinds that training does not know (`split` is "kinds"). The two take turns. Every row
has a solution.

    python imitation/tiny_policy/make_instructions.py     # a second; the same bytes every time
"""

import random

from data_files import write_rows
from instructions_grammar import HELD_OUT, TOPICS, TRAINED, draw_row

from tasks.instructions import solution

SEED = 20260104


def make_rows(split: str, topics: list[str], rules: list[str], num_rows: int, is_short: bool) -> list[dict]:
    """Draw `num_rows` rows with distinct prompts that can be answered."""
    rng = random.Random(f"{SEED} {split}" + " short" * is_short)
    rows: dict[str, dict] = {}
    while len(rows) < num_rows:
        row = draw_row(rng, topics, rules, split, is_short)
        is_of_split = any(rule.startswith(row["kind"]) for rule in rules)
        if is_of_split and solution(row) is not None:
            rows.setdefault(row["prompt"], row)
    return list(rows.values())


def main() -> None:
    held_out = TOPICS[4::5]
    known = [topic for topic in TOPICS if topic not in held_out]
    files = {}
    for name, is_short in (("instructions", False), ("instructions_short", True)):
        topics = make_rows("topics", held_out, TRAINED, 128, is_short)
        kinds = make_rows("kinds", held_out, HELD_OUT, 128, is_short)
        files[name] = make_rows("train", known, TRAINED, 1024, is_short)
        files[f"{name}_heldout"] = [row for pair in zip(topics, kinds, strict=True) for row in pair]
    write_rows(files)


if __name__ == "__main__":
    main()
