"""What the search backends find, and how fast they are.

    python benchmarks/search_backends.py     # 3 CPU minutes, one thread; writes the entry search_backends of
                                             # benchmarks/results/measurements.json

It needs the extra search. The backends are *words* (SQLite, BM25), *meaning* (vectors, every one compared) and
*server* (experiment_multiturn_qa/serve_index.py over the index of *words*, on this machine).

Found: recall@k is the share of held-out questions of the bundled data whose supporting document is among the first k.
A query is the question as it is, or a name alone, as the trained policy searches. The server must find what *words*
finds, to the last digit of the scores.

Speed: CPU milliseconds of a turn, 64 queries together, those of the server included; medians of rounds in which the
backends take turns. Documents are of invented worlds like the bundled ones, with longer names.

The encoder of *meaning* is made first, where no model can be downloaded: a text's vector is the mean of learned vectors
of its tokens. It learns from invented worlds with the names of the warm start, none of which occurs in the bundled
documents, and knows no language beyond their few sentences. Jarul and Jular are one name to it.
"""

import functools
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil
import torch
import tyro

from common.search import Hit, Index, SearchError
from tasks.grammars.world_grammar import (
    ASKS,
    SECOND_SYLLABLES,
    YEARS,
    Entity,
    document,
    draw_question,
    make_world,
    names,
    one_hop,
)
from viewer.results import write_json

from harness.base.config import ROOT
from harness.run.machine import describe_machine
from harness.search.opening import build_index, open_index
from harness.search.search_config import SearchConfig

RESULTS = Path(__file__).resolve().parent / "results" / "measurements.json"
BACKENDS = ("words", "meaning", "server")
SECONDS = 60.0  # time limit of a search; none may be needed
RECALL_AT = (1, 3, 10)
TURN = 64  # queries that a turn sends together
KIND_OF_DIGIT = ("person",) * 4 + ("town",) * 3 + ("ship", "game", "book")  # by the last digit of an entity's number


@dataclass(frozen=True, kw_only=True)
class Config:
    sizes: tuple[int, ...] = (2_000, 100_000)  # numbers of documents
    rounds: int = 5  # in each of which every backend has its turn
    encoder_steps: int = 1500  # batches that the encoder learns from
    output: str = str(RESULTS)


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # of the server, too
    torch.set_num_threads(1)
    packages = ("sentence-transformers", "fastapi", "uvicorn", "httpx2")
    results = describe_machine() | {"packages": {package: version(package) for package in packages}}
    with TemporaryDirectory(prefix="search_backends_") as folder:
        encoder = train_encoder(config.encoder_steps, Path(folder) / "encoder")
        results["quality"] = measure_quality(Path(folder), encoder)
        results["speed"] = []
        for size in config.sizes:
            results["speed"] += measure_speed(config, Path(folder), encoder, size)
            write_json(Path(config.output), results, entry="search_backends")
    for row in results["quality"] + results["speed"]:
        print(json.dumps(row))


def train_encoder(num_steps: int, folder: Path, dimensions: int = 128, batch_size: int = 128) -> str:
    """The loss is the cross-entropy of softmax(20 cosine); in each row one document is right."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(ROOT / "assets" / "tiny_policy" / "tokenizer.json"))
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=dimensions)], device="cpu")
    loss_of = MultipleNegativesRankingLoss(model, scale=20.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=num_steps)
    for texts in itertools.islice(pairs(random.Random(0), batch_size), num_steps):
        loss = loss_of([model.preprocess(part) for part in texts], None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save(str(folder), create_model_card=False)
    return str(folder)


def pairs(rng: random.Random, batch_size: int) -> Iterator[tuple[list[str], list[str]]]:
    """Batches of queries (a third are names, the others questions of one and of two hops) and their documents."""
    while True:
        world = make_world(rng, 5000, "warm_start")
        for _ in range(50):
            queries: dict[str, str] = {}  # by the name of the entity to be found
            while len(queries) < batch_size:
                question = draw_question(rng, world, num_hops=rng.choice((1, 2)))
                name = question.path[0]
                queries.setdefault(name, name if rng.random() < 1 / 3 else question.text)
            yield list(queries.values()), [document(world.entities[name]) for name in queries]


@contextmanager
def opened(corpus: Path, encoder: str, folder: Path) -> Iterator[tuple[dict[str, Index], psutil.Process]]:
    """The index of each backend, which has been built, and the process of the server."""
    shared = {"corpus": str(corpus), "runs_dir": str(folder), "search_seconds": SECONDS}
    words = open_index(SearchConfig(**shared))
    command = [sys.executable, str(ROOT / "experiment_multiturn_qa" / "serve_index.py"), "--index", str(words.path)]
    command += ["--port", "0", "--search-seconds", str(SECONDS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            url = next(match[0] for line in server.stdout if (match := re.search(r"http://\S+", line)))
            remote = open_index(SearchConfig(search_url=url, search_seconds=SECONDS))
            meaning = open_index(SearchConfig(**shared, encoder=encoder))
            yield {"words": words, "meaning": meaning, "server": remote}, psutil.Process(server.pid)
        finally:
            server.terminate()


# What is found -------------------------------------------------------------------------------------------------------


def measure_quality(folder: Path, encoder: str) -> list[dict]:
    rows = [json.loads(line) for line in (ROOT / "data/qa_tasks_heldout.jsonl").read_text("utf-8").splitlines()]
    two = [row for row in rows if len(row["supporting"]) == 2]
    sought = {  # queries, with the id of the document to be found
        "question of one hop": [(row, row["question"], row["supporting"][0]) for row in rows if row not in two],
        "question of two hops": [(row, row["question"], row["supporting"][0]) for row in two],
        "question of two hops, second document": [(row, row["question"], row["supporting"][1]) for row in two],
        "name": [(row, row["supporting"][0], row["supporting"][0]) for row in rows],
        "second name": [(row, row["supporting"][1], row["supporting"][1]) for row in two],
    }
    found = []
    with opened(ROOT / "data" / "qa_documents.jsonl", encoder, folder) as (indexes, _):
        for name, cases in sought.items():
            queries = [query for _, query, _ in cases]
            answers = {backend: index.search_all(queries, max(RECALL_AT)) for backend, index in indexes.items()}
            assert answers["server"] == answers["words"], f"the server found something else: {name}"
            for backend, documents in itertools.product(BACKENDS, ("seen", "new")):
                pairs = [
                    (hits, wanted)
                    for (row, _, wanted), hits in zip(cases, answers[backend], strict=True)
                    if row["documents"] == documents
                ]
                found.append({"backend": backend, "query": name, "documents": documents} | recall(pairs))
    return found


def recall(cases: list[tuple[list[Hit], str]]) -> dict:
    shares = {
        f"recall@{k}": sum(wanted in [hit.document for hit in hits[:k]] for hits, wanted in cases) / len(cases)
        for k in RECALL_AT
    }
    return {"queries": len(cases)} | shares


# Speed ---------------------------------------------------------------------------------------------------------------


@functools.cache
def every_name() -> tuple[str, ...]:
    return tuple(itertools.chain(*(names(pool) for pool in ("heldout", "train", "warm_start"))))


def entity_name(number: int) -> str:
    """A name of the bundled worlds' kind and two syllables more: a different one for each of 17 million numbers."""
    base = every_name()
    syllables = [syllable for syllable in SECOND_SYLLABLES if len(syllable) == 2]
    number = number * 7_919_003 % (len(base) * len(syllables) ** 2)  # neighbours become different
    number, first = divmod(number, len(syllables))
    number, second = divmod(number, len(syllables))
    return base[number] + syllables[first] + syllables[second]


def make_entity(number: int, size: int) -> Entity:
    """An entity of a world of that many, always the same one."""
    rng = random.Random(number)

    def other(kind: str) -> str:
        digits = [digit for digit in range(10) if KIND_OF_DIGIT[digit] == kind]
        return entity_name(rng.randrange(size // 10) * 10 + rng.choice(digits))

    kind = KIND_OF_DIGIT[number % 10]
    return Entity(entity_name(number), kind, other("town"), str(rng.choice(YEARS)), other("person"))


def measure_speed(config: Config, folder: Path, encoder: str, size: int) -> list[dict]:
    """One entry for each backend."""
    corpus = folder / f"{size}.jsonl"
    with corpus.open("w", encoding="utf-8") as file:
        for number in range(size):
            entity = make_entity(number, size)
            file.write(json.dumps({"id": entity.name, "text": document(entity)}) + "\n")
    entries = {backend: {"backend": backend, "documents": size} for backend in BACKENDS}
    for backend in ("words", "meaning"):
        began = time.process_time()
        flags = {"corpus": str(corpus), "runs_dir": str(folder)}
        index = build_index(SearchConfig(**flags, encoder=encoder if backend == "meaning" else None))
        entries[backend] |= {"build_cpu_seconds": time.process_time() - began, "bytes": index.path.stat().st_size}
    times: dict[tuple[str, str], list[float]] = {}
    found = dict.fromkeys(itertools.product(BACKENDS, ("name", "question")), 0)
    with opened(corpus, encoder, folder) as (indexes, server):

        def cpu_seconds() -> float:
            used = server.cpu_times()
            return time.process_time() + used.user + used.system

        rng = random.Random(size)
        for number, kind in itertools.product(range(config.rounds + 1), ("name", "question")):
            drawn = [make_entity(rng.randrange(size), size) for _ in range(TURN * 10)]
            queries = [entity.name if kind == "name" else one_hop(entity, rng.choice(ASKS)).text for entity in drawn]
            for backend in BACKENDS:
                began = cpu_seconds()
                answers = []
                for start in range(0, len(queries), TURN):
                    answers += indexes[backend].search_all(queries[start : start + TURN], 2)
                if number:  # the first round is for warming up
                    times.setdefault((backend, kind), []).append(1e3 * (cpu_seconds() - began) / 10)
                    assert not any(isinstance(answer, SearchError) for answer in answers)
                    hits = zip(drawn, answers, strict=True)
                    found[backend, kind] += sum(entity.name in [hit.document for hit in some] for entity, some in hits)
    for (backend, kind), turns in times.items():
        share = found[backend, kind] / (config.rounds * TURN * 10)
        entries[backend][kind] = {"cpu_ms_per_turn": median(turns), "of_rounds": turns, "found_in_2": share}
    corpus.unlink()
    for path in folder.glob(f"search_index/{size}-*"):
        path.unlink()
    return list(entries.values())


if __name__ == "__main__":
    main()
