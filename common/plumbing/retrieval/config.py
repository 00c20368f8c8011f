"""The flags of searching: which documents, and how."""

from dataclasses import dataclass
from typing import ClassVar

from common.plumbing.config import Count, CountOrZero, InputPath, LocalPath, OfSearch, Positive


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """Which documents there are to search, and their index."""

    # documents to search: a directory of .txt and .md files, or JSONL with id and text; None: data/qa_documents.jsonl
    corpus: OfSearch[InputPath | None] = None
    # file of the index, made when it does not exist; without --corpus it is used as it is; None: one for the content of
    # the corpus, in <runs-dir>/search_index
    index: OfSearch[InputPath | None] = None
    # search by meaning with this sentence-transformers model, a hub id or a directory; None: by words (BM25)
    encoder: OfSearch[InputPath | None] = None
    chunk_words: OfSearch[Count] = 100  # longer documents are cut into chunks of at most this many words
    chunk_overlap: OfSearch[CountOrZero] = 20  # words at the end of a chunk with which the next one begins
    # where runs are kept: <runs-dir>/<experiment>/<name>/, and indexes: <runs-dir>/search_index/
    runs_dir: LocalPath = "runs"


@dataclass(frozen=True, kw_only=True)
class SearchConfig(IndexConfig):
    """What a program that searches needs, in an experiment next to `RunConfig`."""

    ALIASES: ClassVar = {"data": ["--questions"], "eval_data": ["--eval-questions"]}  # other names of flags

    top_k: OfSearch[Count] = 2  # documents that a search gives the policy
    # ask a server that speaks Search-R1's protocol, such as http://127.0.0.1:8000, instead of an index on this machine;
    # a password for it is read from ~/.netrc
    search_url: OfSearch[str | None] = None
    search_seconds: OfSearch[Positive] = 5.0  # time limit of a search; the policy reads an error instead of its result
