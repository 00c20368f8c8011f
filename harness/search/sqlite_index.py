"""Search by words: documents in one SQLite file, whose FTS5 extension ranks them by BM25.

The file is written once and never changed. Readers open it as immutable, so that they need no locks and write nothing,
and one that is open stays what it was when another file takes its place.
"""

import hashlib
import itertools
import os
import re
import sqlite3
import threading
import time
import unicodedata
import zlib
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

from common.errors import UserError
from common.search import Hit, SearchError

from harness.base.config import shown
from harness.base.files import flush_to_disk
from harness.base.terminal import printable
from harness.search.documents import UNSPACED, Document, add_to_hash

APPLICATION = 0x524C5458  # in the header of the file; other tables, or other words of a text, need another number
MAX_QUERY = 100_000  # characters of a query that are read
MAX_TERMS = 64  # distinct terms of a query that are searched for, the first ones
# Documents that a query may touch, summed over its terms: the rarest terms are searched for, as far as this reaches.
BUDGET = 20_000
_CHECKSUM_AT = 60  # in the header: the number user_version, which SQLite leaves to us
COMMON = BUDGET // MAX_TERMS  # the number of documents is stored for terms in more than so many; all others may be used
# Letters, digits and marks make words, without accents and capitals; `fold` has put spaces between Han characters.
_SCHEMA = f"""
    PRAGMA journal_mode = OFF;
    PRAGMA synchronous = OFF;
    PRAGMA application_id = {APPLICATION};
    CREATE TABLE info (documents INTEGER, hash TEXT);
    CREATE TABLE documents (number INTEGER PRIMARY KEY, id TEXT, text TEXT);
    CREATE TABLE common (term TEXT PRIMARY KEY, documents INTEGER) WITHOUT ROWID;
    CREATE VIRTUAL TABLE words USING fts5(
        text, content = '', tokenize = "unicode61 remove_diacritics 2 categories 'L* N* M*'"
    );
    INSERT INTO words(words, rank) VALUES ('hashsize', {2**26});
    BEGIN;
"""
_SEARCH = """
    SELECT documents.id, documents.text, -found.rank FROM (
        SELECT rowid, rank FROM words WHERE words MATCH ? AND rowid <= ? ORDER BY rank, rowid LIMIT ?
    ) AS found JOIN documents ON number = found.rowid ORDER BY found.rank, number
"""
_UNSPACED = re.compile(f"[{UNSPACED}]")
_PIECES = re.compile(f"[{UNSPACED}]+|[^ {UNSPACED}]+")


class SqliteIndex:
    """Documents by their words. Equal scores are in the order of the documents, so that every run finds the same.

    Several threads may search; one of them does at a time, for `seconds` at most. `rebuild` is the command that makes
    the index anew, for error messages.
    """

    def __init__(self, path: Path, seconds: float, rebuild: str = ""):
        self.path, self._seconds, self._lock = Path(path), seconds, threading.Lock()
        again = f": build it with {rebuild}" if rebuild else ""
        if not self.path.exists():
            raise UserError(f"there is no index {shown(self.path)}{again}")
        if not is_index(self.path):
            raise UserError(f"{shown(self.path)} is not an index of documents: give another --index")
        try:
            uri = f"{self.path.absolute().as_uri()}?mode=ro&immutable=1"
            self._connection = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)
            if _checksum(self.path) != _stored_checksum(self.path):
                raise ValueError("it is not what was written")
            info = self._connection.execute("SELECT documents, hash FROM info").fetchone()
            self.num_documents, self.content_hash = info
        except (sqlite3.Error, ValueError) as error:
            raise UserError(f"the index {shown(self.path)} is damaged ({error}){again}") from error

    def search(self, query: str, k: int) -> list[Hit]:
        """At most `k` hits, best first; see `common.search.Index`.

        A query is a set of words, of which a document needs one. Nothing in it is an operator.
        """
        end, phrases = time.monotonic() + self._seconds, query_phrases(query)
        if not phrases:
            return []
        try:
            with self._lock:
                self._connection.set_progress_handler(lambda: time.monotonic() > end, 1000)
                chosen, last = self._choose(phrases)
                rows = self._connection.execute(_SEARCH, (" OR ".join(chosen), last, k)).fetchall()
        except sqlite3.Error as error:
            if time.monotonic() > end:
                raise SearchError(f"the search took longer than {self._seconds:g} seconds") from error
            raise SearchError(f"the index cannot be read ({printable(str(error), 100)})") from error
        return [Hit(*row) for row in rows]

    def search_all(self, queries: Sequence[str], k: int) -> list[list[Hit] | SearchError]:
        """What `search` returns or raises for each query."""
        answers: list[list[Hit] | SearchError] = []
        for query in queries:
            try:
                answers.append(self.search(query, k))
            except SearchError as error:
                answers.append(error)
        return answers

    def _choose(self, phrases: dict[str, tuple[str, ...]]) -> tuple[list[str], int]:
        """The phrases to search for, and the number of the last document to look at.

        Rare words say most about what is wanted, and common ones cost most: a word that half of a million documents
        hold would take long. If even the rarest one exceeds the budget, only the first documents are looked at.
        """
        words = {word for words in phrases.values() for word in words}
        select = f"SELECT term, documents FROM common WHERE term IN ({','.join('?' * len(words))})"
        counts = dict(self._connection.execute(select, tuple(words)))
        costs = {phrase: min(counts.get(word, COMMON) for word in words) for phrase, words in phrases.items()}
        chosen, total = [], 0
        for phrase in sorted(phrases, key=costs.__getitem__):  # those that are equally rare in the order of the query
            total += costs[phrase]
            if chosen and total > BUDGET:
                break
            chosen.append(phrase)
        rarest = costs[chosen[0]]
        return chosen, self.num_documents * BUDGET // rarest if rarest > BUDGET else self.num_documents


def is_index(path: Path) -> bool:
    """Whether the header of a file says that it is an index by words."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        header = file.read(72)
    return header.startswith(b"SQLite format 3\0") and header[68:] == APPLICATION.to_bytes(4, "big")


def _checksum(path: Path) -> bytes:
    """CRC-32 of a file, without the number of SQLite's header in which it is kept: flipped bits are found."""
    with path.open("rb") as file:
        checksum = zlib.crc32(file.read(_CHECKSUM_AT))
        file.seek(_CHECKSUM_AT + 4)
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum.to_bytes(4, "big")


def _stored_checksum(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(_CHECKSUM_AT)
        return file.read(4)


def build_sqlite(path: Path, documents: Iterable[Document]) -> str:
    """Write an index, completely or not at all; returns the content hash of the documents."""
    if path.exists() and not is_index(path):
        raise UserError(f"{shown(path)} is not an index of documents, and is not replaced: give another --index")
    partial, digest = path.with_name(f".{path.name}.partial"), hashlib.sha256()
    try:
        partial.unlink(missing_ok=True)  # of a build that was killed
        with closing(sqlite3.connect(partial, isolation_level=None)) as connection:
            connection.executescript(_SCHEMA)
            number = 0
            for number, document in enumerate(documents, start=1):
                add_to_hash(digest, document)
                connection.execute("INSERT INTO documents VALUES (?, ?, ?)", (number, *document))
                connection.execute("INSERT INTO words(rowid, text) VALUES (?, ?)", (number, fold(document.text)))
            connection.execute("INSERT INTO words(words) VALUES ('optimize')")
            connection.execute("CREATE VIRTUAL TABLE temp.vocabulary USING fts5vocab(main, words, row)")
            connection.execute("INSERT INTO common SELECT term, doc FROM vocabulary WHERE doc > ?", (COMMON,))
            connection.execute("INSERT INTO info VALUES (?, ?)", (number, digest.hexdigest()))
            connection.execute("COMMIT")
        checksum = _checksum(partial)
        with partial.open("r+b") as file:
            file.seek(_CHECKSUM_AT)
            file.write(checksum)
        flush_to_disk(partial)
        os.replace(partial, path)
    except (sqlite3.Error, OSError) as error:
        raise UserError(f"the index {shown(path)} cannot be written ({error})") from error
    finally:
        partial.unlink(missing_ok=True)
    return digest.hexdigest()


def query_phrases(query: str) -> dict[str, tuple[str, ...]]:
    """What a query searches for, in the syntax of FTS5, and the words of each: single words, quoted.

    Where there are no spaces, every two neighbouring characters are a phrase.

    >>> query_phrases('Who built "Fardil" AND -Jarce*?')
    {'"who"': ('who',), '"built"': ('built',), '"fardil"': ('fardil',), '"and"': ('and',), '"jarce"': ('jarce',)}
    >>> list(query_phrases("東京都"))
    ['"東 京"', '"京 都"']
    """
    # cut again: NFKC makes up to 18 characters of one
    text = unicodedata.normalize("NFKC", query[:MAX_QUERY])[:MAX_QUERY].lower()
    if text.isascii():
        text = re.sub("[^a-z0-9]", " ", text)
    else:  # letters, digits and marks
        text = "".join(c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in text)
    phrases: dict[str, tuple[str, ...]] = {}
    for piece in _PIECES.finditer(text):
        characters = piece[0]
        is_pairs = len(characters) > 1 and _UNSPACED.match(characters)
        for words in itertools.pairwise(characters) if is_pairs else [(characters,)]:
            phrases[f'"{" ".join(words)}"'] = words
            if len(phrases) == MAX_TERMS:
                return phrases
    return phrases


def fold(text: str) -> str:
    """A text as it is indexed: in one of Unicode's forms of writing it, and with spaces where its script has none."""
    return text if text.isascii() else _UNSPACED.sub(r" \g<0> ", unicodedata.normalize("NFKC", text))
