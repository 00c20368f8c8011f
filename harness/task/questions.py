"""The rows of a task: which files hold them, and those that pass the filters, each with its question."""

from contextlib import suppress

from common.errors import UserError

from harness.base.checks import parse_numbers
from harness.base.config import shown
from harness.base.terminal import say
from harness.data.benchmarks import Read
from harness.data.data import find_test_data, read_rows
from harness.data.rows import FieldsError, Row
from harness.data.schemas import read_as
from harness.task.row_checks import suggest_task, tell_unpaid
from harness.task.task_file import TaskFile


def find_sources(file: TaskFile, data: str | None, eval_data: str | None) -> tuple[str | None, str | None]:
    """The sources of the training rows and of the evaluation rows; the latter is None if rows are held out.

    The former is None if the task makes its own rows.
    """
    source = data if data is not None else file.train_data
    if source is None and file.has("rows"):
        return None, eval_data
    if source is None:
        raise UserError(f"{file} names no data: give --data")
    eval_source = file.eval_data if data is None and eval_data is None else eval_data
    return source, find_test_data(source) if eval_source is None else eval_source


def rows_to_see(file: TaskFile, data: str | None) -> list[Row]:
    """The rows of `data`, else those that the file is evaluated with."""
    source, eval_source = find_sources(file, data, None)
    return load_rows(source if data is not None or eval_source is None else eval_source, file, split="eval")


def load_rows(
    source: str | None,
    file: TaskFile,
    at_most: tuple[str, ...] = (),
    max_question_length: int | None = None,
    split: str = "train",
) -> list[Row]:
    """The rows of a source that pass the filters, with a hint if they belong to another task.

    Without a source, they are the rows that the task makes for `split`.
    """
    try:
        rows = file.rows(split) if source is None else read_rows(source, file.fields, not file.is_bundled)
    except FieldsError as error:
        raise UserError(f"{error}{suggest_task(error.row, file)}") from None
    rows = filter_rows(rows, source, file, at_most, max_question_length)
    tell_unpaid(file, rows)
    return rows


def filter_rows(
    rows: list[Row], source: str | None, file: TaskFile, at_most: tuple[str, ...], max_question_length: int | None
) -> list[Row]:
    """Keep the rows that pass `--at-most` and `--max-question-length`, and attach the task's question to each."""
    kept, passed, name = rows, [], source_name(source, file)
    for field, most in parse_numbers("--at-most", at_most).items():
        kept = [row for row in kept if _number(row, field) <= most]
        passed.append(f"{len(kept)} --at-most {field}={most:g}")
    for row in kept:  # all of them, also to check that each can be asked
        row.question = file.question(row)
        if not row.question.strip():
            raise FieldsError(row, "its question is empty: remove the row")
    if max_question_length is not None:
        kept = [row for row in kept if len(row.question) <= max_question_length]
        passed.append(f"{len(kept)} --max-question-length {max_question_length}")
    if not kept:
        raise UserError(f"none of the {len(rows)} rows of {name} passes the filters (--at-most, --max-question-length)")
    if passed:
        say(f"{name}: of {len(rows)} rows pass " + ", then ".join(passed))
    return kept


def source_name(source: str | None, file: TaskFile) -> str:
    """A source for a message; None: the rows that the task makes."""
    return str(file) if source is None else shown(source)


def _number(row: Row, field: str) -> float:
    value = row.get(field)
    with suppress(TypeError, ValueError):
        if isinstance(value, int | float | (str if row.is_table else int)) and not isinstance(value, bool):
            return float(value)
    raise UserError(f"--at-most {field}: {row.place} has no number in a field {field!r}")


def read_published(source: str, file: TaskFile, read: Read | None) -> list[Row]:
    """The rows of a source that are asked, with their questions; `read` brings them to the form of the task."""
    found = read_rows(source, {})
    rows = found if read is None else [row for row in found if _is_asked(row, read)]
    if not rows:
        raise UserError(f"{shown(source)}: all answers are faulty or hidden: docs/evaluate.md names a source")
    if len(rows) < len(found):
        say(f"{shown(source)}: {len(found) - len(rows)} of {len(found)} rows are left out: faulty or hidden answers")
    for row in rows:
        if (problem := read_as(row, file.fields, not file.is_bundled)[0]) is not None:
            raise FieldsError(row, problem)
        row.question = file.question(row)
    return rows


def _is_asked(row: Row, read: Read) -> bool:
    try:
        return read(row)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise FieldsError(row, f"not a row as it is published ({type(error).__name__}: {error})") from error
