"""Search by meaning, with real sentence-transformers models: tiny random ones, saved, loaded, and checked by hand."""

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sentence_transformers")

from run_files import write_rows
from safetensors.numpy import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding, Transformer
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from common.errors import UserError

from harness.base.config import TINY_POLICY
from harness.search.dense_index import DenseIndex, build_dense, load_encoder
from harness.search.documents import Document
from harness.search.opening import build_index, open_index
from harness.search.search_config import IndexConfig, SearchConfig

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
    """One layer with random weights, and the mean over the tokens, as in E5."""
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


def make(path: Path, encoder: str, documents=DOCUMENTS) -> DenseIndex:
    model = load_encoder(encoder)
    if not path.exists():
        build_dense(path, documents, "a hash", encoder, model)
    return DenseIndex(path, model, "my command")


@pytest.mark.parametrize("kind", ["static", "bert"])
def test_hits_are_those_with_the_largest_cosines(encoders, indexes, kind):
    """Also in threads."""
    model = SentenceTransformer(encoders[kind], device="cpu")
    passages = model.encode([f"passage: {document.text}" for document in DOCUMENTS])
    answers = indexes[kind].search_all(QUERIES, 5)
    for query, hits in zip(QUERIES, answers, strict=True):
        vector = model.encode(f"query: {query}".encode(errors="replace").decode()[:2007])
        cosines = passages @ vector / np.linalg.norm(passages, axis=1) / np.linalg.norm(vector)
        assert [hit.score for hit in hits] == pytest.approx(np.sort(-cosines)[:5] * -1, abs=1e-5)
        numbers = [DOCUMENTS.index((hit.document, hit.text)) for hit in hits]
        assert [hit.score for hit in hits] == pytest.approx(cosines[numbers], abs=1e-5)
    with ThreadPoolExecutor(7) as pool:
        alone = list(pool.map(lambda query: indexes[kind].search_all([query], 5)[0], QUERIES[:7]))
    assert [hits[0].document for hits in alone] == [hits[0].document for hits in answers[:7]]


def test_as_many_hits_as_there_are_documents(encoders, indexes, tmp_path):
    [hits] = indexes["static"].search_all(["ship"], 1000)
    assert len(hits) == len(DOCUMENTS)
    [[hit]] = make(tmp_path / "one", encoders["static"], DOCUMENTS[:1]).search_all(["x"], 3)
    assert hit.text == DOCUMENTS[0].text
    assert indexes["static"].search_all([], 3) == []


def test_an_encoder_may_be_moved_but_not_be_another(encoders, tmp_path):
    path = tmp_path / "index"
    first = make(path, encoders["static"])
    again = make(path, str(shutil.copytree(encoders["static"], tmp_path / "moved")))
    assert again.search_all(QUERIES, 3) == first.search_all(QUERIES, 3)
    assert (again.num_documents, again.content_hash) == (len(DOCUMENTS), "a hash")
    prompts = {"query": "q: ", "document": "passage: "}
    others = (save_static(tmp_path / "seed", seed=1), save_static(tmp_path / "prompts", prompts=prompts))
    for other in (encoders["bert"], *others):
        with pytest.raises(UserError, match=r"another encoder, or other weights \(.*static\): build it with my"):
            make(path, other)


def test_the_flags_open_an_index_for_its_documents(encoders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"id": name, "text": f"The ship {name}."} for name in NAMES]
    write_rows("docs.jsonl", rows)
    flags = SearchConfig(corpus="docs.jsonl", encoder=encoders["static"])
    first = open_index(flags)
    made = first.path.stat().st_mtime_ns
    assert open_index(flags).search_all(QUERIES, 3) == first.search_all(QUERIES, 3)
    assert first.path.stat().st_mtime_ns == made
    write_rows("docs.jsonl", rows[1:])
    assert open_index(flags).path != first.path
    assert open_index(flags).num_documents == len(NAMES) - 1


def test_a_file_that_is_no_such_index_is_refused_and_kept(encoders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows("docs.jsonl", [{"id": "a", "text": "b"}])
    path, model = tmp_path / "index", load_encoder(encoders["static"])
    make(path, encoders["static"])
    content = path.read_bytes()
    save_file({"vectors": np.zeros((1, 2), np.float32)}, tmp_path / "weights")
    for wrong in (b"", b"SQLite format 3\0" + b"\0" * 100, content[:-1], (tmp_path / "weights").read_bytes()):
        path.write_bytes(wrong)
        for open_it in (
            lambda: DenseIndex(path, model, ""),
            lambda: build_index(IndexConfig(corpus="docs.jsonl", index=str(path), encoder=encoders["static"])),
        ):
            with pytest.raises(UserError, match=r"--index .* is not an index for --encoder"):
                open_it()
        assert path.read_bytes() == wrong


def test_vectors_that_are_not_numbers_are_refused(encoders, tmp_path):
    broken = shutil.copytree(encoders["static"], tmp_path / "broken")
    [weights] = broken.rglob("*.safetensors")
    save_file({"embedding.weight": np.full((1024, 16), np.nan, np.float32)}, weights)
    with pytest.raises(UserError, match="not numbers"):
        make(tmp_path / "index", str(broken))
    assert not (tmp_path / "index").exists()


def test_a_missing_package_is_named(monkeypatch, encoders):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(UserError, match=r"--encoder needs sentence_transformers: pip install -e '\.\[search\]'"):
        load_encoder(encoders["static"])


@pytest.mark.parametrize("content", ["[{", '[{"idx": 0, "name": "0", "path": "", "type": "os.system"}]'])
def test_what_is_no_encoder_is_refused(tmp_path, encoders, content):
    """Code that the model names is not run."""
    broken = shutil.copytree(encoders["static"], tmp_path / "broken")
    (broken / "modules.json").write_text(content)
    for path in (broken, tmp_path):
        with pytest.raises(UserError, match=r"--encoder .* is not a sentence-transformers model \("):
            load_encoder(str(path))


def test_an_encoder_that_is_not_there_is_named():
    with pytest.raises(UserError, match="someone/e"):
        load_encoder("someone/e")
