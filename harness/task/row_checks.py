"""Finds faulty rows: gold answers that no completion can give, and held-out questions that training also asks."""

import math
import re
import signal
import sys
import threading
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from common.errors import UserError

from harness.base.terminal import printable, say
from harness.data.rows import Row, find_problem, is_empty, placed
from harness.data.schemas import read_as
from harness.task.named_task import task_of
from harness.task.scorer import Scorer
from harness.task.task_file import TaskFile, bundled_tasks

PATIENCE = 10  # seconds for the solutions of all rows together

_SPACING = re.compile(r"\\(?:left|right|displaystyle)(?![a-z])|\\[,!;: ]|\$")  # in LaTeX
_PUNCTUATION = re.compile(r"[\"'`\u2018\u2019\u201c\u201d;:!?]|[.,](?!\d)|(?<!\d)[.,]")
_THOUSANDS, _SIGN = re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), re.compile(r"\s*([^\w\s])\s*")


def try_solutions(scorer: Scorer, rows: list[Row]) -> None:
    """Refuse a row whose solution does not earn `correct` = 1 (without `correct`: any reward), within `PATIENCE`."""
    file, began = scorer.file, time.monotonic()
    for number, row in enumerate(rows):
        if time.monotonic() - began > PATIENCE:
            say(f"{file}: the solutions of {number} of {len(rows)} rows were tried in {PATIENCE} s, and are rewarded")
            return
        with _time_limit(f"{row.place}: solution(row) of {file} has not ended in {PATIENCE} s"):
            text = file.solution(row)
        if text is not None and (fault := solution_fault(scorer, row, text)):
            raise UserError(f"{row.place}: {_reason(file, row, fault)}")


def check_votes(file: TaskFile, rows: list[Row]) -> None:
    """Refuse a task in whose solutions no answer can be read; without solutions, say where answers are looked for."""
    solutions = [(row, text) for row in rows[:100] if (text := file.solution(row)) is not None]
    if not solutions and not file.has("vote"):
        say(f"{file} defines no vote(row, text): the answer of a completion is the text in its only <answer>")
    if solutions and not any(file.vote(row, text) is not None for row, text in solutions):
        raise UserError(
            f"{file}: its answers cannot be read, so that completions cannot vote: define vote(row, text), which "
            "returns the answer of a completion (docs/your_task.md)"
        )


@contextmanager
def _time_limit(sentence: str) -> Iterator[None]:
    """Raise a UserError with this sentence if the block takes longer than `PATIENCE`, on systems with such alarms."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    rings = []

    def ring(*_) -> None:
        rings.append(True)
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    except UserError as error:  # the task's reading of it
        raise UserError(sentence) if rings else error from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def solution_fault(scorer: Scorer, row: Row, text: str) -> str | None:
    """The reward of a row's solution, if a right answer would earn something else."""
    rewards = scorer.reward(row, text)
    measure, earned, is_right = "a total reward of", (total := scorer.total_reward(rewards)), total > 0
    if "correct" in rewards:
        measure, earned, is_right = "correct =", rewards["correct"], rewards["correct"] == 1
    if is_right or not math.isfinite(earned):  # any other is a fault of the reward, which the run reports
        return None
    return f"{printable(repr(text), 80)} earns {measure} {earned:g}"


def tell_unpaid(file: TaskFile, rows: list[Row]) -> None:
    """Tell the user of the first question whose answer is wanted in a form that the bundled task pays nothing for."""
    for row in rows if file.is_bundled else ():
        is_asked = "\\boxed" in row.question or "####" in row.question
        if is_asked or "\\" in str(row.get("answer")):
            if _solves(file, row) and (form := unpaid_form(file, row)) is not None:
                reason = "the question asks for this form" if is_asked else "its answer is LaTeX"
                remedy = suggest_task(row, file) or ": remove what asks for it from the questions (docs/data.md)"
                say(f"{row.place}: {file} pays 0 for {printable(form, 60)}, although {reason}{remedy}", sys.stderr)
            return


def empty_golds(file: TaskFile, row: Row) -> list[str]:
    """The fields of a row that should hold its answer but are empty."""
    # Arrow writes None where there is none
    fields = file.fields.keys() | ({"answer"} if row.get("answer") is not None else set())
    return [field for field in sorted(fields & row.keys()) if is_empty(row[field])]


def _reason(file: TaskFile, row: Row, fault: str) -> str:
    if empty := empty_golds(file, row):
        fields = " and ".join(map(repr, empty))
        return f"the field {fields} is empty, so that no completion can be right: remove the row"
    reason = f"no completion can be right, because the row's own solution {fault}"
    if suggestion := suggest_task(row, file):
        return reason + suggestion
    hashes = " (keep the part of GSM8K's answers after ####)" if "####" in str(row.get("answer")) else ""
    form = f"the form that reward(row, text) of {file} compares with{hashes}"
    return f"{reason}: bring the row to {form}, or correct its solution(row)"


def suggest_task(row: Row, file: TaskFile) -> str:
    """The end of a sentence about a row that a bundled task cannot use: the tasks that can judge it, if any.

    Tasks whose fields the row has come before tasks for which it has to be read by another schema.
    """
    bundled = bundled_tasks()
    fitting: dict[bool, list[str]] = {True: [], False: []}
    for other in map(task_of, bundled if file.name in bundled else ()):  # a user's own task is not a mistake
        with suppress(UserError):  # its functions cannot handle such a row
            read = placed(row, row.place)
            is_read = read_as(read, other.fields)[0] is None
            if is_read and _solves(other, read) and unpaid_form(other, read) is None:
                fitting[find_problem(row, other.fields) is None].append(str(other))
    found = fitting[True] or fitting[False]
    return f"; rows like this one belong to {' or '.join(found)}" if found else ""


def unpaid_form(file: TaskFile, row: Row) -> str | None:
    """The right answer in a form that the prompt asks for or that LaTeX has, if the task does not pay for it."""
    asked = " ".join(message["content"] for message in file.messages(row))
    gold = str(file.right_answer(row))
    forms = [f"\\boxed{{{gold}}}"] if "\\boxed" in asked or "\\" in gold else []
    forms += [f"#### {gold}"] if "####" in asked else []
    return next((form for form in forms if file.reward(row, form).get("correct") == 0), None)


def _solves(file: TaskFile, row: Row) -> bool:
    """Whether the solution of a row is right."""
    text = file.solution(row)
    return text is not None and file.reward(row, text).get("correct") == 1


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
