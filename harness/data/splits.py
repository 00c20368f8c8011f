"""Training rows and held-out rows: which ones the seed holds out, and which questions both ask."""

import re
import unicodedata

from common.keyed import keyed_generator

from harness.data.rows import Row

_SPACING = re.compile(r"\\(?:left|right|displaystyle)(?![a-z])|\\[,!;: ]|\$")  # in LaTeX
_PUNCTUATION = re.compile(r"[\"'`\u2018\u2019\u201c\u201d;:!?]|[.,](?!\d)|(?<!\d)[.,]")
_THOUSANDS, _SIGN = re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), re.compile(r"\s*([^\w\s])\s*")


def hold_out(rows: list[Row], num_held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Divide rows into training rows and held-out rows, which the seed selects."""
    order = keyed_generator("split", seed).permutation(len(rows))
    rows = [rows[index] for index in order]
    return rows[num_held_out:], rows[:num_held_out]


def shared_questions(
    train_rows: list[Row], eval_rows: list[Row]
) -> tuple[list[tuple[Row, Row]], list[tuple[Row, Row]]]:
    """Held-out rows whose questions training asks as well, each with the first training row that asks it.

    First the exact duplicates, then the ones that differ only in case, spaces and punctuation.
    """
    asked = {row.question: row for row in reversed(train_rows)}
    exactly = [(row, asked[row.question]) for row in eval_rows if row.question in asked]
    alike = {normalise(row.question): row for row in reversed(train_rows)}
    others = [(row, normalise(row.question)) for row in eval_rows if row.question not in asked]
    return exactly, [(row, alike[text]) for row, text in others if text in alike]


def normalise(question: str) -> str:
    r"""Remove everything that can differ between copies of a question: case, spaces, punctuation, 1,000s commas, \$.

    Everything with a meaning in formulas is kept: operators, brackets and decimal points.

    >>> normalise("He  paid $1,080.50;\nHow much is $x + \\left(2\\right)$?"), normalise("2-3") == normalise("2+3")
    ('he paid 1080.50 how much is x+(2)', False)
    """
    text = unicodedata.normalize("NFKC", question).casefold()
    if "\\" in text or "$" in text:  # most texts contain neither, and training normalises them all
        text = _SPACING.sub(" ", text)
    if "," in text:
        text = _THOUSANDS.sub("", text)
    return " ".join(_SIGN.sub(r"\1", _PUNCTUATION.sub(" ", text)).split())
