"""The flags that say which documents are searched, and how."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from common.errors import UserError

from harness.base.checks import check_ranges, flag
from harness.base.config import ROOT, Count, CountOrZero, InputPath, LocalPath, OfSearch, Positive


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """The documents to search, and their index."""

    # documents to search: a directory of .txt and .md files, or rows with id and text; None: data/qa_documents.jsonl
    corpus: OfSearch[InputPath | None] = None
    # file of the index, made when it does not exist; without --corpus it is used as it is; None: one for the content of
    # the corpus, in <runs-dir>/search_index
    index: OfSearch[InputPath | None] = None
    # search by meaning with this sentence-transformers model, a hub id or a directory; None: by words (BM25)
    encoder: OfSearch[InputPath | None] = None
    chunk_words: OfSearch[Count] = 100  # longer documents are cut into chunks of at most this many words
    chunk_overlap: OfSearch[CountOrZero] = 20  # words at the end of a chunk that the next chunk repeats
    # directory of all runs, <runs-dir>/<experiment>/<name>/, and of indexes, <runs-dir>/search_index/
    runs_dir: LocalPath = "runs"


@dataclass(frozen=True, kw_only=True)
class SearchConfig(IndexConfig):
    """The settings of a program that searches; in an experiment, together with `RunConfig`."""

    ALIASES: ClassVar = {"data": ["--questions"], "eval_data": ["--eval-questions"]}  # other names of flags

    top_k: OfSearch[Count] = 2  # documents that a search gives the policy
    # ask a server that speaks Search-R1's protocol, such as http://127.0.0.1:8000, instead of an index on this machine;
    # a password for it is read from ~/.netrc
    search_url: OfSearch[str | None] = None
    # time limit of a search, except by meaning; when it is over, the policy reads an error instead of results
    search_seconds: OfSearch[Positive] = 5.0


def corpus_of(config: IndexConfig) -> str:
    return config.corpus if config.corpus is not None else str(ROOT / "data" / "qa_documents.jsonl")


def build_command(config: IndexConfig, path: Path, corpus: str = "CORPUS") -> str:
    """The command that rebuilds an index."""
    words = ["python", "experiment_multiturn_qa/build_index.py", "--corpus", corpus, "--index", str(path)]
    for name in ("encoder", "chunk_words", "chunk_overlap"):
        if (value := getattr(config, name)) != getattr(IndexConfig, name):
            words += [flag(name), str(value)]
    return shlex.join(words)


def check_search(config: IndexConfig) -> None:
    check_ranges(config)
    if config.chunk_overlap >= config.chunk_words:
        overlap, words = config.chunk_overlap, config.chunk_words
        raise UserError(f"--chunk-overlap {overlap} leaves no new words: it must be below --chunk-words {words}")
    if not isinstance(config, SearchConfig):
        return
    for name in ("corpus", "index", "encoder"):
        if config.search_url is not None and getattr(config, name) is not None:
            raise UserError(f"--search-url searches the documents of a server: omit it, or {flag(name)}")
    if config.encoder is not None and config.index is not None and config.corpus is None:
        raise UserError("--index with --encoder needs --corpus, too: an index by meaning is opened for its documents")
