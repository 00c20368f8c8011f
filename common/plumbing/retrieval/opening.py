"""Open the index that the flags name, or make it first."""

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from filelock import FileLock, Timeout

from common.errors import UserError
from common.search import Index

from common.plumbing.checks import check_ranges, flag, local_path
from common.plumbing.config import ROOT, shown
from common.plumbing.ranks import together
from common.plumbing.retrieval.config import IndexConfig, SearchConfig
from common.plumbing.retrieval.documents import Document, content_hash, read_corpus
from common.plumbing.retrieval.sqlite_index import SqliteIndex, build_sqlite
from common.plumbing.terminal import say

BUNDLED_CORPUS = ROOT / "data" / "qa_documents.jsonl"


@together()
def open_index(config: SearchConfig) -> Index:
    """The index of the documents of `--corpus`, which is made if there is none; of several processes one makes it.

    Raises:
        UserError: flags contradict each other, a document cannot be read, or the index is of other documents.
    """
    check_search(config)
    if config.search_url is not None:
        from common.plumbing.retrieval.remote_index import RemoteIndex

        index = RemoteIndex(config.search_url, config.search_seconds)
        index.check()
        say(f"search: the server {index}")
        return index
    if config.index is not None and config.corpus is None:
        index = SqliteIndex(local_path(config.index, "--index"), config.search_seconds, build_command(config))
        say(f"search: {index.num_documents:,} documents in the index {shown(index.path)}")
        return index
    return _open_for_corpus(config, config.search_seconds)[0]


def build_index(config: IndexConfig) -> tuple[Index, Path]:
    """The index of the documents of `--corpus`, and its file; one of other documents is replaced.

    Raises:
        UserError: flags contradict each other, a document cannot be read, or the index cannot be written.
    """
    check_index(config)
    return _open_for_corpus(config, seconds=5, replace=True)


def search_sources(config: SearchConfig, index: Index | None) -> dict[str, dict]:
    """What a run searches, for config.json: a resumed run is refused when its documents are others.

    A server cannot tell what its documents are.
    """
    if index is None or config.search_url is not None:
        return {}
    name, source = ("index", config.index) if config.corpus is None and config.index else ("corpus", corpus_of(config))
    return {name: {"source": source, "content": index.content_hash}}


def check_search(config: SearchConfig) -> None:
    """
    Raises:
        UserError: a number is out of range, or flags contradict each other.
    """
    check_index(config)
    if config.search_url is not None:
        for name in ("corpus", "index", "encoder"):
            if getattr(config, name) is not None:
                raise UserError(f"--search-url searches the documents of a server: omit it, or {flag(name)}")
    if config.encoder is not None and config.index is not None and config.corpus is None:
        raise UserError("--index with --encoder needs --corpus, too: an index by meaning is opened for its documents")


def check_index(config: IndexConfig) -> None:
    """
    Raises:
        UserError: a number is out of range, or the chunks would not end.
    """
    check_ranges(config)
    if config.chunk_overlap >= config.chunk_words:
        raise UserError(
            f"--chunk-overlap {config.chunk_overlap} leaves no new words in a chunk: it must be below --chunk-words "
            f"{config.chunk_words}"
        )


def build_command(config: IndexConfig, path: Path | None = None, corpus: str | None = None) -> str:
    """What one types to build an index anew."""
    words = ["python", "experiment_multiturn_qa/build_index.py"]
    words += ["--corpus", corpus or "CORPUS", "--index", str(path or config.index)]
    words += ["--encoder", config.encoder] if config.encoder is not None else []
    for name in ("chunk_words", "chunk_overlap"):
        if (value := getattr(config, name)) != getattr(IndexConfig, name):
            words += [flag(name), str(value)]
    return shlex.join(words)


def corpus_of(config: IndexConfig) -> str:
    return config.corpus if config.corpus is not None else str(BUNDLED_CORPUS)


def _open_for_corpus(config: IndexConfig, seconds: float, replace: bool = False) -> tuple[Index, Path]:
    corpus, skipped = corpus_of(config), []

    def documents(skipped: list[str] | None = None) -> Iterator[Document]:
        return read_corpus(corpus, config.chunk_words, config.chunk_overlap, skipped)

    content = content_hash(documents(skipped))
    if skipped:
        names = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
        say(f"search: {shown(corpus)} has no text, and so no document, in {len(skipped):,} places: {names}")
    path, is_new, began = _index_path(config, corpus, content), False, time.monotonic()
    command = build_command(config, path, corpus)
    if config.encoder is not None:
        from common.plumbing.retrieval.dense_index import open_dense

        is_new = not path.exists()
        with _one_builds(path) if is_new else nullcontext():
            rebuild = f"rm {shlex.quote(str(path))} && {command}"
            index = open_dense(path, documents, content, config.encoder, seconds, rebuild)
    else:
        if not path.exists() or (replace and not _holds(path, content)):
            with _one_builds(path):
                if not _holds(path, content):  # else another process has made it in the meantime
                    is_new = True
                    if build_sqlite(path, documents(), corpus) != content:
                        raise UserError(f"--corpus {shown(corpus)} changed while it was read: start again")
        index = SqliteIndex(path, seconds, command)
        if index.content_hash != content:
            raise UserError(
                f"the index {shown(path)} was built from other documents ({index.num_documents:,} of "
                f"{shown(index.corpus)}, content {index.content_hash[:12]}) than --corpus {shown(corpus)} has now "
                f"(content {content[:12]}): give another --index, or build it anew with {command}"
            )
    how = f" (built in {time.monotonic() - began:.1f} s)" if is_new else ""
    say(f"search: {index.num_documents:,} documents in {shown(corpus)}, index {shown(path)}{how}")
    return index, path


def _holds(path: Path, content: str) -> bool:
    """Whether there is an index of these documents."""
    try:
        return SqliteIndex(path, seconds=1).content_hash == content
    except UserError:
        return False


def _index_path(config: IndexConfig, corpus: str, content: str) -> Path:
    """
    Raises:
        UserError: there can be no such file.
    """
    if config.index is not None:
        return local_path(config.index, "--index")
    encoder = "".join(letter if letter.isalnum() else "-" for letter in config.encoder or "")[-40:]
    kind = "sqlite" if config.encoder is None else f"{encoder}.dense"
    name = f"{Path(corpus).resolve().stem[:40]}-{content[:12]}.{kind}"
    if resume := getattr(config, "resume", None):  # perhaps from another directory, to which --runs-dir is relative
        kept = Path(resume).expanduser().resolve().parents[1] / "search_index"
        if kept.is_dir():
            return kept / name
    return local_path(config.runs_dir, "--runs-dir") / "search_index" / name


@contextmanager
def _one_builds(path: Path) -> Iterator[None]:
    """Let one process at a time build an index in a directory, which is made.

    Raises:
        UserError: the directory cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.parent / ".search_index.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            say(f"search: another process builds an index in {shown(path.parent)}; waiting for it")
            lock.acquire()
    except OSError as error:
        raise UserError(f"the index {shown(path)} cannot be written ({error.strerror})") from error
    try:
        yield
    finally:
        lock.release()
