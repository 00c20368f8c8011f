"""Write longer sums than the bundled ones: `long_sums.jsonl` (training) and `long_sums_heldout.jsonl` (evaluation).

Sums of five to ten numbers, each of one or two digits, without products; every running total is in 0..199, as in the
bundled questions, which have two to four numbers. The warm start of the tiny policy held sums of up to seven numbers,
so sums of eight to ten are longer than any that it was taught. The lengths take turns: the first rows of a file hold
all of them equally, and `--at-most num_terms=7` keeps five to seven. docs/what_rl_teaches.md uses them.

No sum is in both files, in the bundled task's files, or in the warm start, also up to the order of commuting terms:
`pool` of arithmetic_grammar.py assigns every sum to exactly one of the three.

    python imitation/tiny_policy/make_long_sums.py     # seconds; the same bytes every time
"""

import random

from arithmetic_grammar import draw_question, to_row
from data_files import write_rows

SEED = 20260102
LENGTHS = range(5, 11)


def make_rows(only_pool: str, num_rows: int) -> list[dict]:
    """Draw `num_rows` rows of each length with distinct sums from one pool; the lengths take turns."""
    rng = random.Random(f"{SEED} {only_pool}")
    rows: dict[str, dict] = {}
    for _ in range(num_rows):
        for num_terms in LENGTHS:
            question = draw_question(rng, (num_terms, 2, False), only_pool)
            while question.key in rows:
                question = draw_question(rng, (num_terms, 2, False), only_pool)
            rows[question.key] = to_row(question)
    return list(rows.values())


if __name__ == "__main__":
    write_rows({"long_sums": make_rows("train", 512), "long_sums_heldout": make_rows("heldout", 128)})
