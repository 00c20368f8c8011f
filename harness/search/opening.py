"""Open the index that the flags name, or build it first; check that questions and documents belong together."""

import os
import sqlite3
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError

from common.errors import UserError
from common.search import Index, supporting

from harness.base.checks import local_path
from harness.base.config import shown
from harness.base.files import flush_to_disk
from harness.base.terminal import printable, say
from harness.processes.processes import agreed
from harness.search.documents import content_hash, read_corpus
from harness.search.search_config import IndexConfig, SearchConfig, build_command, check_search, corpus_of
from harness.search.sqlite_index import SqliteIndex, build_sqlite, check_is_index
from harness.task.task import Task


@agreed
def open_index(config: SearchConfig) -> Index:
    """The index of the documents of `--corpus`; if there is none, one of the processes builds it."""
    check_search(config)
    if config.search_url is not None:
        from harness.search.remote_index import RemoteIndex

        index = RemoteIndex(config.search_url, config.search_seconds)
        index.check()
        say(f"search: the server {index}")
    elif _is_only_an_index(config):
        path = local_path(config.index, "--index")
        index = SqliteIndex(path, config.search_seconds, build_command(config, path))
        say(f"search: {index.num_documents:,} documents or parts of them in the index {shown(path)}")
    else:
        index = _open_for_corpus(config, config.search_seconds)
    return index


def build_index(config: IndexConfig) -> Index:
    """Build the index of the documents of `--corpus`; it replaces an index of other documents."""
    check_search(config)
    return _open_for_corpus(config, seconds=5, replace=True)


def search_sources(config: SearchConfig, index: Index | None) -> dict[str, dict]:
    """The searched documents, for config.json: a run cannot resume with other documents."""
    if index is None or config.search_url is not None:
        return {}
    name, source = ("index", config.index) if _is_only_an_index(config) else ("corpus", corpus_of(config))
    return {name: {"source": source, "content": index.content_hash}}


def check_questions(config: SearchConfig, index: Index | None, task: Task) -> None:
    """Look for the supporting documents that the rows of a task name; refuse the rows if none exists.

    An index without its corpus and a server are not checked: they do not list their documents.
    """
    named = {name for row in task.train_rows + task.eval_rows for name in supporting(row)}
    if not named or index is None or config.search_url is not None or _is_only_an_index(config):
        return
    missing = set(named)
    for document in read_corpus(corpus_of(config), config.chunk_words, config.chunk_overlap):
        missing -= {document.id, document.id.rpartition("#")[0]}
    if not missing:
        return
    what = f"the documents that the questions in {shown(task.sources['data'])} name as supporting"
    where, example = shown(corpus_of(config)), printable(min(missing), 80)
    if missing == named:
        remedy = "give the --questions that belong to --corpus"
        raise UserError(f"none of {what}, such as {example!r}, is in {where}: {remedy}")
    say(f"{len(missing)} of {len(named)} of {what} are not in {where}, such as {example!r}: nothing can find them")


def _is_only_an_index(config: IndexConfig) -> bool:
    return config.index is not None and config.corpus is None


def _open_for_corpus(config: IndexConfig, seconds: float, replace: bool = False) -> Index:
    corpus, skipped, began, is_new = corpus_of(config), [], time.monotonic(), False
    read = partial(read_corpus, corpus, config.chunk_words, config.chunk_overlap)
    content = content_hash(read(skipped))
    if skipped:
        names = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
        say(f"search: no text, and so no document, in {len(skipped):,} places of {shown(corpus)}: {names}")
    path = _index_path(config, corpus, content)
    command = build_command(config, path, corpus)
    if config.encoder is None:
        check, build, reopen = check_is_index, build_sqlite, partial(SqliteIndex, path, seconds, command)
    else:
        from harness.search.dense_index import DenseIndex, build_dense, load_encoder, read_about

        model = load_encoder(config.encoder)
        check, build = read_about, partial(build_dense, encoder=config.encoder, model=model)
        reopen = partial(DenseIndex, path, model, command)

    def is_there() -> bool:
        try:
            return reopen().content_hash == content
        except UserError:
            return False

    if not path.exists() or (replace and not is_there()):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            (lock := path.parent / ".search_index.lock").touch()  # if it cannot be created, FileLock may wait for ever
            with FileLock(lock):
                if not is_there():  # otherwise another process has built it in the meantime
                    if path.exists():
                        check(path)  # never replace another file of the user
                    _replace(path, lambda new: build(new, read(), content))
                    is_new = True
        except (OSError, sqlite3.Error, SafetensorError) as error:
            problem = getattr(error, "strerror", None) or error
            raise UserError(f"the index {shown(path)} cannot be written ({problem})") from error
    index = reopen()
    if index.content_hash != content:
        raise UserError(
            f"the index {shown(path)} was built from other documents than --corpus {shown(corpus)} has now: give "
            f"another --index, or build it anew with {command}"
        )
    how = f" (built in {time.monotonic() - began:.1f} s)" if is_new else ""
    say(f"search: {index.num_documents:,} documents or parts of them in {shown(corpus)}, index {shown(path)}{how}")
    return index


def _replace(path: Path, build: Callable[[Path], None]) -> None:
    """Have a file written, completely or not at all."""
    new = path.with_name(f".{path.name}.partial")
    new.unlink(missing_ok=True)  # from a build that was killed
    try:
        build(new)
        flush_to_disk(new)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def _index_path(config: IndexConfig, corpus: str, content: str) -> Path:
    if config.index is not None:
        return local_path(config.index, "--index")
    encoder = "".join(letter if letter.isalnum() else "-" for letter in config.encoder or "")[-40:]
    kind = "sqlite" if config.encoder is None else f"{encoder}.dense"
    runs = local_path(config.runs_dir, "--runs-dir")
    if resume := getattr(config, "resume", None):  # perhaps from another directory, and --runs-dir is relative
        runs = Path(resume).expanduser().resolve().parents[1]
    return runs / "search_index" / f"{Path(corpus).resolve().stem[:40]}-{content[:12]}.{kind}"
