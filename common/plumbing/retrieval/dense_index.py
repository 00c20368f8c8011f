"""Search by meaning: vectors of a sentence-transformers model, compared by FAISS. It needs requirements-search.txt.

An index is one safetensors file: the vectors (N, D), of length 1, the documents as lines of JSON, and what they were
made from. It is read through the page cache, which all processes of a machine share. Every query is compared with every
document; a corpus of many millions is better left to a server with an approximate index (--search-url).
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from common.errors import UserError
from common.search import Hit, SearchError

from common.plumbing.config import is_hub_id, shown
from common.plumbing.hub import must_be_cached
from common.plumbing.retrieval.documents import Document
from common.plumbing.retrieval.protocol import whole
from common.plumbing.terminal import printable, say

MAX_QUERY = 2000  # characters: what follows is not encoded; models read 512 tokens, or fewer
BATCH = 128  # texts that are encoded together
FORMAT = "search by meaning, 1"


def open_dense(
    path: Path,
    documents: Callable[[], Iterable[Document]],
    content_hash: str,
    encoder: str,
    seconds: float,
    rebuild: str = "",
) -> "DenseIndex":
    """The index in a file, which is made if it does not exist.

    Args:
        documents: gives the documents; called only if the file has to be made.
        content_hash: of the documents.
        encoder: a directory or a hub id.
        seconds: until when the queries of a call are answered.
        rebuild: the command that makes the index anew, for error messages.

    Raises:
        UserError: the file holds other documents, or vectors of another encoder, or is no such index.
    """
    model = load_encoder(encoder)
    rebuild = rebuild or f"python experiment_multiturn_qa/build_index.py --index {shown(path)} --encoder {encoder}"
    expected = {"format": FORMAT, "content": content_hash, "encoder": checksum(model)}
    if not path.exists():
        build_dense(path, list(documents()), expected | {"name": encoder}, model)
    index = DenseIndex(path, model, seconds)
    for name, wrong in (
        ("content", "was made from other documents"),
        ("encoder", f"was made with another encoder, or other weights ({index.about['name']})"),
    ):
        if index.about[name] != expected[name]:
            raise UserError(f"--index {shown(path)} {wrong}: build it with {rebuild}")
    return index


def load_encoder(encoder: str):
    """A sentence-transformers model, on the accelerator if there is one.

    Raises:
        UserError: there is no such model, or a package is missing.
    """
    path = Path(encoder).expanduser()
    if not encoder or not (path.is_dir() or is_hub_id(encoder)):
        raise UserError(f"--encoder {encoder} is neither a directory nor a hub id such as intfloat/e5-base-v2")
    try:
        import faiss  # noqa: F401
        from sentence_transformers import SentenceTransformer
    except ModuleNotFoundError as error:
        raise UserError(f"--encoder needs {error.name}: pip install -r requirements-search.txt") from error
    is_here = path.is_dir() or must_be_cached("model", encoder)
    try:
        model = SentenceTransformer(str(path) if path.is_dir() else encoder, local_files_only=is_here)
    except Exception as error:  # whatever is wrong with its files; the libraries have no common class for it
        problem = printable(f"{type(error).__name__}: {error}", 200)
        raise UserError(f"--encoder {encoder} is not a sentence-transformers model ({problem})") from error
    return model.eval()


def checksum(model: torch.nn.Module) -> str:
    """SHA-256 of the weights, the vocabulary and the prompts, wherever the model comes from."""
    digest = hashlib.sha256(json.dumps([model.prompts, sorted(model.tokenizer.get_vocab().items())]).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def build_dense(path: Path, documents: list[Document], about: dict[str, str], model) -> None:
    """Write an index, completely or not at all.

    Raises:
        UserError: the encoder gives no finite numbers, or the file cannot be written.
    """
    say(f"encoding {len(documents)} documents for {shown(path)}")
    texts = [whole(document.text) for document in documents]
    vectors = np.zeros((0, 1), np.float32)
    if texts:
        vectors = model.encode_document(texts, batch_size=BATCH, normalize_embeddings=True, convert_to_numpy=True)
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    if not np.isfinite(vectors).all():
        raise UserError("--encoder gives vectors that are not numbers")
    rows = [json.dumps([whole(document.id), text]).encode() for document, text in zip(documents, texts, strict=True)]
    tensors = {
        "vectors": vectors,
        "ends": np.cumsum([len(row) for row in rows], dtype=np.int64),
        "documents": np.frombuffer(b"".join(rows), np.uint8),
    }
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # several processes may build the same index
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial, metadata=about)
        partial.chmod(0o644)  # safetensors makes files that no other user can read
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--index {shown(path)} cannot be written ({getattr(error, 'strerror', error)})") from error
    finally:
        with suppress(OSError):
            partial.unlink()


class DenseIndex:
    """Vectors in a file, and the model that has made them.

    Several threads may search; their queries are encoded one call after the other, so that calls which nobody waits for
    any more do not pile up in a slow encoder. A forked process must not search: the matrix library can wait forever for
    a lock that a thread of its parent held. Which queries are encoded together can change a score in its last digits.
    """

    def __init__(self, path: Path, model, seconds: float):
        """
        Raises:
            UserError: the file cannot be read.
        """
        try:
            with safe_open(path, framework="pt") as file:  # its tensors are views of the file, unlike numpy's
                self.about = file.metadata() or {}
                self._vectors, self._ends, self._documents = (
                    file.get_tensor(name).numpy() for name in ("vectors", "ends", "documents")
                )
        except (OSError, SafetensorError) as error:
            problem = printable(str(error), 200)
            raise UserError(f"--index {shown(path)} is not an index for --encoder ({problem})") from error
        if self.about.get("format") != FORMAT:
            raise UserError(f"--index {shown(path)} is not an index for --encoder")
        self._model, self._seconds, self._lock = model, seconds, threading.Lock()
        self.num_documents, self.content_hash = len(self._ends), self.about["content"]

    def __len__(self) -> int:
        return self.num_documents

    def search(self, query: str, k: int) -> list[Hit]:
        """The `k` hits whose vectors have the largest inner products with that of the query.

        Raises:
            SearchError: it took too long, or the encoder failed.
        """
        [answer] = self.search_all([query], k)
        if isinstance(answer, SearchError):
            raise answer
        return answer

    def search_all(self, queries: Sequence[str], k: int) -> list[list[Hit] | SearchError]:
        """What `search` gives for each query; all are encoded together."""
        if not queries or not self.num_documents:
            return [[] for _ in queries]
        answers: list[list[Hit] | SearchError] = [
            SearchError(f"the search took longer than {self._seconds:g} seconds") for _ in queries
        ]
        deadline, num_threads = time.monotonic() + self._seconds, torch.get_num_threads()
        # a thread can be left alone when it takes too long, or on Ctrl-C
        arguments = ([whole(query[:MAX_QUERY]) for query in queries], k, answers, deadline, num_threads)
        thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        with suppress(RuntimeError):  # no more threads: no answer
            thread.start()
            thread.join(self._seconds)
        return list(answers)  # a copy: the thread may still write

    def _run(self, texts: list[str], k: int, answers: list, deadline: float, num_threads: int) -> None:
        import faiss

        if not self._lock.acquire(timeout=max(deadline - time.monotonic(), 0)):
            return
        try:
            faiss.omp_set_num_threads(num_threads)  # for this thread; a new one would take all cores
            vectors = self._model.encode_query(
                texts, batch_size=BATCH, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
            )
            vectors = np.ascontiguousarray(vectors, dtype=np.float32)
            k = min(k, self.num_documents)
            # one matrix product for three queries or more; faiss 1.15 counts queries times dimensions
            faiss.cvar.distance_compute_blas_threshold = 3 * vectors.shape[1]
            scores, numbers = faiss.knn(vectors, self._vectors, k, metric=faiss.METRIC_INNER_PRODUCT)
            answers[:] = [
                self._hits(*found) if np.isfinite(vector).all() else SearchError("the query cannot be encoded")
                for vector, *found in zip(vectors, scores, numbers, strict=True)
            ]
        except Exception as error:  # of the encoder: no memory on the accelerator, say
            problem = printable(f"{type(error).__name__}: {error}", 100)
            answers[:] = [SearchError(f"the queries could not be encoded ({problem})") for _ in texts]
        finally:
            self._lock.release()

    def _hits(self, scores: np.ndarray, numbers: np.ndarray) -> list[Hit]:
        return [Hit(*self._document(number), float(score)) for score, number in zip(scores, numbers, strict=True)]

    def _document(self, number: int) -> tuple[str, str]:
        """Id and text."""
        begin = self._ends[number - 1] if number else 0
        return tuple(json.loads(self._documents[begin : self._ends[number]].tobytes()))
