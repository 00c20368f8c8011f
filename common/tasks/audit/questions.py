"""Questions that are asked twice: within the data, and in training and evaluation alike."""

import re
import unicodedata
from collections import defaultdict

from common.tasks.audit.findings import Finding
from common.tasks.audit.golds import shown_gold

from common.plumbing.task import Row, Task

RUN = 13  # words in a row that two questions hardly share by chance (GPT-3, arXiv 2005.14165, appendix C)
MOST = 10  # training questions with a run; one that more of them have is an instruction

_SPACING = re.compile(r"\\(?:left|right|displaystyle)(?![a-z])|\\[,!;: ]|\$")  # of LaTeX
_PUNCTUATION = re.compile(r"[\"'`\u2018\u2019\u201c\u201d;:!?]|[.,](?!\d)|(?<!\d)[.,]")


def normalise(question: str) -> str:
    r"""A question without what two copies of it can differ in: case, spaces, punctuation, thousands commas, LaTeX's \$.

    What a formula means is kept: operators, brackets and the points of decimals.

    >>> normalise("He  paid $1,080.50;\nHow much is $x + \\left(2\\right)$?"), normalise("2-3") == normalise("2+3")
    ('he paid 1080.50 how much is x+(2)', False)
    """
    text = unicodedata.normalize("NFKC", question).casefold()
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", _SPACING.sub(" ", text))
    text = re.sub(r"\s*([^\w\s])\s*", r"\1", _PUNCTUATION.sub(" ", text))
    return " ".join(text.split())


def find_repeated(task: Task, rows: list[Row], of: str) -> list[Finding]:
    """Questions that the same data ask more than once, with the same gold answer and with different ones.

    Of rows that ask the same, the first is not counted. Two gold answers are the same if the reward accepts one for the
    other's row. Of the others, those that have a run of `RUN` words in common with an earlier one.
    """
    conflicts = Finding(f"{of}_conflicts", f"{of}: same question, different gold answers", True, len(rows))
    repeated = Finding(f"{of}_repeated", f"{of}: same question again, same gold answer", False, len(rows))
    near = Finding(f"{of}_{RUN}_words", f"{of}: {RUN} words in a row in common with an earlier one", False, len(rows))
    first: dict[str, Row] = {}
    for row in rows:
        before = first.setdefault(normalise(row.question), row)
        if before is row:
            continue
        if _agree(task, before, row):
            repeated.add(row, f"as {before.place}: {row.question}")
        else:
            golds = f"{shown_gold(task, row)} and {shown_gold(task, before)}"
            conflicts.add(row, f"as {before.place}, answers {golds}: {row.question}")
    others = list(first.values())
    for row, found, run in _share_a_run(others, others):
        near.add(row, f"as {found.place}: {run}")
    return [conflicts, repeated, near]


def find_shared(train_rows: list[Row], eval_rows: list[Row]) -> list[Finding]:
    """Evaluation questions that training asks as well: exactly, normalised, or in a run of `RUN` words."""
    exact = Finding("shared_exactly", "evaluation questions that are training questions", True, len(eval_rows))
    close = Finding("shared_normalised", "the same but for case, spaces and punctuation", True, len(eval_rows))
    near = Finding(f"shared_{RUN}_words", f"other ones with {RUN} words in a row in common", False, len(eval_rows))
    questions = {row.question: row for row in reversed(train_rows)}
    normalised = {normalise(row.question): row for row in reversed(train_rows)}
    others = []
    for row in eval_rows:
        if found := questions.get(row.question):
            exact.add(row, f"as {found.place}: {row.question}")
        elif found := normalised.get(normalise(row.question)):
            close.add(row, f"as {found.place}: {row.question}")
        else:
            others.append(row)
    for row, found, run in _share_a_run(train_rows, others):
        near.add(row, f"as {found.place}: {run}")
    return [exact, close, near]


def _share_a_run(rows: list[Row], others: list[Row]) -> list[tuple[Row, Row, str]]:
    """Which of the others have a run of words that a row has, before them if they are the same rows; the row; the run.

    A run is left out that more than `MOST` rows have.
    """
    wanted = {run for row in others for run in _runs(row.question)}
    having: dict[str, list[int]] = defaultdict(list)  # by a run, the first rows that have it
    for index, row in enumerate(rows):
        for run in wanted.intersection(_runs(row.question)):
            if len(having[run]) <= MOST:
                having[run].append(index)
    found = []
    for index, row in enumerate(others):
        before = index if others is rows else len(rows)
        shared = [(having[run][0], run) for run in _runs(row.question) if 0 < len(having[run]) <= MOST]
        if earlier := [(first, run) for first, run in shared if first < before]:
            first, run = min(earlier, key=lambda pair: pair[0])
            found.append((row, rows[first], run))
    return found


def _runs(question: str) -> list[str]:
    """All runs of `RUN` words, in their order."""
    words = re.findall(r"\w+", normalise(question))
    return [" ".join(words[start : start + RUN]) for start in range(len(words) - RUN + 1)]


def _agree(task: Task, row: Row, other: Row) -> bool:
    """Whether two rows that ask the same have the same gold answer."""
    text = task.solution(row)
    if text is None:
        return row.get("answer") == other.get("answer")
    return text == task.solution(other) or task.reward(other, text).get("correct") == 1
