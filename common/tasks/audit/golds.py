"""Gold answers: whether the reward accepts them as their own row's answer, and what they are."""

import math
import re
import unicodedata
from collections.abc import Iterator

from common.errors import UserError
from common.tasks.audit.findings import Finding
from common.tasks.math import boxes

from common.plumbing.rows import is_empty
from common.plumbing.task import Row, Task

CHUNK = 1000  # rows that a task judges at once
MOST_BOXES = 3  # of a question, that are tried as its answer
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w]|[.,]\d)")
# Signs that no question needs: of control, of direction, and what a wrong decoding leaves behind
_BIDI = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufffd")


def find_gold_problems(task: Task, rows: list[Row], of: str) -> list[Finding]:
    """Rows without a gold answer, and rows whose solution the task does not reward as right."""
    empty = Finding(f"{of}_empty_golds", f"{of}: empty gold answers", True, len(rows))
    refused = Finding(f"{of}_refused_golds", f"{of}: gold answers that are not accepted as their own", True, len(rows))
    ill_formed = Finding(f"{of}_ill_formed_golds", f"{of}: gold answers that do not parse", True, len(rows))
    for row, text, problem in _solved(task, rows):
        if any(is_empty(row[field]) for field in {*task.fields, "answer"} & row.keys()):
            empty.add(row, row.question)
        elif problem is not None:
            refused.add(row, problem)
        elif text is not None and (fault := _fault(given(text))):
            ill_formed.add(row, f"{fault}: {given(text)}")
    return [empty, refused, ill_formed]


def find_copied(task: Task, rows: list[Row], of: str) -> Finding:
    """Gold answers that the question holds as a number or a word of its own, so that copying could find them."""
    copied = Finding(f"{of}_answer_in_question", f"{of}: gold answer is in the question", False, len(rows))
    for row in rows:
        gold = given(_solution(task, row) or "")
        if gold and _holds(row.question, gold):
            copied.add(row, f"{gold}: {row.question}")
    return copied


def find_boxed(task: Task, rows: list[Row], of: str) -> Finding:
    r"""Questions that hold a `\boxed{}` with what the reward accepts: the solution of an earlier part, for example."""
    boxed = Finding(f"{of}_boxed_in_question", f"{of}: gold answer is in a box in the question", True, len(rows))
    asked = [(row, text) for row in rows for text in boxes(row.question)[:MOST_BOXES]]
    texts = [f"<answer>{text}</answer>" for _, text in asked]
    for start in range(0, len(asked), CHUNK):
        task.prepare([row for row, _ in asked[start : start + CHUNK]], texts[start : start + CHUNK])
    accepted = {}
    for (row, text), completion in zip(asked, texts, strict=True):
        if task.reward(row, completion).get("correct") == 1:
            accepted.setdefault(id(row), (row, text))
    for row, text in accepted.values():
        boxed.add(row, f"{text}: ...{row.question[-200:]}")
    return boxed


def find_control_characters(rows: list[Row], of: str) -> Finding:
    """Rows with characters that are not text, in any field."""
    found = Finding(f"{of}_control_characters", f"{of}: control or replacement characters", True, len(rows))
    for row in rows:
        codes = sorted({f"U+{ord(letter):04X}" for text in _texts(row) for letter in text if _is_control(letter)})
        if codes:
            found.add(row, f"{' '.join(codes)}: {row.question}")
    return found


def given(solution: str) -> str:
    r"""The answer that a solution gives: in `<answer>`, or in `\boxed{}`, or the whole text.

    >>> given("<think>1+1=2</think><answer> 2 </answer>"), given("So \\boxed{\\frac{1}{2}}"), given("2")
    ('2', '\\frac{1}{2}', '2')
    """
    if found := re.search(r"<answer>(.*)</answer>", solution, re.DOTALL):
        return found[1].strip()
    found = re.search(r"\\boxed\{(.*)\}", solution, re.DOTALL)
    return (found[1] if found else solution).strip()


def shown_gold(task: Task, row: Row) -> str:
    return given(_solution(task, row) or str(row.get("answer", "")))


def _solution(task: Task, row: Row) -> str | None:
    try:
        return task.solution(row)
    except UserError:
        return None


def _solved(task: Task, rows: list[Row]) -> Iterator[tuple[Row, str | None, str | None]]:
    """Every row, the solution that the task gives, and why that is not right; None: it is, or there is no solution."""
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK]
        texts = [_solution(task, row) for row in chunk]
        known = [(row, text) for row, text in zip(chunk, texts, strict=True) if text is not None]
        task.prepare([row for row, _ in known], [text for _, text in known])
        for row, text in zip(chunk, texts, strict=True):
            yield row, text, _why_not(task, row, text)


def _why_not(task: Task, row: Row, text: str | None) -> str | None:
    try:
        text = task.solution(row) if text is None else text  # an error is raised again
        if text is None:
            return None
        rewards = task.reward(row, text)
    except UserError as error:
        return str(error).partition(f"{row.place} ")[2] or str(error)
    earned = rewards["correct"] if "correct" in rewards else task.total_reward(rewards)
    if (earned == 1) if "correct" in rewards else (earned > 0 or not math.isfinite(earned)):
        return None
    return f"{text!r} earns {'correct =' if 'correct' in rewards else 'a total of'} {earned:g}"


def _fault(gold: str) -> str | None:
    r"""What keeps a gold answer from being one answer in LaTeX or plain text.

    >>> [_fault(gold) for gold in ("\\frac{1}{2}", "[0, 1)", "\\frac{1}{2", "$x", "['9.6']", "18", "\\$5")]
    [None, None, 'braces are not closed', 'an odd number of $', 'a list written as text', None, None]
    """
    bare = re.sub(r"\\\\|\\[{}$]", "", gold)
    depth = 0
    for letter in bare:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth < 0:
            return "braces are not opened"
    if depth:
        return "braces are not closed"
    if bare.count("$") % 2:
        return "an odd number of $"
    return "a list written as text" if re.fullmatch(r"\[(['\"]).*\1\]", gold, re.DOTALL) else None


def _holds(question: str, gold: str) -> bool:
    """Whether a text holds an answer as a whole number or a whole word.

    >>> _holds("Of 1,080 eggs 3.5 break.", "1080"), _holds("Of 1,080 eggs", "80"), _holds("5.0 or 6?", "5")
    (True, False, True)
    >>> _holds("Is a or b larger?", "b"), _holds("Is aab larger?", "b")
    (True, False)
    """
    if _NUMBER.fullmatch(gold):
        return _value(gold) in {_value(number) for number in _NUMBER.findall(question)}
    return re.search(rf"(?<!\w){re.escape(gold)}(?!\w)", question) is not None


def _value(number: str) -> str:
    number = number.replace(",", "").lstrip("+")
    return (number.rstrip("0").rstrip(".") if "." in number else number) or "0"


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _texts(entry)


def _is_control(letter: str) -> bool:
    return letter not in "\n\t\r" and (letter in _BIDI or unicodedata.category(letter) == "Cc")
