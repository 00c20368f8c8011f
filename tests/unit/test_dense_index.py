"""Search by meaning, with real sentence-transformers models: tiny random ones, saved, loaded, and compared by hand."""

import json
import math
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sentence_transformers")

from safetensors.numpy import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding, Transformer
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from common.errors import UserError

from harness.base.config import TINY_POLICY
from harness.search.dense_index import DenseIndex, build_dense, load_encoder
from harness.search.documents import Document, content_hash
from harness.search.opening import open_index
from harness.search.search_config import SearchConfig

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


def make(path: Path, encoder: str, documents=DOCUMENTS) -> DenseIndex:
    model = load_encoder(encoder)
    if not path.exists():
        build_dense(path, documents, encoder, model)
    return DenseIndex(path, model, "my command")


@pytest.mark.parametrize("kind", ["static", "bert"])
def test_hits_are_those_with_the_largest_cosines(encoders, indexes, kind):
    model = SentenceTransformer(encoders[kind], device="cpu")
    passages = model.encode([f"passage: {document.text}" for document in DOCUMENTS])
    answers = indexes[kind].search_all(QUERIES, 5)
    for query, hits in zip(QUERIES, answers, strict=True):
        vector = model.encode(f"query: {query}".encode(errors="replace").decode()[:2007])
        cosines = passages @ vector / np.linalg.norm(passages, axis=1) / np.linalg.norm(vector)
        assert [hit.score for hit in hits] == pytest.approx(np.sort(-cosines)[:5] * -1, abs=1e-5)
        numbers = [DOCUMENTS.index((hit.document, hit.text)) for hit in hits]
        assert [hit.score for hit in hits] == pytest.approx(cosines[numbers], abs=1e-5)
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
    assert indexes["static"].search_all([], 3) == []


def test_an_index_is_read_again_wherever_its_encoder_is(encoders, tmp_path):
    path = tmp_path / "index"
    first = make(path, encoders["static"])
    moved = shutil.copytree(encoders["static"], tmp_path / "moved")
    again = make(path, str(moved))
    assert again.search_all(QUERIES, 3) == first.search_all(QUERIES, 3)
    assert (again.num_documents, again.content_hash) == (len(DOCUMENTS), content_hash(DOCUMENTS))
    assert path in tmp_path.iterdir()
    assert not list(tmp_path.glob(".*"))


def test_another_encoder_is_refused(encoders, tmp_path):
    make(tmp_path / "index", encoders["static"])
    prompts = {"query": "q: ", "document": "passage: "}
    others = (save_static(tmp_path / "seed", seed=1), save_static(tmp_path / "prompts", prompts=prompts))
    for other in (encoders["bert"], *others):
        with pytest.raises(UserError, match=r"another encoder, or other weights \(.*static\): build it with my"):
            make(tmp_path / "index", other)


def test_the_flags_open_an_index_for_its_documents(encoders, tmp_path, monkeypatch, load_script):
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"id": name, "text": f"The ship {name}."}) for name in NAMES]
    Path("docs.jsonl").write_text("\n".join(rows))
    flags = SearchConfig(corpus="docs.jsonl", encoder=encoders["static"])
    first = open_index(flags)
    made = first.path.stat().st_mtime_ns
    assert open_index(flags).search(QUERIES[0], 3) == first.search(QUERIES[0], 3)
    assert first.path.stat().st_mtime_ns == made
    Path("docs.jsonl").write_text("\n".join(rows[1:]))
    assert open_index(flags).path != first.path
    flags = replace(flags, index=str(first.path))
    with pytest.raises(UserError, match="was built from other documents") as error:
        open_index(flags)
    script, *arguments = shlex.split(str(error.value).partition("build it anew with python ")[2])
    load_script(script).main(arguments)
    assert open_index(flags).num_documents == len(NAMES) - 1


def test_a_file_that_is_no_such_index_is_refused_and_kept(encoders, tmp_path):
    path, model = tmp_path / "index", load_encoder(encoders["static"])
    make(path, encoders["static"])
    content = path.read_bytes()
    save_file({"vectors": np.zeros((1, 2), np.float32)}, tmp_path / "weights")
    wrong = [b"", b"SQLite format 3\0" + b"\0" * 100, content[:-1], content[:50], (tmp_path / "weights").read_bytes()]
    for bytes_of in wrong:
        path.write_bytes(bytes_of)
        with pytest.raises(UserError, match=r"--index .* is not an index for --encoder"):
            DenseIndex(path, model)
        with pytest.raises(UserError, match=r"--index .* is not an index for --encoder"):
            build_dense(path, DOCUMENTS, "x", model)
        assert path.read_bytes() == bytes_of


def test_a_failed_build_leaves_nothing(encoders, tmp_path):
    broken = shutil.copytree(encoders["static"], tmp_path / "broken")
    [weights] = broken.rglob("*.safetensors")
    save_file({"embedding.weight": np.full((1024, 16), np.nan, np.float32)}, weights)
    with pytest.raises(UserError, match="not numbers"):
        make(tmp_path / "index", str(broken))
    assert not (tmp_path / "index").exists()
    with pytest.raises(UserError, match="cannot be written"):
        make(tmp_path / "no folder" / "index", encoders["static"])


def test_a_missing_package_is_named(monkeypatch, encoders):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(UserError, match=r"--encoder needs sentence_transformers: pip install -e '\.\[search\]'"):
        load_encoder(encoders["static"])


def test_it_works_in_threads(indexes):
    index = indexes["bert"]
    expected = [index.search(query, 3) for query in QUERIES[:7]]
    with ThreadPoolExecutor(7) as pool:
        assert list(pool.map(lambda query: index.search(query, 3), QUERIES[:7])) == expected


@pytest.mark.parametrize("content", [None, "[{", '[{"idx": 0, "name": "0", "path": "", "type": "os.system"}]'])
def test_what_is_no_encoder_is_refused(tmp_path, encoders, content):
    """Code that it names is not run."""
    broken = shutil.copytree(encoders["static"], tmp_path / "broken")
    if content is None:
        shutil.rmtree(broken)
        broken.mkdir()
    else:
        (broken / "modules.json").write_text(content)
    with pytest.raises(UserError, match=r"--encoder .* is not a sentence-transformers model \("):
        make(tmp_path / "index", str(broken))


def test_an_encoder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"--encoder .*nowhere is neither a directory nor a hub id"):
        make(tmp_path / "index", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"someone/some-encoder"):
        make(tmp_path / "index", "someone/some-encoder")
