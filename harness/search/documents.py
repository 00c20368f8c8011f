"""Documents to search: read from a directory of .txt and .md files or from a file of rows, and cut into chunks.

Everything in a document is text, including tool calls and control tokens. Markdown is also cut at its headings.
"""

import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError

from harness.base.checks import local_path
from harness.base.config import shown
from harness.base.terminal import printable
from harness.data.rows import FieldsError, find_problem, read_file

SUFFIXES = (".txt", ".md")
MAX_HEADING = 200  # characters of the headings in front of a chunk
# Scripts without spaces between words, as a class of `re`: Thai, Lao, Burmese, Khmer, kana and Han characters.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
# A word, which is never cut: at most 100 characters without a space
_WORD = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]{{1,100}}")
_SENTENCE_END = re.compile("[.!?\u2026\u3002\uff01\uff1f][\"'\u201d\u2019)\\]]*$")  # also Chinese and typographic ones
_MARKDOWN = re.compile(
    r"""^\ {0,3}(`{3,}(?=[^`\n]*$)|~{3,})  .*?  (?:^\ {0,3}\1[`~]*[^\S\n]*$|\Z)       # code, which has no headings
    |   ^\ {0,3}(?P<level>\#{1,6})  (?=\s)(?P<title>[^\n]*)\n?                        # a heading
    |   (?<![^\n]\n)^\ {0,3}(?P<above>[^\s>|*+-][^\n]*)\n  \ {0,3}(?P<line>=+|-+)[^\S\n]*(?:\n|\Z)  # underlined
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)


class Document(NamedTuple):
    """An entry that a search can find: a document, or a chunk of one."""

    id: str
    text: str


def read_corpus(
    path: str, chunk_words: int, chunk_overlap: int, skipped: list[str] | None = None
) -> Iterator[Document]:
    """All chunks of a corpus, always in the same order; entries without text are appended to `skipped`.

    The corpus is a directory, searched with all its subdirectories except hidden ones, or one file of text, or a file
    of rows {"id": ..., "text": ...}, or "contents" instead of "text". A file is cut into chunks with the ids
    path#1, path#2, ...; so is a row of more than `chunk_words` words, and a shorter row keeps its id.
    """
    root, skipped, document = local_path(path, "--corpus"), [] if skipped is None else skipped, None
    if not root.exists():
        raise UserError(f"--corpus {shown(root)}: there is no such file or directory")
    is_rows = root.is_file() and root.suffix.lower() not in SUFFIXES
    try:
        for document in (_read_rows if is_rows else _read_files)(root, chunk_words, chunk_overlap, skipped):
            yield document
    except OSError as error:
        raise UserError(f"{shown(error.filename or root)} cannot be read ({error.strerror})") from error
    if document is None:
        what = "holds no text" if skipped or is_rows else "has no .txt or .md files in it"
        raise UserError(f"--corpus {shown(root)} {what}")


def content_hash(documents: Iterable[Document]) -> str:
    """SHA-256 of the ids and texts in order; other cuts between chunks change it, too."""
    digest = hashlib.sha256()
    for name, text in documents:
        digest.update(f"{len(name)} {len(text)} {name}{text}".encode())
    return digest.hexdigest()


def whole(text: str) -> str:
    """The text without halves of surrogate pairs, which UTF-8 cannot hold.

    >>> whole("half \\ud83d")
    'half ?'
    """
    return text.encode(errors="replace").decode()


def _read_files(root: Path, num_words: int, overlap: int, skipped: list[str]) -> Iterator[Document]:
    for path in [root] if root.is_file() else _find_files(root):
        name = whole(path.name if path == root else path.relative_to(root).as_posix())
        text = _read_text(path)
        parts = sections(text) if path.suffix.lower() == ".md" else [("", text)]
        number = 0
        for headings, body in parts:
            for chunk in [*split(body, num_words, overlap)] or [""]:
                if content := ": ".join(filter(None, [headings, chunk])):
                    number += 1
                    yield Document(f"{name}#{number}", content)
        if number == 0:
            skipped.append(name)


def _find_files(root: Path) -> Iterator[Path]:
    """The text files in a directory and its subdirectories, in order of name; no directory is read twice.

    Files of runs do not count as documents: they would change a corpus in whose directory the runs are.
    """

    def fail(error: OSError) -> None:
        raise error

    known = set()  # directories; a link can lead back to one of them
    for folder, folders, names in os.walk(root, onerror=fail, followlinks=True):
        is_run = {"config.json", "metrics.jsonl"} <= set(names)  # an adapter in it may have a README.md
        is_left_out = is_run or os.path.realpath(folder) in known
        known.add(os.path.realpath(folder))
        folders[:] = [] if is_left_out else sorted(name for name in folders if not name.startswith("."))
        for name in [] if is_left_out else sorted(names):
            if not name.startswith(".") and name.lower().endswith(SUFFIXES):
                yield Path(folder, name)


def _read_text(path: Path) -> str:
    content = path.read_bytes()
    is_utf16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))  # no UTF-8 text begins with these bytes
    try:
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{shown(path)} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_rows(path: Path, num_words: int, overlap: int, skipped: list[str]) -> Iterator[Document]:
    places: dict[str, str] = {}  # by id
    for row in read_file(path):
        if isinstance(row, UserError):
            raise row
        field = "text" if "text" in row or "contents" not in row else "contents"
        if (problem := find_problem(row, {"id": (str, int), field: str})) is not None:
            raise FieldsError(row, f'{problem}: a row is {{"id": "...", "text": "..."}}')
        texts = list(split(row[field], num_words, overlap))
        names = [str(row["id"])] if len(texts) == 1 else [f"{row['id']}#{part}" for part in range(1, len(texts) + 1)]
        for document in map(Document, names, texts):
            if document.id in places:
                raise FieldsError(row, f"the id {printable(document.id, 80)!r} is also the id of {places[document.id]}")
            places[document.id] = row.place
            yield document
        if not texts:
            skipped.append(row.place)


# Chunks ---------------------------------------------------------------------------------------------------------------


def split(text: str, num_words: int, overlap: int) -> Iterator[str]:
    """Chunks of at most `num_words` words; each begins with the last `overlap` words of the previous one.

    A chunk ends with a sentence or a paragraph if such an end is in the second half of its new words.

    >>> list(split("One two. Three four five six seven.", num_words=4, overlap=1))
    ['One two. Three four', 'four five six seven.']
    >>> list(split("One two three. Four five six seven.", num_words=4, overlap=0))
    ['One two three.', 'Four five six seven.']
    """
    words, window = _WORD.finditer(text), []
    while len(window := [*window, *itertools.islice(words, num_words + 1 - len(window))]) > num_words:
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
    """The text with every run of white space replaced by one space, or by one line break if the run contains one."""
    return re.sub(r"\s\s+|[^\S\n ]", lambda space: "\n" if "\n" in space[0] else " ", text)


def sections(text: str) -> Iterator[tuple[str, str]]:
    """The headings above each part of a Markdown text, as "Guide > Install", and the part's text, if there is any.

    >>> list(sections("# Guide\\n## Install\\nRun it.\\n## Use\\n"))
    [('Guide > Install', 'Run it.\\n'), ('Guide > Use', '')]
    """
    start, titles = 0, []  # where the current part begins; level and text of the open headings
    for heading in itertools.chain(_MARKDOWN.finditer(text), [None]):
        begin, end, level, title = len(text), len(text), 0, ""
        if heading is not None:
            if heading["level"]:
                level, title = len(heading["level"]), re.sub(r"(^|\s)#+$", "", heading["title"].strip())
            elif heading["line"]:
                level, title = 1 if heading["line"][0] == "=" else 2, heading["above"]
            else:  # code
                continue
            begin, end = heading.span()
        body = text[start:begin]
        if body.strip() or (titles and level <= titles[-1][0]):
            yield printable(" > ".join(title for _, title in titles if title), MAX_HEADING), body
        start, titles = end, [*(entry for entry in titles if entry[0] < level), (level, title.strip())]
