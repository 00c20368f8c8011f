"""Search by meaning, with real sentence-transformers models: tiny random ones, saved, loaded, and compared by hand."""

import json
import math
import os
import shutil
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("faiss")
pytest.importorskip("sentence_transformers")

from safetensors.numpy import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding, Transformer
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from common.errors import UserError
from common.search import SearchError

from common.plumbing.config import TINY_POLICY
from common.plumbing.retrieval.dense_index import DenseIndex, open_dense
from common.plumbing.retrieval.documents import Document, content_hash

LONG = 60  # seconds: longer than a search takes on the busiest machine
NAMES = ["Fardil", "Mabto", "Tinhur", "Jarce", "Lopeg", "Wisnar", "Quolde"]
DOCUMENTS = [
    Document(f"{name}#{number}", f"The ship {name} was built in {1800 + number} by {NAMES[number % 5]}.\nIt is “old”.")
    for number, name in enumerate(NAMES * 6)
]
QUERIES = [f"Who built {name}?" for name in NAMES] + ["", "half \ud83d", "\0", "x" * 100_000, "NEAR(*) \"- '; DROP"]
PROMPTS = {"query": "query: ", "document": "passage: "}


def save_static(path: Path, seed: int = 0, prompts: dict | None = None) -> str:
    """A vector for each token of the bundled policy."""
    tokenizer = Tokenizer.from_file(str(TINY_POLICY / "tokenizer.json"))
    weights = torch.randn(tokenizer.get_vocab_size(), 16, generator=torch.Generator().manual_seed(seed))
    module = StaticEmbedding(tokenizer, embedding_weights=weights.numpy())
    SentenceTransformer(modules=[module], prompts=prompts or PROMPTS, device="cpu").save(str(path))
    return str(path)


def save_bert(path: Path) -> str:
    """One layer with random weights, and the mean over the tokens, as E5 has it."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(TINY_POLICY / "tokenizer.json"), pad_token="<|endoftext|>")
    config = BertConfig(vocab_size=1024, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    config.intermediate_size, config.max_position_embeddings, config.initializer_range = 32, 64, 0.5
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(config).save_pretrained(path / "parts")
    tokenizer.save_pretrained(path / "parts")
    transformer = Transformer(str(path / "parts"), max_seq_length=64)
    model = SentenceTransformer(modules=[transformer, Pooling(32)], prompts=PROMPTS, device="cpu")
    model.save(str(path / "bert"))
    return str(path / "bert")


@pytest.fixture(scope="module")
def encoders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("encoders")
    return {"static": save_static(root / "static"), "bert": save_bert(root)}


@pytest.fixture(scope="module")
def indexes(encoders, tmp_path_factory) -> dict[str, DenseIndex]:
    root = tmp_path_factory.mktemp("indexes")
    return {name: make(root / name, encoder) for name, encoder in encoders.items()}


def make(path: Path, encoder: str, documents=DOCUMENTS, seconds: float = LONG) -> DenseIndex:
    return open_dense(path, lambda: documents, content_hash(documents), encoder, seconds)


@pytest.mark.parametrize("kind", ["static", "bert"])
def test_hits_are_those_with_the_largest_cosines(encoders, indexes, kind):
    model = SentenceTransformer(encoders[kind], device="cpu")
    passages = model.encode([f"passage: {document.text}" for document in DOCUMENTS])
    answers = indexes[kind].search_all(QUERIES, 5)
    for query, hits in zip(QUERIES, answers, strict=True):
        vector = model.encode(f"query: {query}".encode(errors="replace").decode()[:2007])
        cosines = passages @ vector / np.linalg.norm(passages, axis=1) / np.linalg.norm(vector)
        order = np.argsort(-cosines, kind="stable")[:5]
        assert [hit.score for hit in hits] == pytest.approx(cosines[order], abs=1e-5)
        for hit in hits:
            number = DOCUMENTS.index((hit.document, hit.text))
            assert hit.score == pytest.approx(cosines[number], abs=1e-5)
    assert indexes[kind].search(QUERIES[0], 5)[0][:2] == answers[0][0][:2]


@pytest.mark.slow
def test_ten_thousand_hostile_queries_are_answered(indexes, hostile_queries):
    texts = {document.id: document.text for document in DOCUMENTS}
    queries, index = list(hostile_queries(10_000)), indexes["static"]
    answers = [hits for start in range(0, 10_000, 64) for hits in index.search_all(queries[start : start + 64], 2)]
    assert len(answers) == 10_000
    assert all(len(hits) == 2 and math.isfinite(hits[0].score + hits[1].score) for hits in answers)
    assert all(texts[hit.document] == hit.text for hits in answers for hit in hits)


def test_as_many_hits_as_there_are_documents(encoders, indexes, tmp_path):
    assert len(indexes["static"].search("ship", 1000)) == len(DOCUMENTS)
    assert [hit.text for hit in make(tmp_path / "one", encoders["static"], DOCUMENTS[:1]).search("x", 3)] == [
        DOCUMENTS[0].text
    ]
    assert make(tmp_path / "none", encoders["static"], []).search_all(["x", "y"], 3) == [[], []]
    assert indexes["static"].search_all([], 3) == []


def test_an_index_is_made_once_and_read_again(encoders, tmp_path):
    path = tmp_path / "new" / "index"
    first = make(path, encoders["static"])
    content = path.read_bytes()
    again = open_dense(path, pytest.fail, content_hash(DOCUMENTS), encoders["static"], LONG)
    assert again.search_all(QUERIES, 3) == first.search_all(QUERIES, 3)
    assert (again.num_documents, again.content_hash) == (len(DOCUMENTS), content_hash(DOCUMENTS))
    moved = shutil.copytree(encoders["static"], tmp_path / "moved")
    open_dense(path, pytest.fail, content_hash(DOCUMENTS), str(moved), LONG)
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_other_documents_or_another_encoder_are_refused(encoders, tmp_path):
    path = tmp_path / "index"
    make(path, encoders["static"])
    with pytest.raises(UserError, match=r"other documents: build it with python .*build_index.py --index .*--encoder"):
        make(path, encoders["static"], DOCUMENTS[1:])
    for name, other in (
        ("bert", encoders["bert"]),
        ("seed", save_static(tmp_path / "seed", seed=1)),
        ("prompts", save_static(tmp_path / "prompts", prompts={"query": "q: ", "document": "passage: "})),
    ):
        with pytest.raises(UserError, match=r"another encoder, or other weights \(.*static\): build it with "):
            make(path, other)
        assert make(tmp_path / f"index of {name}", other).num_documents == len(DOCUMENTS)
    with pytest.raises(UserError, match=r"build it with my command$"):
        open_dense(path, pytest.fail, "other", encoders["static"], LONG, rebuild="my command")


def test_one_who_reads_keeps_what_was_read(encoders, tmp_path):
    path = tmp_path / "index"
    old = make(path, encoders["static"])
    before = old.search_all(QUERIES, 3)
    others = [document._replace(text=f"Another {document.text}") for document in DOCUMENTS[::-1]]
    make(tmp_path / "other", encoders["static"], others)
    (tmp_path / "other").replace(path)
    assert old.search_all(QUERIES, 3) == before
    assert make(path, encoders["static"], others).search(QUERIES[0], 1)[0].text.startswith("Another")


def test_a_file_that_is_no_such_index_is_refused(encoders, indexes, tmp_path):
    path = tmp_path / "index"
    make(path, encoders["static"])
    content = path.read_bytes()
    save_file({"vectors": np.zeros((1, 2), np.float32)}, tmp_path / "weights")
    wrong = [b"", b"SQLite format 3\0" + b"\0" * 100, content[:-1], content[:50], (tmp_path / "weights").read_bytes()]
    for bytes_of in wrong:
        path.write_bytes(bytes_of)
        with pytest.raises(UserError, match=r"--index .* is not an index for --encoder"):
            make(path, encoders["static"])
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"--index .* is not an index for --encoder"):
        make(path, encoders["static"])


def test_a_failed_build_leaves_nothing(encoders, tmp_path):
    broken = shutil.copytree(encoders["static"], tmp_path / "broken")
    [weights] = broken.rglob("*.safetensors")
    save_file({"embedding.weight": np.full((1024, 16), np.nan, np.float32)}, weights)
    with pytest.raises(UserError, match="not numbers"):
        make(tmp_path / "new" / "index", str(broken))
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        make(tmp_path / "file" / "index", encoders["static"])


@contextmanager
def slow(index: DenseIndex, begin=lambda: None):
    """Let the encoder wait until the block ends."""
    released, given_up = threading.Event(), []

    def wait(*_) -> None:
        begin()
        given_up.append(not released.wait(LONG / 2))

    hook = index._model[0].register_forward_pre_hook(wait)
    try:
        yield given_up
        assert given_up == []
    finally:
        released.set()
        hook.remove()


def test_nobody_waits_longer_than_the_time_limit(encoders, indexes, tmp_path):
    index = make(tmp_path / "index", encoders["static"], seconds=0.2)
    encoded = []
    with slow(index, lambda: encoded.append(1)):
        for _ in range(2):
            for error in index.search_all(["a", "b"], 1):
                assert isinstance(error, SearchError)
                assert str(error) == "the search took longer than 0.2 seconds"
        assert encoded == [1]  # the second call found the encoder busy
    index._seconds = LONG
    assert index.search(QUERIES[0], 2) == indexes["static"].search(QUERIES[0], 2)


def test_ctrl_c_ends_a_search_at_once(encoders, tmp_path):
    index = make(tmp_path / "index", encoders["static"])
    with slow(index, lambda: os.kill(os.getpid(), signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        index.search("a", 1)


def test_an_encoder_that_fails_is_an_error_of_the_search(encoders, tmp_path):
    index = make(tmp_path / "index", encoders["static"])

    def fail(*_) -> None:
        raise MemoryError("none\nleft")

    hook = index._model[0].register_forward_pre_hook(fail)
    for error in index.search_all(["a", "b"], 1):
        assert isinstance(error, SearchError)
        assert str(error) == "the queries could not be encoded (MemoryError: none left)"
    hook.remove()
    assert len(index.search("a", 1)) == 1


def test_all_queries_of_a_call_are_encoded_together(indexes):
    sizes = []
    hook = indexes["bert"]._model[0].register_forward_pre_hook(lambda _, args: sizes.append(len(args[0]["input_ids"])))
    indexes["bert"].search_all([f"query {number}" for number in range(64)], 2)
    hook.remove()
    assert sizes == [64]


def test_it_works_in_threads(indexes):
    index = indexes["bert"]
    expected = [index.search(query, 3) for query in QUERIES[:7]]
    with ThreadPoolExecutor(7) as pool:
        assert list(pool.map(lambda query: index.search(query, 3), QUERIES[:7])) == expected


@pytest.mark.parametrize("name", ["faiss", "sentence_transformers"])
def test_a_missing_package_is_named(monkeypatch, tmp_path, encoders, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"--encoder needs {name}: pip install -r requirements-search.txt"):
        make(tmp_path / "index", encoders["static"])


def test_what_is_no_encoder_is_refused(tmp_path, encoders):
    with pytest.raises(UserError, match=r"--encoder .*nowhere is neither a directory nor a hub id"):
        make(tmp_path / "index", str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    broken = shutil.copytree(encoders["static"], tmp_path / "broken")
    (broken / "modules.json").write_text("[{")
    for path in (tmp_path / "empty", broken):
        with pytest.raises(UserError, match=r"--encoder .* is not a sentence-transformers model \("):
            make(tmp_path / "index", str(path))
    with pytest.raises(UserError, match=r"someone/some-encoder"):
        make(tmp_path / "index", "someone/some-encoder")
    (broken / "modules.json").write_text(
        json.dumps([{"idx": 0, "name": "0", "path": "", "type": "os.system"}])
    )  # code is not run
    with pytest.raises(UserError, match=r"is not a sentence-transformers model"):
        make(tmp_path / "index", str(broken))
