"""The flags of a search: which index is opened, when it is made, and what is refused."""

import contextlib
import io
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UserError

from common.plumbing.checks import check_texts
from common.plumbing.config import RunConfig
from common.plumbing.parse import with_absolute_paths
from common.plumbing.retrieval.config import SearchConfig
from common.plumbing.retrieval.opening import open_index, search_sources
from common.plumbing.retrieval.questions import check_questions
from common.plumbing.retrieval.sqlite_index import SqliteIndex, build_sqlite

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "experiment_multiturn_qa/build_index.py"


@dataclass(frozen=True, kw_only=True)
class Config(SearchConfig, RunConfig):
    """As an experiment has it."""


@pytest.fixture(autouse=True)
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


def test_the_bundled_documents_are_indexed_once():
    index, output = opened()
    (path,) = indexes()
    assert path.name == f"qa_documents-{index.content_hash[:12]}.sqlite"
    assert "search: 2,000 documents in" in output
    assert "(built in" in output
    inode = path.stat().st_ino
    again, output = opened()
    assert "built" not in output
    assert path.stat().st_ino == inode
    assert again.search("Cerhur", 2) == index.search("Cerhur", 2) != []


def test_a_corpus_that_changes_gets_another_index():
    write_corpus(["one", "", "two"])
    first, output = opened(corpus="my docs.jsonl")
    assert "has no text, and so no document, in 1 places: line 2" in output
    write_corpus(["one", "two", "three " * 30])
    second, _ = opened(corpus="my docs.jsonl")
    third, _ = opened(corpus="my docs.jsonl", chunk_words=10, chunk_overlap=0)
    assert len({first.content_hash, second.content_hash, third.content_hash}) == len(indexes()) == 3
    assert [len(index.search("three", 9)) for index in (first, second, third)] == [0, 1, 3]


def test_an_index_of_other_documents_is_refused_until_rebuilt(load_script):
    """The command of the error message does what it promises."""
    write_corpus(["one", "two"])
    opened(corpus="my docs.jsonl", index="my index")
    write_corpus(["one", "three"] * 80)
    flags = {"corpus": "my docs.jsonl", "index": "my index", "chunk_words": 50}
    with pytest.raises(UserError) as error:
        opened(**flags)
    message = str(error.value)
    assert "my index was built from other documents (2 of my docs.jsonl" in message
    assert "than --corpus my docs.jsonl" in message
    program, script, *arguments = shlex.split(message.partition("build it anew with ")[2])
    assert (program, script) == ("python", SCRIPT)
    assert arguments == ["--corpus", "my docs.jsonl", "--index", "my index", "--chunk-words", "50"]
    load_script(SCRIPT).main(arguments)
    index, output = opened(**flags)
    assert "built" not in output
    assert len(index.search("three", 100)) == 80


def test_a_corpus_that_changes_while_it_is_read_is_noticed(monkeypatch):
    def change_and_build(*arguments) -> str:
        write_corpus(["one", "two", "three"])
        return build_sqlite(*arguments)

    write_corpus(["one", "two"])
    monkeypatch.setattr("common.plumbing.retrieval.opening.build_sqlite", change_and_build)
    with pytest.raises(UserError, match=r"--corpus my docs\.jsonl changed while it was read: start again"):
        opened(corpus="my docs.jsonl")


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


def test_without_a_corpus_an_index_is_used_as_it_is():
    write_corpus(["one", "two"])
    built, _ = opened(corpus="my docs.jsonl", index="x.sqlite")
    Path("my docs.jsonl").unlink()
    index, output = opened(index="x.sqlite")
    assert index.search("two", 2) == built.search("two", 2) != []
    assert output == "search: 2 documents in the index x.sqlite\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"corpus": "nowhere"}, "--corpus nowhere: there is no such file or directory"),
        ({"index": "nowhere"}, "there is no index nowhere: build it with python .*--corpus CORPUS --index nowhere"),
        ({"index": "text"}, "text is not an index of documents"),
        ({"index": "text", "corpus": "my docs.jsonl"}, "text is not an index of documents"),
        ({"index": "text/x", "corpus": "my docs.jsonl"}, "index text/x cannot be written"),
        ({"corpus": "~nobody-here/x"}, "--corpus ~nobody-here/x: this path cannot be used"),
        ({"index": "x" * 300, "corpus": "my docs.jsonl"}, "--index xxx.*: this path cannot be used .*too long"),
        ({"runs_dir": "text", "corpus": "my docs.jsonl"}, "text/search_index/.* cannot be written"),
        ({"search_url": "http://a", "corpus": "b"}, "--search-url .* omit it, or --corpus"),
        ({"search_url": "http://a", "index": "b"}, "--search-url .* omit it, or --index"),
        ({"search_url": "http://a", "encoder": "b"}, "--search-url .* omit it, or --encoder"),
        ({"index": "a", "encoder": "b"}, "--index with --encoder needs --corpus"),
        ({"chunk_words": 20}, "--chunk-overlap 20 .* must be below --chunk-words 20"),
        ({"chunk_words": 0}, "--chunk-words must be 1 to"),
        ({"search_seconds": 0.0}, "--search-seconds must be above 0"),
        ({"top_k": 0}, "--top-k must be 1 to 1000 documents"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags, message):
    write_corpus(["one"])
    Path("text").write_text("mine")
    with pytest.raises(UserError, match=message) as error:
        opened(**flags)
    assert "\n" not in str(error.value)
    assert Path("text").read_text() == "mine"


def test_paths_of_a_search_are_absolute_for_a_resumed_run():
    """Also that of an index which the run itself has made."""
    before = with_absolute_paths(Config(corpus="my docs.jsonl", index="x", encoder="intfloat/e5-base-v2"))
    write_corpus(["one"])
    config = with_absolute_paths(Config(corpus="my docs.jsonl", index="x", encoder="intfloat/e5-base-v2"))
    assert config.corpus == str(Path("my docs.jsonl").absolute())
    assert before.index == config.index == str(Path("x").absolute())
    assert config.encoder == "intfloat/e5-base-v2"
    with pytest.raises(UserError, match="--corpus ~nobody-here/x: this path cannot be used"):
        check_texts(Config(corpus="~nobody-here/x"))


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_of_several_processes_one_builds():
    write_corpus([f"text {number}" for number in range(3000)])
    with multiprocessing.get_context("fork").Pool(3) as pool:
        outputs = pool.map(open_in_process, [time.monotonic() + 0.3] * 3, chunksize=1)
    assert sum("(built in" in output for output in outputs) == 1
    assert sum("3,000 documents" in output for output in outputs) == 3


def test_the_script_says_what_it_has_built(load_script, capsys):
    write_corpus(["one", "two"])
    for _ in range(2):
        load_script(SCRIPT).main(["--corpus", "my docs.jsonl", "--index", "x.sqlite"])
        assert "2 documents, " in capsys.readouterr().out
    Path("x.sqlite").write_bytes(Path("x.sqlite").read_bytes()[:-5000])
    load_script(SCRIPT).main(["--corpus", "my docs.jsonl", "--index", "x.sqlite"])
    assert SqliteIndex(Path("x.sqlite"), 5).num_documents == 2
    Path("x.sqlite").write_text("mine")
    with pytest.raises(UserError, match=r"x\.sqlite is not an index of documents, and is not replaced"):
        load_script(SCRIPT).main(["--corpus", "my docs.jsonl", "--index", "x.sqlite"])


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for a process")
def test_ctrl_c_ends_a_build_without_a_trace():
    write_corpus([f"text {number} " * 20 for number in range(100_000)])
    program = subprocess.Popen(
        [sys.executable, str(ROOT / SCRIPT), "--corpus", "my docs.jsonl", "--index", "out/x.sqlite"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    while not list(Path("out").glob(".*.partial_index")) and program.poll() is None:
        time.sleep(0.01)
    program.send_signal(signal.SIGINT)
    output, errors = program.communicate(timeout=60)
    assert (program.returncode, output, errors.strip()) == (130, "", "interrupted")
    assert [path.name for path in Path("out").iterdir()] == [".search_index.lock"]
