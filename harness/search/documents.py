"""Documents to search: read from a directory of .txt and .md files or from a JSONL file, and cut into chunks.

Whatever a document says, tool calls and control tokens included, is text. Markdown is cut at its headings, too. Time
and memory are linear in the text.
"""

import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError

from harness.base.checks import is_text, local_path
from harness.base.config import shown
from harness.base.terminal import printable

SUFFIXES = (".txt", ".md")
NOT_JSONL = " (a file of another name than *.txt and *.md is read as JSONL, one object a line)"
MAX_HEADING = 200  # characters of the headings in front of a chunk
# The scripts that put no spaces between words: Thai, Lao, Burmese, Khmer, kana and Han characters, for a class of `re`.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
# What counts as a word, and is never cut: 100 characters without a space are one at the most
_WORD = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]{{1,100}}")
_SENTENCE_END = re.compile("[.!?\u2026\u3002\uff01\uff1f][\"'\u201d\u2019)\\]]*$")  # also Chinese and typographic ones


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
    is_jsonl = root.is_file() and root.suffix.lower() not in SUFFIXES
    is_empty = True
    try:
        for document in (_read_jsonl if is_jsonl else _read_files)(root, chunk_words, chunk_overlap, skipped):
            is_empty = False
            yield document
    except OSError as error:
        raise UserError(f"{shown(error.filename or root)} cannot be read ({error.strerror})") from error
    if is_empty:
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


def whole(text: str) -> str:
    """The text as UTF-8 can hold it, without halves of surrogate pairs.

    >>> whole("half \\ud83d")
    'half ?'
    """
    return text.encode(errors="replace").decode()


def _read_files(root: Path, num_words: int, overlap: int, skipped: list[str]) -> Iterator[Document]:
    for path in [root] if root.is_file() else _find_files(root):
        name = path.name if path == root else path.relative_to(root).as_posix()
        name = os.fsencode(name).decode(errors="replace")  # a file's name need not be UTF-8
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
        raise error

    known = set()  # directories; links can lead to one of them again
    for folder, folders, names in os.walk(root, onerror=fail, followlinks=True):
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
        UserError: the file is no text.
    """
    content = path.read_bytes()
    is_utf16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))  # no UTF-8 text begins with these bytes
    if not is_utf16 and b"\0" in content:
        raise UserError(f"{shown(path)} is no text: byte {content.index(0)} is 0; leave the file out")
    try:
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{shown(path)} is not UTF-8 text, as byte {error.start} ({error.object[error.start]:#x}) shows: save it "
            "as UTF-8"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_jsonl(path: Path, num_words: int, overlap: int, skipped: list[str]) -> Iterator[Document]:
    lines: dict[str, int] = {}  # by id
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            try:
                name, text = _parse(line)
            except UserError as error:
                hint = NOT_JSONL if number == 1 and isinstance(error.__cause__, ValueError) else ""
                raise UserError(f"{shown(path)}:{number}: {error}{hint}") from error
            texts = list(split(text, num_words, overlap))
            names = [name] if len(texts) == 1 else [f"{name}#{part}" for part in range(1, len(texts) + 1)]
            for document in map(Document, names, texts):
                if document.id in lines:
                    raise UserError(
                        f"{shown(path)}:{number}: the id {printable(document.id, 80)!r} is that of line "
                        f"{lines[document.id]}, too"
                    )
                lines[document.id] = number
                yield document
            if not texts:
                skipped.append(f"line {number}")


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
    name = str(name) if type(name) is int else name
    for field, value in (("id", name), ("text", text)):
        if not is_text(value) or (field == "id" and not value):
            problem = "is missing" if value is None else f"cannot be {printable(json.dumps(value), 80)}"
            raise UserError(f'the field "{field}" {problem}: a row is {{"id": "...", "text": "..."}}')
    return name, text


# Chunks ---------------------------------------------------------------------------------------------------------------


def split(text: str, num_words: int, overlap: int) -> Iterator[str]:
    """Chunks of at most `num_words` words, each of which begins with the last `overlap` words of the one before.

    A chunk ends with a sentence or a paragraph, if one ends in the second half of its words that are new.

    >>> list(split("One two. Three four five six seven.", num_words=4, overlap=1))
    ['One two. Three four', 'four five six seven.']
    >>> list(split("One two three. Four five six seven.", num_words=4, overlap=0))
    ['One two three.', 'Four five six seven.']
    """
    if len(text) <= num_words:  # characters: most documents are short
        yield from filter(None, [_tidy(text.strip())])
        return
    words, window = _WORD.finditer(text), []
    while True:
        window += itertools.islice(words, num_words + 1 - len(window))
        if len(window) <= num_words:
            break
        first = overlap + (num_words - overlap + 1) // 2
        ends = (end for end in range(num_words, first - 1, -1) if _is_end(text, window[end - 1], window[end]))
        end = next(ends, num_words)
        yield _tidy(text[window[0].start() : window[end - 1].end()])
        window = window[end - overlap :]
    if window:
        yield _tidy(text[window[0].start() : window[-1].end()])


def _is_end(text: str, word: re.Match, following: re.Match) -> bool:
    """Whether a sentence or a paragraph ends between two words."""
    return bool(_SENTENCE_END.search(word[0])) or text.count("\n", word.end(), following.start()) > 1


def _tidy(text: str) -> str:
    """The text with every run of white space as one space, or as one line break if it holds one."""
    return re.sub(r"\s\s+|[^\S\n ]", lambda space: "\n" if "\n" in space[0] else " ", text)


def sections(text: str) -> Iterator[tuple[str, str]]:
    """The headings that lead to each part of a Markdown text, as "Guide > Install", and the part's text without them.

    Headings with other headings right below them are no part of their own.

    >>> list(sections("# Guide\\n## Install\\nRun it.\\n## Use\\n"))
    [('Guide > Install', 'Run it.\\n'), ('Guide > Use', '')]
    """
    start, titles = 0, []  # where the present part begins; level and text of the headings that are open
    for begin, end, level, title in itertools.chain(_headings(text), [(len(text), len(text), 0, "")]):
        body = text[start:begin]
        if body.strip() or (titles and level <= titles[-1][0]):
            yield printable(" > ".join(title for _, title in titles if title), MAX_HEADING), body
        start, titles = end, [*(entry for entry in titles if entry[0] < level), (level, title)]


def _headings(text: str) -> Iterator[tuple[int, int, int, str]]:
    """Where each heading of a Markdown text begins and ends, its level, and what it says. Code has no headings."""
    fence, previous, is_paragraph = "", "", False  # paragraph: the previous line is the first one of a paragraph
    begin = position = 0  # of the previous line, and of this one
    for line in io.StringIO(text):
        end, stripped = position + len(line), line.strip()
        mark = re.match(r" {0,3}(#{1,6}(?=\s)|`{3,}(?=[^`]*$)|~{3,}|=+\s*$|-+\s*$)", line)
        kind = mark[1].strip() if mark else ""
        if fence:
            if kind.startswith(fence) and not kind.strip(fence[0]) and stripped == kind:
                fence = ""
        elif kind[:1] in ("`", "~") and kind:
            fence = kind
        elif kind[:1] == "#":
            words, _, closing = stripped.rpartition(" ")
            yield position, end, len(kind), (words if not closing.strip("#") else stripped).lstrip("#").strip()
        elif kind and is_paragraph:  # underlined
            yield begin, end, 1 if kind[0] == "=" else 2, previous
        is_first = not previous and not fence and not kind and bool(re.match(r" {0,3}[^\s>|*+-]", line))
        begin, position, previous, is_paragraph = position, end, stripped, is_first
