"""Search by words: its results for any query, from several threads, while the file is replaced.

The flags of a search: which index is opened, when it is built, and what is refused.
"""

import math
import multiprocessing
import os
import random
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_files import write_rows

from common.errors import UserError
from common.search import Hit, SearchError

from harness.base.config import RunConfig
from harness.cli.parse import with_absolute_paths
from harness.search import opening, sqlite_index
from harness.search.documents import Document
from harness.search.opening import build_index, check_questions, open_index, search_sources
from harness.search.search_config import IndexConfig, SearchConfig
from harness.search.sqlite_index import SqliteIndex, build_sqlite, query_phrases

SECONDS = 60  # longer than a search takes on the busiest machine
TEXTS = {
    "Fardil": "The ship Fardil was built in Tinhur in 1846. Jarce built Fardil.",
    "Jarce": "Jarce was born in Waplem in 1734. The father of Jarce was Mabto.",
    "Waplem": "The town Waplem is near Tinhur. Mabto built Waplem in 1211.",
    "Café": "Le café Zoë, à Besançon; ЁЛКА and STRASSE.",
    "東京": "東京都は日本の首都です。",
    "京都": "京都市は古い都です。",
    "ไทย": "กรุงเทพมหานครเป็นเมืองหลวง",
    "कि": "किताब पढ़ना",
    "a\0b": "before\0behind",
}
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def make(path: Path, documents, seconds: float = SECONDS) -> SqliteIndex:
    build_sqlite(path, (Document(*document) for document in documents), "a hash")
    return SqliteIndex(path, seconds, "make it")


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> SqliteIndex:
    return make(tmp_path_factory.mktemp("index") / "an index?#%.sqlite", TEXTS.items())  # a URI has to quote the name


def found(index: SqliteIndex, query: str, k: int = 3) -> list[Hit]:
    [hits] = index.search_all([query], k)
    return hits


def names(index: SqliteIndex, query: str) -> list[str]:
    return [hit.document for hit in found(index, query)]


def random_documents(num_documents: int, seed: int = 0) -> list[tuple[str, str]]:
    """Texts of words of very different frequency."""
    rng = random.Random(seed)
    texts = [
        " ".join(f"w{int(rng.paretovariate(0.6))}" for _ in range(rng.randint(3, 30))) for _ in range(num_documents)
    ]
    return [(str(number), text) for number, text in enumerate(texts)]


def test_scores_are_those_of_bm25(tmp_path):
    """The formula of Robertson et al. with k1 = 1.2 and b = 0.75, in a slow loop over all documents."""
    documents = random_documents(200)
    index, tokens = make(tmp_path / "x", documents), [text.split() for _, text in documents]
    mean_length = sum(map(len, tokens)) / len(tokens)
    for query in ("w1", "w7 w2 w40", "w1 w2 w3 w5 w5 nowhere w90", "w12345678"):
        scores = {}
        for word in dict.fromkeys(query.split()):
            num_with = sum(word in text for text in tokens)
            idf = max(math.log((len(tokens) - num_with + 0.5) / (num_with + 0.5)), 1e-6)
            for number, text in enumerate(tokens):
                if count := text.count(word):
                    part = count * 2.2 / (count + 1.2 * (0.25 + 0.75 * len(text) / mean_length))
                    scores[str(number)] = scores.get(str(number), 0) + idf * part
        hits = found(index, query, 300)
        assert {hit.document: hit.score for hit in hits} == pytest.approx(scores)
        assert hits == sorted(hits, key=lambda hit: (-hit.score, int(hit.document)))
        assert found(index, query, 5) == hits[:5]


@pytest.mark.parametrize(("query", "first"), [
    ("When was the ship Fardil built?", ["Fardil"]), ("fardil*", ["Fardil"]), ("Mabto -Waplem", ["Waplem"]),
    ("text:Jarce", ["Jarce"]), ("NEAR(zoe besancon, 2)", ["Café", "Waplem"]), ("cafe\u0301", ["Café"]),
    ("\uff3a\uff2f\uff25", ["Café"]), ("ёлка", ["Café"]), ("東京", ["東京"]), ("古い都", ["京都"]),
    ("किताब", ["कि"]), ("behind", ["a\0b"]), ("Fardil\0 Jarce\udcff", ["Fardil"]), ("nothing of this", ["Jarce"]),
    ("", []), ("* - : ^ ( ) { } + , .", []), ("\0", []),
])  # fmt: skip
def test_any_text_is_a_query(index, query, first):
    assert names(index, query)[: len(first) or None] == first


@pytest.mark.slow
def test_thousands_of_hostile_queries_are_answered(tmp_path, hostile_queries):
    """None fails, although each may take a second at most."""
    answers = make(tmp_path / "x", TEXTS.items(), seconds=1).search_all(list(hostile_queries(3_000)), 2)
    for hits in answers:
        assert len(hits) <= 2
        assert all(TEXTS[hit.document] == hit.text and math.isfinite(hit.score) for hit in hits)
    assert sum(map(bool, answers)) > 300


def test_the_number_of_terms_is_bounded():
    assert list(query_phrases(" ".join(map(str, range(100_000))))) == [f'"{number}"' for number in range(64)]
    assert len(query_phrases("東" * 100_000)) == 1
    assert list(query_phrases("x " * 50_000 + "y")) == ['"x"']


def test_common_words_count_only_as_far_as_they_are_affordable(tmp_path, monkeypatch):
    """3,000 documents: "the" is in all, "half" in every second one, "rare" in some, "one" in the last one."""
    texts = ["the " + "half " * (n % 2) + "rare " * (n % 97 == 0) + "one " * (n == 2999) for n in range(3000)]
    index = make(tmp_path / "x", ((str(n), text) for n, text in enumerate(texts)))
    everything = found(index, "the half rare one", 3000)
    assert len(everything) == 3000
    monkeypatch.setattr(sqlite_index, "BUDGET", 2400)
    assert len(found(index, "the half rare one", 3000)) == 1500 + 16
    assert found(index, "the half rare one")[0].document == everything[0].document == "2999"
    assert found(index, "the rare", 200) == found(index, "rare", 200)
    assert 1500 < len(found(index, "the", 3000)) <= 2400  # the query contains nothing else


def test_a_search_that_takes_too_long_is_an_error(tmp_path):
    slow, answer = make(tmp_path / "x", random_documents(2000), seconds=1e-6).search_all(["w1 w2", ""], 2)
    assert isinstance(slow, SearchError)
    assert str(slow) == "the search took longer than 1e-06 seconds"
    assert answer == []


def test_threads_find_the_same(tmp_path):
    index = make(tmp_path / "x", random_documents(200))
    queries = [text for _, text in random_documents(40, seed=1)]
    expected = index.search_all(queries, 5)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda query: found(index, query, 5), queries * 3)) == expected * 3


@pytest.mark.parametrize(("damage", "said"), [
    (lambda content: b"", "is not an index of documents"), (lambda content: b"text", "is not an index of documents"),
    (lambda content: content[:68] + bytes(4) + content[72:], "is not an index of documents"),
    (lambda content: content[:90], "is damaged .*: build it with make it"),
    (lambda content: content[:5000], "is damaged .*: build it with make it"),
    (lambda content: content[:-9] + b"!" + content[-8:], "is damaged .*: build it with make it"),
])  # fmt: skip
def test_what_is_not_an_index_is_refused(tmp_path, index, damage, said):
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(damage(index.path.read_bytes()))
    with pytest.raises(UserError, match=rf"copy\.sqlite {said}"):
        SqliteIndex(copy, SECONDS, "make it")


# Opening an index -----------------------------------------------------------------------------------------------------

SCRIPT = "experiment_multiturn_qa/build_index.py"
DOCS = "my docs.jsonl"


@dataclass(frozen=True, kw_only=True)
class Config(SearchConfig, RunConfig):
    """As in an experiment."""


@pytest.fixture
def in_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


pytestmark = pytest.mark.usefixtures("in_directory")


def write_corpus(*texts: str) -> None:
    write_rows(DOCS, [{"id": f"d{n}", "text": text} for n, text in enumerate(texts)])


def opened(**flags) -> SqliteIndex:
    return open_index(SearchConfig(**{"search_seconds": SECONDS} | flags))


def indexes() -> list[Path]:
    return sorted(Path("runs/search_index").glob("[!.]*"))


def test_the_bundled_documents_are_indexed_once(capsys):
    index = opened()
    (path,) = indexes()
    assert path.name == f"qa_documents-{index.content_hash[:12]}.sqlite"
    assert "2,000 documents" in (output := capsys.readouterr().out)
    assert "(built in" in output
    path.chmod(0o444)
    before = path.stat().st_mtime_ns, path.stat().st_ino
    again = opened()
    assert found(again, "Cerhur") == found(index, "Cerhur") != []
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before
    assert "built" not in capsys.readouterr().out
    assert sorted(file.name for file in path.parent.iterdir() if file != path) in ([], [".search_index.lock"])


def test_a_corpus_that_changes_gets_another_index(capsys):
    write_corpus("one", "", "two")
    first = opened(corpus=DOCS)
    assert f"no text, and so no document, in 1 places of {DOCS}: {DOCS}:2" in capsys.readouterr().out
    write_corpus("one", "two", "three " * 30)
    second, third = opened(corpus=DOCS), opened(corpus=DOCS, chunk_words=10, chunk_overlap=0)
    assert len({first.content_hash, second.content_hash, third.content_hash}) == len(indexes()) == 3
    assert [len(found(index, "three", 9)) for index in (first, second, third)] == [0, 1, 3]


def test_an_index_of_other_documents_is_refused_until_rebuilt(load_script):
    """A process that has opened the old one keeps it."""
    write_corpus("one", "two")
    flags = {"corpus": DOCS, "index": "my index", "chunk_words": 50}
    old = opened(**flags)
    write_corpus(*["one", "three"] * 80)
    with pytest.raises(UserError, match=rf"my index was built from other documents than --corpus {DOCS}") as error:
        opened(**flags)
    program, script, *arguments = shlex.split(str(error.value).partition("build it anew with ")[2])
    assert (program, script) == ("python", SCRIPT)
    assert arguments == ["--corpus", DOCS, "--index", "my index", "--chunk-words", "50"]
    load_script(SCRIPT).main(arguments)
    assert len(found(opened(**flags), "three", 100)) == 80
    assert names(old, "two") == ["d1"]


def read_and(end, corpus: tuple[str, ...]):
    """The documents, but `end` is called instead of the last one."""

    def read(*_):
        yield from (Document(str(number), text) for number, text in enumerate(corpus))
        end()

    return read


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError])
def test_a_build_that_ends_early_leaves_the_old_index(monkeypatch, error):
    def fail():
        raise error

    write_corpus("one")
    config = IndexConfig(corpus=DOCS, index="x")
    build_index(config)
    monkeypatch.setattr(opening, "content_hash", lambda _: "of other documents")
    monkeypatch.setattr(opening, "read_corpus", read_and(fail, ("two",)))
    with pytest.raises(error):
        build_index(config)
    assert names(opened(index="x"), "one") == ["d0"]
    assert not Path(".x.partial").exists()


def test_documents_that_questions_name_are_looked_for(capsys):
    """In training and held-out rows; a document that was cut counts. Servers list no documents and are not checked."""
    write_corpus("one", "two " * 30)
    config = SearchConfig(corpus=DOCS, chunk_words=10, chunk_overlap=0)

    def check(training: str, held_out: str, config: SearchConfig = config) -> str:
        rows = {"train_rows": [{"supporting": training}], "eval_rows": [{"supporting": held_out}]}
        check_questions(config, object(), SimpleNamespace(sources={"data": "q.jsonl"}, **rows))
        return capsys.readouterr().out

    assert check("d0", "d1") == check("d1", "d1#2") == ""
    assert check("d0", "d9").startswith("1 of 2 of the documents that the questions in q.jsonl name as supporting")
    assert check("d9", "d8", SearchConfig(search_url="http://a")) == ""


def test_paths_of_a_search_are_absolute_for_a_resumed_run():
    before = with_absolute_paths(Config(corpus=DOCS, index="x", encoder="intfloat/e5-base-v2"))
    write_corpus("one")
    config = with_absolute_paths(Config(corpus=DOCS, index="x", encoder="intfloat/e5-base-v2"))
    assert config.corpus == str(Path(DOCS).absolute())
    assert before.index == config.index == str(Path("x").absolute())
    assert config.encoder == "intfloat/e5-base-v2"


def test_a_resumed_run_needs_the_same_documents():
    """The entry in config.json that `--resume` compares depends on the content and not on the file."""
    write_corpus("one")

    def source(**flags) -> dict[str, dict]:
        return search_sources(SearchConfig(**flags), opened(**flags))

    first = source(corpus=DOCS)
    assert first["corpus"]["source"] == DOCS
    assert source(corpus=DOCS, index="x") == first
    assert source(index="x")["index"]["content"] == first["corpus"]["content"]
    write_corpus("two")
    assert source(corpus=DOCS)["corpus"]["content"] != first["corpus"]["content"]
    assert search_sources(SearchConfig(), None) == search_sources(SearchConfig(search_url="http://a"), object()) == {}


def test_a_run_resumed_elsewhere_finds_its_index(monkeypatch):
    write_corpus("one")
    flags = {"corpus": str(Path(DOCS).absolute())}
    opened(**flags)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    open_index(Config(**flags, resume="../runs/experiment/run"))
    assert list(Path().iterdir()) == []


def open_in_process(start: float) -> float:
    time.sleep(max(0.0, start - time.monotonic()))
    opened(corpus=DOCS)
    return indexes()[0].stat().st_ino


@needs_fork
def test_of_several_processes_one_builds():
    write_corpus(*(f"text {number}" for number in range(1000)))
    with multiprocessing.get_context("fork").Pool(3) as pool:
        inodes = pool.map(open_in_process, [time.monotonic() + 0.3] * 3, chunksize=1)
    assert len(set(inodes)) == 1
