"""Search by words: documents in one SQLite file, whose FTS5 extension ranks them by BM25.

The file is written once and never changed. Readers open it as immutable, so that they need no locks and write nothing,
and one that is open stays what it was when another file takes its place.
"""

import hashlib
import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from common.errors import UserError
from common.search import Hit, SearchError

from common.plumbing.config import shown
from common.plumbing.files import flush_to_disk
from common.plumbing.retrieval.documents import Document, add_to_hash
from common.plumbing.retrieval.sqlite_header import APPLICATION, VERSION, again, check_file, is_index
from common.plumbing.retrieval.words import MAX_TERMS, fold, query_phrases
from common.plumbing.terminal import printable

PARTIAL = ".partial_index"  # ending of a file that is being written
# Documents that a query may touch, summed over its terms: the rarest terms are searched for, as far as this reaches.
# With a million invented documents, no query was measured to take more than 0.1 s.
BUDGET = 20_000
COMMON = BUDGET // MAX_TERMS  # the number of documents is stored for terms in more than so many; all others may be used
# Letters, digits and marks make words, without accents and capitals; `fold` has put spaces between Han characters.
_SCHEMA = f"""
    PRAGMA journal_mode = OFF;
    PRAGMA synchronous = OFF;
    PRAGMA application_id = {APPLICATION};
    PRAGMA user_version = {VERSION};
    CREATE TABLE info (documents INTEGER, hash TEXT, corpus TEXT);
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


class SqliteIndex:
    """Documents by their words. Equal scores are in the order of the documents, so that every run finds the same."""

    def __init__(self, path: Path, seconds: float, rebuild: str = ""):
        """
        Args:
            seconds: time limit of a query.
            rebuild: the command that makes the index anew, for error messages.

        Raises:
            UserError: there is no index, or it cannot be used.
        """
        self.path, self._seconds = Path(path), seconds
        self._idle: dict[int, list[sqlite3.Connection]] = defaultdict(list)  # by process: none survives a fork
        check_file(self.path, rebuild)
        try:
            self._idle[os.getpid()].append(_connect(self.path))
            self.num_documents, self.content_hash, self.corpus = _read_info(self._idle[os.getpid()][0])
        except (sqlite3.Error, TypeError, ValueError) as error:  # the others: of no row, and of what is not UTF-8
            raise UserError(f"the index {shown(self.path)} is damaged ({error}){again(rebuild)}") from error

    def search(self, query: str, k: int) -> list[Hit]:
        """At most `k` hits, best first; see `common.search.Index`.

        A query is a set of words, of which a document needs one. Nothing in it is an operator.
        """
        with self._connection() as connection:
            phrases, last = self._choose(connection, query_phrases(query))
            if not phrases:
                return []
            rows = connection.execute(_SEARCH, (" OR ".join(phrases), last, k)).fetchall()
            if any([type(value) for value in row] != [str, str, float] for row in rows):
                raise sqlite3.DatabaseError("damaged rows")
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

    def _choose(self, connection: sqlite3.Connection, phrases: dict[str, tuple[str, ...]]) -> tuple[list[str], int]:
        """The phrases to search for, and the number of the last document to look at.

        Rare words say most about what is wanted, and common ones cost most: a word that half of a million documents
        hold would take a second. If even the rarest one exceeds the budget, only the first documents are looked at.
        """
        words = {word for words in phrases.values() for word in words}
        marks = ",".join("?" * len(words))
        counts = dict(connection.execute(f"SELECT term, documents FROM common WHERE term IN ({marks})", tuple(words)))
        costs = {phrase: min(counts.get(word, COMMON) for word in words) for phrase, words in phrases.items()}
        chosen, total = [], 0
        for phrase in sorted(phrases, key=costs.__getitem__):  # those that are equally rare in the order of the query
            total += costs[phrase]
            if chosen and total > BUDGET:
                break
            chosen.append(phrase)
        is_too_common = bool(chosen) and costs[chosen[0]] > BUDGET
        return chosen, self.num_documents * BUDGET // costs[chosen[0]] if is_too_common else self.num_documents

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A connection that no other thread or process uses, and that gives up when the time is over.

        Raises:
            SearchError: the time is over, or the file cannot be read.
        """
        idle, end, raised = self._idle[os.getpid()], time.monotonic() + self._seconds, []

        def is_over() -> bool:
            try:
                return time.monotonic() > end
            except BaseException as error:  # Ctrl-C: what leaves this function is lost
                raised.append(error)
                return True

        try:
            connection = idle.pop() if idle else self._reconnect()
            connection.set_progress_handler(is_over, 1000)
            yield connection
            idle.append(connection)
        except (sqlite3.Error, ValueError) as error:  # the second: of text that is not UTF-8
            if raised:
                raise raised[0] from None
            if time.monotonic() > end:
                raise SearchError(f"the search took longer than {self._seconds:g} seconds") from error
            raise SearchError(f"the index cannot be read ({printable(str(error), 100)})") from error

    def _reconnect(self) -> sqlite3.Connection:
        """
        Raises:
            SearchError: there is another index now, whose answers do not go together with those before.
        """
        connection = _connect(self.path)
        if _read_info(connection)[1] != self.content_hash:
            connection.close()
            raise SearchError("the index was replaced by one of other documents")
        return connection


def build_sqlite(path: Path, documents: Iterable[Document], corpus: str = "") -> str:
    """Write an index, completely or not at all. The caller holds a lock, see `opening`.

    Args:
        corpus: what the documents were read from, for error messages.

    Returns:
        the content hash of the documents.

    Raises:
        UserError: it cannot be written, or would replace a file that is no index.
    """
    if path.exists() and not is_index(path):
        raise UserError(f"{shown(path)} is not an index of documents, and is not replaced: give another --index")
    partial, digest = path.with_name(f".{path.name}{PARTIAL}"), hashlib.sha256()
    for stale in path.parent.glob(f".*{PARTIAL}"):  # of builds that were killed
        stale.unlink(missing_ok=True)
    try:
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
            connection.execute("INSERT INTO info VALUES (?, ?, ?)", (number, digest.hexdigest(), corpus))
            connection.execute("COMMIT")
        flush_to_disk(partial)
        os.replace(partial, path)
        flush_to_disk(path.parent)
    except (sqlite3.Error, OSError) as error:
        raise UserError(f"the index {shown(path)} cannot be written ({error})") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return digest.hexdigest()


def _connect(path: Path) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
    return sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)


def _read_info(connection: sqlite3.Connection) -> tuple[int, str, str]:
    """Number of documents, content hash, and corpus."""
    number, content, corpus = connection.execute("SELECT documents, hash, corpus FROM info").fetchone()
    return number, content, corpus
