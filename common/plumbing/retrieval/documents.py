"""Documents to search: read from a directory of .txt and .md files or from a JSONL file, and cut into chunks.

Whatever a document says, tool calls and control tokens included, is text.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError

from common.plumbing.checks import is_text, local_path
from common.plumbing.config import shown
from common.plumbing.retrieval.chunks import sections, split
from common.plumbing.terminal import printable

MAX_BYTES = 2**25  # of a text file, or of a row of JSONL: more than any book
SUFFIXES = (".txt", ".md")
NOT_JSONL = "a file of another name than *.txt and *.md is read as JSONL, one object a line"


class Document(NamedTuple):
    """What a search can find: a document, or a chunk of one."""

    id: str
    text: str


def read_corpus(
    path: str, chunk_words: int, chunk_overlap: int, skipped: list[str] | None = None
) -> Iterator[Document]:
    """All chunks of a corpus, one after the other, in the same order every time.

    A file is cut into chunks with the ids path#1, path#2, ...; so is a row of JSONL of more than `chunk_words` words,
    and a shorter one keeps its id. The rows are {"id": ..., "text": ...}, or have "contents" instead of "text".

    Args:
        path: a directory, searched with all directories in it but hidden ones; one file of text; or a JSONL file.
        skipped: the names of the files, and the lines, that hold no text are appended to it.

    Raises:
        UserError: naming the file, and the line or byte.
    """
    root, skipped = local_path(path, "--corpus"), [] if skipped is None else skipped
    if not root.exists():
        raise UserError(f"--corpus {shown(root)}: there is no such file or directory")
    if not (root.is_dir() or root.is_file()):
        raise UserError(f"--corpus {shown(root)} is neither a directory nor a file")
    is_jsonl = root.is_file() and root.suffix.lower() not in SUFFIXES
    documents = (_read_jsonl if is_jsonl else _read_files)(root, chunk_words, chunk_overlap, skipped)
    num_documents = 0
    for num_documents, document in enumerate(documents, start=1):  # noqa: B007
        yield document
    if num_documents == 0:
        where = f"--corpus {shown(root)}"
        raise UserError(f"{where} holds no text" if skipped or is_jsonl else f"{where} has no .txt or .md files in it")


def content_hash(documents: Iterable[Document]) -> str:
    """SHA-256 of the ids and the texts in their order; where a text was cut into chunks changes it, too."""
    digest = hashlib.sha256()
    for document in documents:
        add_to_hash(digest, document)
    return digest.hexdigest()


def add_to_hash(digest: "hashlib._Hash", document: Document) -> None:
    digest.update(f"{len(document.id)} {len(document.text)} {document.id}{document.text}".encode())


def _read_files(root: Path, num_words: int, overlap: int, skipped: list[str]) -> Iterator[Document]:
    for path in [root] if root.is_file() else _find_files(root):
        name = path.name if path == root else path.relative_to(root).as_posix()
        if not is_text(name):
            raise UserError(f"{printable(str(path), 200)}: the name of this file is not UTF-8 text")
        text = _read_text(path)
        parts = sections(text) if path.suffix.lower() == ".md" else [("", text)]
        chunks = (
            f"{headings}: {chunk}" if headings and chunk else headings or chunk
            for headings, body in parts
            for chunk in (split(body, num_words, overlap) if body.strip() else [""])
        )
        number = 0
        for number, chunk in enumerate(filter(None, chunks), start=1):
            yield Document(f"{name}#{number}", chunk)
        if number == 0:
            skipped.append(name)


def _find_files(root: Path) -> Iterator[Path]:
    """The text files in a directory and in those below it, in the order of their names, none from a directory twice.

    The files of runs are no documents: they would change a corpus that the runs are kept in.
    """

    def fail(error: OSError) -> None:
        raise UserError(f"{shown(error.filename)} cannot be read ({error.strerror})") from error

    def walk() -> Iterator[tuple[str, list[str], list[str]]]:
        try:
            yield from os.walk(root, onerror=fail, followlinks=True)
        except RecursionError:  # of Python 3.11
            raise UserError(f"{shown(root)} holds directories that are nested too deeply to be read") from None

    known = set()  # directories; links can lead to one of them again
    for folder, folders, names in walk():
        status = os.stat(folder)
        is_run = {"config.json", "metrics.jsonl"} <= set(names)  # whose adapters, say, have a README.md
        if is_run or (status.st_dev, status.st_ino) in known:
            folders.clear()
            continue
        known.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
        # a link that leads nowhere is kept, for its error; a pipe, from which one could read forever, is not
        yield from (path for path in paths if path.suffix.lower() in SUFFIXES and (path.is_file() or not path.exists()))


def _read_text(path: Path) -> str:
    """
    Raises:
        UserError: the file is too large, or no text.
    """
    try:
        size = path.stat().st_size
        content = path.read_bytes() if size <= MAX_BYTES else b""
    except OSError as error:
        raise UserError(f"{shown(path)} cannot be read ({error.strerror})") from error
    if size > MAX_BYTES:
        raise UserError(
            f"{shown(path)} has {size / 2**20:.0f} MiB, and a file of text may have {MAX_BYTES >> 20}: divide it, or "
            "write its parts as rows of a JSONL file"
        )
    is_utf16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))  # no UTF-8 text begins with these bytes
    if not is_utf16 and b"\0" in content:
        raise UserError(f"{shown(path)} is no text: byte {content.index(0)} is 0; leave the file out")
    try:
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"byte {error.start} ({error.object[error.start]:#x})"
        raise UserError(f"{shown(path)} is not UTF-8 text, as {where} shows: save it as UTF-8") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_jsonl(path: Path, num_words: int, overlap: int, skipped: list[str]) -> Iterator[Document]:
    lines: dict[str, int] = {}  # by id
    for number, line in _lines(path):
        try:
            name, text = _parse(line)
            texts = list(split(text, num_words, overlap))
            names = [name] if len(texts) == 1 else [f"{name}#{part}" for part in range(1, len(texts) + 1)]
            for document in map(Document, names, texts):
                if document.id in lines:
                    other = f"{shown(path)}:{lines[document.id]}"
                    raise UserError(f"the id {printable(document.id, 80)!r} is that of {other}, too")
                lines[document.id] = number
                yield document
        except UserError as error:
            hint = f" ({NOT_JSONL})" if isinstance(error.__cause__, ValueError) and not lines else ""
            raise UserError(f"{shown(path)}:{number}: {error}{hint}") from error
        if not texts:
            skipped.append(f"line {number}")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not empty, with their numbers."""
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(MAX_BYTES + 1)
                if len(line) > MAX_BYTES:
                    raise UserError(f"{shown(path)}:{number}: a row may have at most {MAX_BYTES >> 20} MiB")
                if not line:
                    return
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield number, line
    except OSError as error:
        raise UserError(f"{shown(path)} cannot be read ({error.strerror})") from error


def _parse(line: bytes) -> tuple[str, str]:
    """Id and text of a row.

    Raises:
        UserError: what is wrong with it.
    """
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text ({error.reason} at byte {error.start} of the line)") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON ({printable(str(error), 200)})") from error
    if not isinstance(row, dict):
        raise UserError(f"a row must be a JSON object, not {type(row).__name__}")
    name, text = row.get("id"), row.get("text", row.get("contents"))
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    for field, value in (("id", name), ("text", text)):
        if not _is_text(value) or (field == "id" and not value):
            problem = "is missing" if value is None else f"cannot be {printable(json.dumps(value), 80)}"
            raise UserError(f'the field "{field}" {problem}: a row is {{"id": "...", "text": "..."}}')
    return name, text


def _is_text(value: object) -> bool:
    """Whether a value is text that a file can hold; `is_text` looks at every character, which takes long."""
    return isinstance(value, str) and (value.isascii() or is_text(value))
