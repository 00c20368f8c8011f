"""Search by words: what is found, whatever is asked, by several threads, while the file is replaced.

The flags of a search: which index is opened, when it is made, and what is refused.
"""

import contextlib
import io
import json
import math
import multiprocessing
import os
import random
import shlex
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UserError
from common.search import SearchError

from harness.base.checks import check_texts
from harness.base.config import RunConfig
from harness.cli.parse import with_absolute_paths
from harness.search import sqlite_index
from harness.search.documents import Document, content_hash
from harness.search.opening import check_questions, open_index, search_sources
from harness.search.search_config import SearchConfig
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
DOCUMENTS = [Document(name, text) for name, text in TEXTS.items()]
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("index") / "an index?#%.sqlite"  # a name that an URI has to quote
    build_sqlite(path, DOCUMENTS)
    return path


def found(path: Path, query: str, k: int = 3) -> list[str]:
    return [hit.document for hit in SqliteIndex(path, SECONDS).search(query, k)]


def random_documents(num_documents: int, seed: int = 0) -> list[Document]:
    """Texts of words of very different frequency."""
    rng = random.Random(seed)
    return [
        Document(f"{number}", " ".join(f"w{int(rng.paretovariate(0.6))}" for _ in range(rng.randint(3, 30))))
        for number in range(num_documents)
    ]


def test_scores_are_those_of_bm25(tmp_path):
    """The formula of Robertson et al. with k1 = 1.2 and b = 0.75, in a slow loop over all documents."""
    documents = random_documents(200)
    build_sqlite(tmp_path / "x", documents)
    index = SqliteIndex(tmp_path / "x", SECONDS)
    tokens = [document.text.split() for document in documents]
    mean_length = sum(map(len, tokens)) / len(tokens)
    for query in ("w1", "w7 w2 w40", "w1 w2 w3 w5 w5 nowhere w90", "w12345678"):
        scores = {}
        for word in dict.fromkeys(query.split()):
            num_with = sum(word in text for text in tokens)
            idf = max(math.log((len(tokens) - num_with + 0.5) / (num_with + 0.5)), 1e-6)
            for number, text in enumerate(tokens):
                if count := text.count(word):
                    part = count * 2.2 / (count + 1.2 * (0.25 + 0.75 * len(text) / mean_length))
                    scores[number] = scores.get(number, 0) + idf * part
        hits = index.search(query, 300)
        assert {hit.document: hit.score for hit in hits} == pytest.approx({str(n): s for n, s in scores.items()})
        assert hits == sorted(hits, key=lambda hit: (-hit.score, int(hit.document)))
        assert index.search(query, 5) == hits[:5]


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("When was the ship Fardil built?", ["Fardil"]),
        ("fardil*", ["Fardil"]),
        ("Mabto -Waplem", ["Waplem"]),
        ("text:Jarce", ["Jarce"]),
        ("NEAR(zoe besancon, 2)", ["Café", "Waplem"]),
        ("cafe\u0301", ["Café"]),
        ("ＺＯＥ", ["Café"]),  # noqa: RUF001
        ("ёлка", ["Café"]),
        ("東京", ["東京"]),
        ("古い都", ["京都"]),
        ("किताब", ["कि"]),
        ("behind", ["a\0b"]),
        ("", []),
        ("* - : ^ ( ) { } + , .", []),
        ("\0", []),
        ("Fardil\0 Jarce\udcff", ["Fardil"]),
        ("nothing of this", ["Jarce"]),
    ],
)
def test_any_text_is_a_query(path, query, names):
    result = found(path, query)
    assert result[: len(names)] == names
    assert bool(result) == bool(names)


@pytest.mark.slow
def test_thousands_of_hostile_queries_are_answered(path, hostile_queries):
    """None fails, although each may take a second at most: `search` raises what it cannot answer."""
    index = SqliteIndex(path, seconds=1)
    num_found = 0
    for query in hostile_queries(3_000):
        hits = index.search(query, 2)
        assert len(hits) <= 2
        assert all(TEXTS[hit.document] == hit.text and math.isfinite(hit.score) for hit in hits)
        num_found += bool(hits)
    assert num_found > 300


def test_the_number_of_terms_is_bounded():
    assert list(query_phrases(" ".join(map(str, range(100_000))))) == [f'"{number}"' for number in range(64)]
    assert len(query_phrases("東" * 100_000)) == 1
    assert list(query_phrases("x " * 50_000 + "y")) == ['"x"']


def test_common_words_count_only_as_far_as_they_are_affordable(tmp_path, monkeypatch):
    """3,000 documents: "the" is in all, "half" in every second one, "rare" in some, "one" in the last one."""
    texts = ["the " + "half " * (n % 2) + "rare " * (n % 97 == 0) + "one " * (n == 2999) for n in range(3000)]
    build_sqlite(tmp_path / "x", (Document(str(n), text) for n, text in enumerate(texts)))
    index = SqliteIndex(tmp_path / "x", SECONDS)
    everything = index.search("the half rare one", 3000)
    assert len(everything) == 3000
    monkeypatch.setattr(sqlite_index, "BUDGET", 2400)
    assert len(index.search("the half rare one", 3000)) == 1500 + 16
    assert index.search("the half rare one", 3)[0].document == everything[0].document == "2999"
    assert index.search("the rare", 200) == index.search("rare", 200)
    alone = index.search("the", 3000)  # nothing else is in the query
    assert 1500 < len(alone) <= 2400
    assert alone == SqliteIndex(tmp_path / "x", SECONDS).search("the", 3000)


def test_a_search_that_takes_too_long_is_an_error(tmp_path):
    build_sqlite(tmp_path / "x", random_documents(2000))
    index = SqliteIndex(tmp_path / "x", seconds=1e-6)
    with pytest.raises(SearchError, match="longer than 1e-06 seconds"):
        index.search("w1 w2", 2)
    slow, answer = index.search_all(["w1 w2", ""], 2)
    assert isinstance(slow, SearchError)
    assert answer == []


def test_threads_find_the_same(tmp_path):
    build_sqlite(tmp_path / "x", random_documents(200))
    index = SqliteIndex(tmp_path / "x", SECONDS)
    queries = [document.text for document in random_documents(40, seed=1)]
    expected = [index.search(query, 5) for query in queries]
    assert index.search_all(queries, 5) == expected
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda query: index.search(query, 5), queries * 3)) == expected * 3


def test_an_index_is_one_file_that_needs_no_writing(tmp_path):
    assert build_sqlite(tmp_path / "x", DOCUMENTS) == content_hash(DOCUMENTS)
    (tmp_path / "x").chmod(0o444)
    before = (tmp_path / "x").stat().st_mtime_ns
    index = SqliteIndex(tmp_path / "x", SECONDS)
    assert index.search("Fardil", 1)
    assert (index.num_documents, index.content_hash) == (len(DOCUMENTS), content_hash(DOCUMENTS))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").stat().st_mtime_ns == before


@pytest.mark.parametrize(("damage", "said"), [
    (lambda content: b"", "is not an index of documents"), (lambda content: b"text", "is not an index of documents"),
    (lambda content: content[:68] + bytes(4) + content[72:], "is not an index of documents"),
    (lambda content: content[:90], "is damaged .*: build it with make it"),
    (lambda content: content[:5000], "is damaged .*: build it with make it"),
    (lambda content: content[:100] + bytes(len(content) - 100), "is damaged .*: build it with make it"),
    (None, "there is no index .*: build it with make it"),
])  # fmt: skip
def test_what_is_not_an_index_is_refused(tmp_path, path, damage, said):
    copy = tmp_path / "copy.sqlite"
    if damage:
        copy.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=said) as error:
        SqliteIndex(copy, SECONDS, "make it")
    assert "copy.sqlite" in str(error.value)


def test_a_reader_keeps_the_index_that_it_has_opened(tmp_path):
    build_sqlite(tmp_path / "x", [Document("old", "word")])
    index = SqliteIndex(tmp_path / "x", SECONDS)
    build_sqlite(tmp_path / "x", [Document("new", "word")])
    assert [hit.document for hit in index.search("word", 2)] == ["old"]
    assert found(tmp_path / "x", "word") == ["new"]


@needs_fork
def test_a_killed_build_leaves_nothing_that_is_an_index(tmp_path):
    path = tmp_path / "x"

    def documents():
        yield from random_documents(300)
        os.kill(os.getpid(), signal.SIGKILL)

    builder = multiprocessing.get_context("fork").Process(target=lambda: build_sqlite(path, documents()))
    builder.start()
    builder.join()
    assert builder.exitcode == -signal.SIGKILL
    with pytest.raises(UserError, match="there is no index"):
        SqliteIndex(path, SECONDS)
    build_sqlite(path, DOCUMENTS)  # again: the rest of the first is removed
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError])
def test_a_build_that_ends_early_leaves_the_old_index(tmp_path, error):
    path = tmp_path / "x"
    build_sqlite(path, DOCUMENTS)

    def documents():
        yield Document("new", "word")
        raise error

    with pytest.raises(error):
        build_sqlite(path, documents())
    assert found(path, "Fardil") == ["Fardil"]
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def test_a_file_that_is_no_index_is_not_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(UserError, match=r"thesis\.txt is not an index of documents, and is not replaced"):
        build_sqlite(tmp_path / "thesis.txt", DOCUMENTS)
    assert (tmp_path / "thesis.txt").read_text() == "all of it"
    with pytest.raises(UserError, match="cannot be written"):
        build_sqlite(tmp_path / "no" / "such" / "folder", DOCUMENTS)


# Opening an index -----------------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "experiment_multiturn_qa/build_index.py"


@dataclass(frozen=True, kw_only=True)
class Config(SearchConfig, RunConfig):
    """As an experiment has it."""


@pytest.fixture
def in_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def write_corpus(texts: list[str], path: str = "my docs.jsonl") -> None:
    Path(path).write_text("".join(json.dumps({"id": f"d{n}", "text": text}) + "\n" for n, text in enumerate(texts)))


def opened(**flags) -> tuple[SqliteIndex, str]:
    """The index, and what was printed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        index = open_index(SearchConfig(**flags))
    return index, output.getvalue()


def indexes() -> list[Path]:
    return sorted(Path("runs/search_index").glob("[!.]*"))


@pytest.mark.usefixtures("in_directory")
def test_the_bundled_documents_are_indexed_once():
    index, output = opened()
    (path,) = indexes()
    assert path.name == f"qa_documents-{index.content_hash[:12]}.sqlite"
    assert "2,000 documents" in output
    assert "(built in" in output
    inode = path.stat().st_ino
    again, output = opened()
    assert ("built" in output, path.stat().st_ino) == (False, inode)
    assert again.search("Cerhur", 2) == index.search("Cerhur", 2) != []


@pytest.mark.usefixtures("in_directory")
def test_a_corpus_that_changes_gets_another_index():
    write_corpus(["one", "", "two"])
    first, output = opened(corpus="my docs.jsonl")
    assert "no text, and so no document, in 1 places of my docs.jsonl: my docs.jsonl:2" in output
    write_corpus(["one", "two", "three " * 30])
    second, _ = opened(corpus="my docs.jsonl")
    third, _ = opened(corpus="my docs.jsonl", chunk_words=10, chunk_overlap=0)
    assert len({first.content_hash, second.content_hash, third.content_hash}) == len(indexes()) == 3
    assert [len(index.search("three", 9)) for index in (first, second, third)] == [0, 1, 3]


@pytest.mark.usefixtures("in_directory")
def test_an_index_of_other_documents_is_refused_until_rebuilt(load_script):
    write_corpus(["one", "two"])
    opened(corpus="my docs.jsonl", index="my index")
    write_corpus(["one", "three"] * 80)
    flags = {"corpus": "my docs.jsonl", "index": "my index", "chunk_words": 50}
    with pytest.raises(UserError, match=r"my index was built from other documents than --corpus my docs") as error:
        opened(**flags)
    program, script, *arguments = shlex.split(str(error.value).partition("build it anew with ")[2])
    assert (program, script) == ("python", SCRIPT)
    assert arguments == ["--corpus", "my docs.jsonl", "--index", "my index", "--chunk-words", "50"]
    load_script(SCRIPT).main(arguments)
    index, output = opened(**flags)
    assert "built" not in output
    assert len(index.search("three", 100)) == 80


@pytest.mark.usefixtures("in_directory")
def test_documents_that_questions_name_are_looked_for(capsys):
    """In training and held-out rows; a document that was cut is there. Servers, which list none, are not asked."""
    write_corpus(["one", "two " * 30])
    config = SearchConfig(corpus="my docs.jsonl", chunk_words=10, chunk_overlap=0)

    def check(training: str, held_out: str, config: SearchConfig = config) -> str:
        rows = {"train_rows": [{"supporting": training}], "eval_rows": [{"supporting": held_out}]}
        check_questions(config, object(), SimpleNamespace(data="q.jsonl", **rows))
        return capsys.readouterr().out

    assert check("d0", "d1") == check("d1", "d1#2") == ""
    assert check("d0", "d9").startswith("1 of 2 of the documents that the questions in q.jsonl name as supporting")
    with pytest.raises(UserError, match=r"none of the documents .* such as 'd8', is in my docs\.jsonl"):
        check("d9", "d8")
    assert check("d9", "d8", SearchConfig(search_url="http://a")) == ""


@pytest.mark.usefixtures("in_directory")
@pytest.mark.parametrize(("flags", "message"), [
    ({"corpus": "nowhere"}, "--corpus nowhere: there is no such file or directory"),
    ({"index": "nowhere"}, "there is no index nowhere: build it with python .*--corpus CORPUS --index nowhere"),
    ({"index": "text", "corpus": "my docs.jsonl"}, "text is not an index of documents"),
    ({"runs_dir": "text", "corpus": "my docs.jsonl"}, "text/search_index/.* cannot be written"),
    ({"search_url": "http://a", "corpus": "b"}, "--search-url .* omit it, or --corpus"),
    ({"index": "a", "encoder": "b"}, "--index with --encoder needs --corpus"),
    ({"chunk_words": 20}, "--chunk-overlap 20 .* must be below --chunk-words 20"),
    ({"chunk_words": 0}, "--chunk-words must be at least 1"),
])  # fmt: skip
def test_flags_that_cannot_work_are_refused(flags, message):
    write_corpus(["one"])
    Path("text").write_text("mine")
    with pytest.raises(UserError, match=message) as error:
        opened(**flags)
    assert "\n" not in str(error.value)
    assert Path("text").read_text() == "mine"


@pytest.mark.usefixtures("in_directory")
def test_paths_of_a_search_are_absolute_for_a_resumed_run():
    before = with_absolute_paths(Config(corpus="my docs.jsonl", index="x", encoder="intfloat/e5-base-v2"))
    write_corpus(["one"])
    config = with_absolute_paths(Config(corpus="my docs.jsonl", index="x", encoder="intfloat/e5-base-v2"))
    assert config.corpus == str(Path("my docs.jsonl").absolute())
    assert before.index == config.index == str(Path("x").absolute())
    assert config.encoder == "intfloat/e5-base-v2"
    with pytest.raises(UserError, match="--corpus ~nobody-here/x: this path cannot be used"):
        check_texts(Config(corpus="~nobody-here/x"))


@pytest.mark.usefixtures("in_directory")
def test_a_resumed_run_needs_the_same_documents():
    """What config.json keeps, and `--resume` compares, follows the content and not the file."""
    write_corpus(["one"])

    def source(**flags) -> dict[str, dict]:
        config = SearchConfig(**flags)
        return search_sources(config, opened(**flags)[0])

    first = source(corpus="my docs.jsonl")
    assert first["corpus"]["source"] == "my docs.jsonl"
    assert source(corpus="my docs.jsonl", index="x") == first
    assert source(index="x")["index"]["content"] == first["corpus"]["content"]
    write_corpus(["two"])
    assert source(corpus="my docs.jsonl")["corpus"]["content"] != first["corpus"]["content"]
    assert list(source()) == ["corpus"]
    assert search_sources(SearchConfig(), None) == search_sources(SearchConfig(search_url="http://a"), object()) == {}


@pytest.mark.usefixtures("in_directory")
def test_a_run_resumed_elsewhere_finds_its_index(monkeypatch, tmp_path):
    write_corpus(["one"])
    flags = {"corpus": str(Path("my docs.jsonl").absolute())}
    opened(**flags)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    open_index(Config(**flags, resume="../runs/experiment/run"))
    assert list(Path().iterdir()) == []


def open_in_process(start: float) -> str:
    time.sleep(max(0.0, start - time.monotonic()))
    return opened(corpus="my docs.jsonl")[1]


@needs_fork
@pytest.mark.usefixtures("in_directory")
def test_of_several_processes_one_builds():
    write_corpus([f"text {number}" for number in range(1000)])
    with multiprocessing.get_context("fork").Pool(3) as pool:
        outputs = pool.map(open_in_process, [time.monotonic() + 0.3] * 3, chunksize=1)
    assert sum("(built in" in output for output in outputs) == 1
    assert sum("1,000 documents" in output for output in outputs) == 3
