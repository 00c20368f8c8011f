"""Search by meaning: vectors of a sentence-transformers model, compared exactly. It needs the extra search.

An index is one safetensors file: the vectors (N, D), of length 1, the documents as lines of JSON, and a description of
its sources. It is read through the page cache, which all processes of a machine share. Every query is compared with
every document; a corpus of many millions is better left to a server with an approximate index (--search-url).
"""

import hashlib
import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common.errors import UserError
from common.search import Hit

from harness.base.config import is_hub_id, shown
from harness.base.hub import must_be_cached
from harness.base.terminal import printable, say
from harness.search.documents import Document, whole

MAX_QUERY = 2000  # characters: the rest is not encoded; models read 512 tokens, or fewer
BATCH = 128  # texts that are encoded together
FORMAT = "search by meaning, 1"


def load_encoder(encoder: str):
    """A sentence-transformers model, on the accelerator if there is one."""
    path = Path(encoder).expanduser()
    if not encoder or not (path.is_dir() or is_hub_id(encoder)):
        raise UserError(f"--encoder {encoder} is neither a directory nor a hub id such as intfloat/e5-base-v2")
    try:
        from sentence_transformers import SentenceTransformer
    except ModuleNotFoundError as error:
        raise UserError(f"--encoder needs {error.name}: pip install -e '.[search]'") from error
    is_here = path.is_dir() or must_be_cached("model", encoder)
    try:
        return SentenceTransformer(str(path) if path.is_dir() else encoder, local_files_only=is_here).eval()
    except Exception as error:  # any fault in its files; the libraries have no common class for it
        problem = printable(f"{type(error).__name__}: {error}", 200)
        raise UserError(f"--encoder {encoder} is not a sentence-transformers model ({problem})") from error


def checksum(model: torch.nn.Module) -> str:
    """SHA-256 of the weights, the vocabulary and the prompts, wherever the model comes from."""
    digest = hashlib.sha256(json.dumps([model.prompts, sorted(model.tokenizer.get_vocab().items())]).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def build_dense(path: Path, documents: Iterable[Document], content: str, encoder: str, model) -> None:
    """Write the index of documents with the hash `content`. `encoder` is the model's name, for error messages."""
    documents = list(documents)
    say(f"encoding {len(documents)} documents")
    texts = [document.text for document in documents]
    vectors = model.encode_document(texts, batch_size=BATCH, normalize_embeddings=True, convert_to_tensor=True)
    vectors = vectors.float().cpu().contiguous()
    if not vectors.isfinite().all():
        raise UserError("--encoder gives vectors that are not numbers")
    rows = [json.dumps(document).encode() for document in documents]
    tensors = {
        "vectors": vectors,
        "ends": torch.tensor([len(row) for row in rows]).cumsum(0),
        "documents": torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8),
    }
    about = {"format": FORMAT, "content": content, "encoder": checksum(model), "name": encoder}
    save_file(tensors, path, metadata=about)
    path.chmod(0o644)  # safetensors makes files that other users cannot read


def read_about(path: Path) -> dict[str, str]:
    """The description of an index's sources. UserError: it is not an index."""
    problem = ""
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        about, problem = {}, f" ({printable(str(error), 200)})"
    if about.get("format") != FORMAT:
        raise UserError(f"--index {shown(path)} is not an index for --encoder{problem}")
    return about


class DenseIndex:
    """Vectors in a file, and the model that made them; `rebuild` is the command to rebuild it, for errors.

    Several threads may call it; one at a time searches, because tokenizers allow no more. Encoding a query together
    with others can change the last digits of a score.
    """

    def __init__(self, path: Path, model, rebuild: str):
        about = read_about(path)
        if about["encoder"] != checksum(model):
            made_with = f"another encoder, or other weights ({about['name']})"
            raise UserError(f"--index {shown(path)} was made with {made_with}: build it with {rebuild}")
        with safe_open(path, framework="pt") as file:  # its tensors are views of the file
            self._vectors, self._ends, self._documents = map(file.get_tensor, ("vectors", "ends", "documents"))
        self.path, self._model, self._lock = path, model, threading.Lock()
        self.num_documents, self.content_hash = len(self._ends), about["content"]

    def search_all(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The `k` hits with the largest inner products, for each query; all are encoded together, without time limit"""
        from sentence_transformers.util import dot_score, semantic_search

        if not queries:
            return []
        texts = [whole(query[:MAX_QUERY]) for query in queries]
        with self._lock:
            vectors = self._model.encode_query(
                texts, batch_size=BATCH, normalize_embeddings=True, convert_to_tensor=True, show_progress_bar=False
            )
            found = semantic_search(vectors.float().cpu(), self._vectors, top_k=k, score_function=dot_score)
        return [[Hit(*self._document(hit["corpus_id"]), hit["score"]) for hit in hits] for hits in found]

    def _document(self, number: int) -> tuple[str, str]:
        """Id and text."""
        begin = int(self._ends[number - 1]) if number else 0
        return tuple(json.loads(self._documents[begin : int(self._ends[number])].numpy().tobytes()))
