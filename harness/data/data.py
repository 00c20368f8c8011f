"""Reads rows of a local file, with errors that name file and row, or of the hub."""

import re
from collections import Counter
from collections.abc import Iterator

from common.errors import UserError

from harness.base.checks import local_path
from harness.base.config import shown
from harness.base.hub import find_test_split, is_hub_source, read_split
from harness.base.terminal import say
from harness.data.rows import Fields, FieldsError, Row, placed, read_file
from harness.data.schemas import read_as


def read_rows(source: str, fields: Fields, is_own: bool = False) -> list[Row]:
    """The rows of a local file, or of a hub dataset `owner/name[:subset[:split]]`; each gets `fields` by `read_as`."""
    rows = []
    for row in scan_rows(source, fields, is_own):
        if isinstance(row, UserError):
            raise row
        rows.append(row)
    if not rows:
        raise UserError(f"{shown(source)} has no rows")
    return rows


def scan_rows(source: str, fields: Fields, is_own: bool = False) -> Iterator[Row | UserError]:
    """The same, but an unusable row yields its error."""
    path = local_path(source, "the data file")
    if is_hub_source(source):
        rows = (placed(row, f"{source}, row {number}") for number, row in enumerate(read_split(source), start=1))
    else:
        rows = read_file(path)
    notes = Counter()
    for row in rows:
        problem, note = (None, "") if isinstance(row, UserError) else read_as(row, fields, is_own)
        notes[note] += 1
        yield row if problem is None else FieldsError(row, problem)
    for note, count in notes.items():
        if note:
            say(f"{shown(source)}: {count} of {notes.total()} rows by another schema (docs/data.md): {note}")


def find_test_data(source: str) -> str | None:
    """`test.*` next to a file `train.*`, or the split "test" of a hub dataset given without a split."""
    if is_hub_source(source):
        found = find_test_split(source)
    else:
        path = local_path(source, "the data file")
        of_train = re.fullmatch(r"train((?:-00000-of-00001)?\.\w+)", path.name)  # also as the hub names it
        beside = path.with_name(f"test{of_train[1]}") if of_train else path
        found = str(beside) if of_train and beside.is_file() else None
    if found is not None:
        say(f"evaluated on {shown(found)}, which comes with {shown(source)} (--eval-data names another)")
    return found
