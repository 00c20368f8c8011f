"""Rows of a file, each with its place in the file, or an error in the place of an unusable row."""

import csv
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from common.errors import UserError

from harness.base.checks import is_text
from harness.base.config import shown
from harness.base.hub import read_local
from harness.base.terminal import printable

Fields = dict[str, type | tuple[type, ...]]

# The first bytes of files that are not read
_OTHERS = {b"\x1f\x8b": "a compressed file", b"PK\x03\x04": "a compressed file", b"\xff\xfe": "text in UTF-16"}
_KINDS = {".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}  # by suffix, as `datasets` calls them
_MAGIC = {b"PAR1": "parquet", b"ARROW1": "arrow"}
_JSON = json.JSONEncoder(allow_nan=False, ensure_ascii=False, default=str)  # made once, for all rows
_NO_OBJECT = "a row must be a JSON object, not"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some programs write it at the start of UTF-8 files
_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}


class Row(dict):
    """A row of data with its origin, for error messages, and its question once the task has asked it."""

    place, question = "a row", ""  # the place is file and line
    is_table = False  # of a CSV file, in which every value is text


class FieldsError(UserError):
    """A row that lacks a field, or has an unusable value in a field."""

    def __init__(self, row: Row, problem: str):
        super().__init__(f"{row.place}: {problem}")
        self.row = row


def read_file(path: Path) -> Iterator[Row | UserError]:
    """The rows of a file: JSONL, one JSON array, CSV or TSV, Parquet or Arrow; an unusable one yields its error."""
    file, head = shown(path), b""
    with suppress(OSError), path.open("rb") as start:  # `_read_jsonl` explains an error
        head = start.read(1000).removeprefix(_BYTE_ORDER_MARK).lstrip()
    kind = _KINDS.get(path.suffix) or next((kind for begin, kind in _MAGIC.items() if head.startswith(begin)), None)
    if not head:
        yield from _read_jsonl(path)
    elif path.suffix in (".csv", ".tsv"):
        yield from _read_table(path, file)
    elif kind is not None:
        for number, row in enumerate(read_local(path, kind, file), start=1):
            yield placed(row, f"{file}, row {number}")
    elif head.startswith(b"["):
        yield from _read_array(path, file)
    else:
        yield from _read_jsonl(path)


def _read_array(path: Path, file: str) -> Iterator[Row | UserError]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{file}: this begins like one JSON array, but is none ({error})") from error
    for number, fields in enumerate(found, start=1):
        place = f"{file}, row {number}"
        is_row = isinstance(fields, dict)
        yield placed(fields, place) if is_row else UserError(f"{place}: {_NO_OBJECT} {type(fields).__name__}")


def _read_table(path: Path, file: str) -> Iterator[Row | UserError]:
    """All values are text, as they are written: no reader guesses that 007 is a number, or NA is nothing."""
    csv.field_size_limit(2**31 - 1)
    number = 1
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            first = lines.readline()
            lines.seek(0)
            mark = max("\t;," if path.suffix == ".csv" else "\t", key=first.count)
            table = csv.DictReader(lines, delimiter=mark, strict=True)
            names = [name.strip() for name in table.fieldnames or ()]
            if len(set(names)) < len(names) or "" in names:
                raise UserError(f"{file}: the first line must name the columns, each once, not {printable(first, 80)}")
            table.fieldnames = names
            for fields in table:
                number = table.line_num
                if None in fields:
                    yield UserError(f"{file}:{number}: there are more cells than columns")
                    continue
                row = placed({name: cell or None for name, cell in fields.items()}, f"{file}:{number}")
                row.is_table = True
                yield row
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not CSV in UTF-8 after line {number} ({error})") from error


def _read_jsonl(path: Path) -> Iterator[Row | UserError]:
    """The rows of a file in order; an unusable line yields the error that explains it."""
    file = shown(path)  # once: doing this for every row would take longer than reading the rows
    if path.is_dir():
        raise UserError(f"{file}: there is no such file, but a directory: name one of its files")
    if not path.is_file():
        raise UserError(f"{file}: there is no such file (a hub dataset is owner/name[:subset[:split]])")
    try:
        with path.open("rb") as lines:
            head = lines.read(4)
            if (kind := next((kind for start, kind in _OTHERS.items() if head.startswith(start)), None)) is not None:
                raise UserError(
                    f"{file} is {kind}: JSONL in UTF-8 is read (one object per line), a JSON array, CSV, Parquet or "
                    "Arrow, or a dataset of the hub (owner/name)"
                )
            lines.seek(0)
            for number, line in enumerate(lines, start=1):
                if bare := line.removeprefix(_BYTE_ORDER_MARK).strip():
                    yield _read_line(bare, f"{file}:{number}")
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from error


def _read_line(line: bytes, place: str) -> Row | UserError:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at")
        return UserError(f"{place}: not JSON ({problem} at column {error.colno}); every line must be one object")
    except UnicodeDecodeError as error:
        return UserError(f"{place}: not UTF-8 text ({error.reason})")
    if not isinstance(fields, dict):
        return UserError(f"{place}: {_NO_OBJECT} {type(fields).__name__}")
    return placed(fields, place)


def placed(fields: dict, place: str) -> Row:
    row = Row(fields)
    row.place = place
    return row


def find_problem(row: dict, fields: Fields) -> str | None:
    """Explain why a row lacks the required fields or types; None if the row is fine."""
    for field, wanted in fields.items():
        if field not in row:
            return f"the field {field!r} is missing (there are: {printable(', '.join(row), 200)})"
        if not _is_usable(row[field], wanted):
            wanted = wanted if isinstance(wanted, tuple) else (wanted,)
            value = printable(json.dumps(row[field], default=str), 80)
            kinds = [_NAMES.get(kind, kind.__name__) for kind in wanted]
            kinds = [kind for kind in kinds if kind != "a whole number" or "a number" not in kinds]
            return f"the field {field!r} cannot be {value}, but {' or '.join(kinds)}"
    return None


def is_empty(value: object) -> bool:
    """Whether a gold answer is empty: no text, no text after GSM8K's ####, or a list with nothing else.

    >>> [is_empty(value) for value in ("", " ", "2+2=4\\n#### ", [], ["", " "], None, 0, "#### 4")]
    [True, True, True, True, True, True, False, False]
    """
    if isinstance(value, list):
        return all(map(is_empty, value))
    return value is None or (isinstance(value, str) and not value.rpartition("####")[2].strip())


def _is_usable(value: object, wanted: type | tuple[type, ...]) -> bool:
    """Whether a value has a wanted type and fits in JSON: no NaN, no infinities, no halves of a surrogate pair."""
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    if type(value) not in wanted and not (type(value) is int and float in wanted):  # not isinstance: bool is an int
        return False
    try:
        return is_text(_JSON.encode(value))
    except ValueError:
        return False
