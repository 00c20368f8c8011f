"""Search by words: documents in one SQLite file, which its FTS5 extension ranks by BM25.

The file is written once and never changed. Readers open it as immutable, so that they need no locks and write nothing.
A reader keeps its file when another one takes the file's place.
"""

import itertools
import re
import sqlite3
import threading
import time
import unicodedata
import zlib
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.search import Hit, SearchError

from harness.base.config import shown
from harness.base.terminal import printable
from harness.search.documents import UNSPACED, Document

APPLICATION = 0x524C5458  # in the file's header; other tables or another way to cut words need another number
MAX_QUERY = 100_000  # characters of a query that are read; the rest is ignored
MAX_TERMS = 64  # distinct terms of a query that are searched for, the first ones
# Documents that a query may touch, summed over its terms: the search uses the rarest terms until this is spent.
BUDGET = 20_000
CHECKSUM = slice(60, 64)  # in the header: the field user_version, which SQLite reserves for applications
COMMON = BUDGET // MAX_TERMS  # only terms in more documents than this have a stored count; all other terms are used
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
    """Documents by their words. Equal scores keep the order of the documents, so that every run finds the same.

    Several threads may call it; one at a time searches, for at most `seconds`. `rebuild` is the command that rebuilds
    the index, for error messages.
    """

    def __init__(self, path: Path, seconds: float, rebuild: str):
        self.path, self._seconds, self._lock = path, seconds, threading.Lock()
        if not path.exists():
            raise UserError(f"there is no index {shown(path)}: build it with {rebuild}")
        check_is_index(path)
        try:
            uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
            self._connection = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)
            content = np.memmap(path, mode="r")
            if _checksum(content) != content[CHECKSUM].tobytes():
                raise ValueError("its content has changed")
            info = self._connection.execute("SELECT documents, hash FROM info").fetchone()
            self.num_documents, self.content_hash = info
        except (sqlite3.Error, ValueError) as error:
            raise UserError(f"the index {shown(path)} is damaged ({error}): build it with {rebuild}") from error

    def search_all(self, queries: Sequence[str], k: int) -> list[list[Hit] | SearchError]:
        """At most `k` hits for each query, a set of words; one matching word is enough, and nothing is an operator."""
        return [self._search(query_phrases(query), k) for query in queries]

    def _search(self, phrases: dict[str, tuple[str, ...]], k: int) -> list[Hit] | SearchError:
        if not phrases:
            return []
        end = time.monotonic() + self._seconds
        try:
            with self._lock:
                self._connection.set_progress_handler(lambda: time.monotonic() > end, 1000)
                chosen, last = self._choose(phrases)
                rows = self._connection.execute(_SEARCH, (" OR ".join(chosen), last, k)).fetchall()
        except sqlite3.Error as error:
            if time.monotonic() > end:
                return SearchError(f"the search took longer than {self._seconds:g} seconds")
            return SearchError(f"the index cannot be read ({printable(str(error), 100)})")
        return [Hit(*row) for row in rows]

    def _choose(self, phrases: dict[str, tuple[str, ...]]) -> tuple[list[str], int]:
        """The phrases to search for, and the number of the last document to consider.

        Rare words are the most specific, and common ones cost most: a word in half of a million documents would take
        long. If even the rarest word exceeds the budget, only the first documents are searched.
        """
        words = {word for words in phrases.values() for word in words}
        select = f"SELECT term, documents FROM common WHERE term IN ({','.join('?' * len(words))})"
        counts = dict(self._connection.execute(select, tuple(words)))
        costs = {phrase: min(counts.get(word, COMMON) for word in words) for phrase, words in phrases.items()}
        ranked = sorted(phrases, key=costs.__getitem__)  # equally rare ones keep the order of the query
        totals = itertools.accumulate(costs[phrase] for phrase in ranked)
        rarest = costs[ranked[0]]
        last = self.num_documents * BUDGET // rarest if rarest > BUDGET else self.num_documents
        return [phrase for phrase, total in zip(ranked, totals, strict=True) if total <= max(BUDGET, rarest)], last


def check_is_index(path: Path) -> None:
    """Raise a UserError unless the header of a file says that it is an index by words."""
    header = b""
    if path.is_file():
        with path.open("rb") as file:
            header = file.read(72)
    if not header.startswith(b"SQLite format 3\0") or header[68:] != APPLICATION.to_bytes(4, "big"):
        raise UserError(f"{shown(path)} is not an index of documents: give another --index")


def _checksum(content: np.memmap) -> bytes:
    """CRC-32 of a file, except the checksum's own field in SQLite's header; detects flipped bits."""
    return zlib.crc32(content[CHECKSUM.stop :], zlib.crc32(content[: CHECKSUM.start])).to_bytes(4, "big")


def build_sqlite(path: Path, documents: Iterable[Document], content: str) -> None:
    """Write the index of documents with the hash `content`."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript(_SCHEMA)
        number = 0
        for number, document in enumerate(documents, start=1):
            connection.execute("INSERT INTO documents VALUES (?, ?, ?)", (number, *document))
            connection.execute("INSERT INTO words(rowid, text) VALUES (?, ?)", (number, fold(document.text)))
        connection.execute("INSERT INTO words(words) VALUES ('optimize')")
        connection.execute("CREATE VIRTUAL TABLE temp.vocabulary USING fts5vocab(main, words, row)")
        connection.execute("INSERT INTO common SELECT term, doc FROM vocabulary WHERE doc > ?", (COMMON,))
        connection.execute("INSERT INTO info VALUES (?, ?)", (number, content))
        connection.execute("COMMIT")
    file = np.memmap(path, mode="r+")
    file[CHECKSUM] = list(_checksum(file))
    file.flush()


def query_phrases(query: str) -> dict[str, tuple[str, ...]]:
    """The terms of a query in FTS5 syntax, each with its words: single words, quoted.

    In text without spaces, every two neighbouring characters form a phrase.

    >>> query_phrases('Who built "Fardil" AND -Jarce*?')
    {'"who"': ('who',), '"built"': ('built',), '"fardil"': ('fardil',), '"and"': ('and',), '"jarce"': ('jarce',)}
    >>> list(query_phrases("東京都"))
    ['"東 京"', '"京 都"']
    """
    # cut again: NFKC can expand one character to 18
    text = unicodedata.normalize("NFKC", query[:MAX_QUERY])[:MAX_QUERY].lower()
    # letters, digits and marks
    text = "".join(c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in text)
    phrases: dict[str, tuple[str, ...]] = {}
    for piece in _PIECES.findall(text):
        is_unspaced = len(piece) > 1 and _UNSPACED.match(piece)
        for words in itertools.pairwise(piece) if is_unspaced else [(piece,)]:
            phrases[f'"{" ".join(words)}"'] = words
            if len(phrases) == MAX_TERMS:
                return phrases
    return phrases


def fold(text: str) -> str:
    """A text as the index stores it: in one Unicode normal form, with spaces where its script has none."""
    return text if text.isascii() else _UNSPACED.sub(r" \g<0> ", unicodedata.normalize("NFKC", text))
