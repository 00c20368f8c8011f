"""What the search backends find, and how fast they are, up to a million documents.

    python benchmarks/train_encoder.py && python benchmarks/search_backends.py
                                   # 7 minutes, one thread, 3 GB, 1 GB of disk; writes the entry
                                   # search_backends of benchmarks/results/measurements.json
    python benchmarks/search_backends.py --tables            # the tables of benchmarks/README.md, from that file

It needs requirements-search.txt. The backends are *words* (SQLite, BM25), *meaning* (vectors of the encoder, FAISS) and
*server* (experiment_multiturn_qa/serve_index.py over the index of *words*, on this machine).

Found: recall@k is the share of held-out questions of the bundled data whose supporting document is among the first k.
A query is the question as it is, or a name alone, as the trained policy searches. The server must find what *words*
finds, to the last digit of the scores.

Speed: documents of invented worlds like the bundled ones, with longer names. Each index is built in a process of its
own by the function behind experiment_multiturn_qa/build_index.py, reading included. Then every backend has a process of
its own, and they take turns, after a round of warm-up (the files are in the page cache). Memory is the process's peak
beyond that of its imports; for *meaning* it includes the pages of the mapped file.
"""

import functools
import itertools
import json
import os
import random
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import torch
import tyro

from common.datagen.world_grammar import (
    ASKS,
    LEADS_TO_KIND,
    SECOND_SYLLABLES,
    YEARS,
    Entity,
    World,
    document,
    names,
    one_hop,
    two_hops,
)  # fmt: skip
from common.search import Hit, Index, SearchError
from viewer.results import read_json, write_json

from common.plumbing.config import ROOT
from common.plumbing.machine import describe_machine, peak_memory_bytes
from common.plumbing.retrieval.config import IndexConfig
from common.plumbing.retrieval.opening import build_index

RESULTS = Path(__file__).resolve().parent / "results" / "measurements.json"
BACKENDS = ("words", "meaning", "server")
SUFFIXES = {"words": "sqlite", "meaning": "dense", "server": "sqlite"}
SECONDS = 60.0  # time limit of a search; none may be needed
RECALL_AT = (1, 3, 10)
TURN = 64  # queries that a turn sends together
HOSTILE_ROUNDS = 3
SINGLE, TOGETHER = 100, 10  # queries of a round one by one, and turns of a round
HOSTILE = 100_000  # characters of a hostile query
COMMON_WORDS = "the was in built of born by who where when near town father game ship won wrote book came out"
STEP_SECONDS = 1.5  # of a training step of experiment_multiturn_qa


@dataclass(frozen=True, kw_only=True)
class Config:
    encoder: str = str(ROOT / "runs" / "search_encoder")  # directory of the encoder
    sizes: tuple[int, ...] = (2_000, 100_000, 1_000_000)  # numbers of documents
    rounds: int = 5  # in each of which every backend has its turn
    quality: bool = True  # measure what is found, too
    output: str = str(RESULTS)
    tables: bool = False  # only print the tables of `--output`


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    output = Path(config.output)
    if config.tables:
        print(tables(read_json(output, "search_backends")))
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # of the processes that are started
    torch.set_num_threads(1)
    packages = ("faiss-cpu", "sentence-transformers", "fastapi", "uvicorn", "httpx2")
    results = describe_machine() | {
        "processor": processor(),
        "packages": {"sqlite": sqlite3.sqlite_version} | {package: version(package) for package in packages},
        "command": "python benchmarks/search_backends.py",
        "speed": [],
    }
    with TemporaryDirectory(prefix="search_backends_") as folder:
        if config.quality:
            results["quality"] = measure_quality(config, Path(folder))
        for size in config.sizes:
            results["speed"] += measure_speed(config, Path(folder), size)
            write_json(output, results, entry="search_backends")
    print(tables(results))


def processor() -> str:
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text("utf-8"))
    return f"{model[1] if model else 'unknown'}, {os.cpu_count()} cores, shared with other work"


# Invented documents without end --------------------------------------------------------------------------------------

KIND_OF_DIGIT = ("person",) * 4 + ("town",) * 3 + ("ship", "game", "book")  # by the last digit of an entity's number


def entity_name(number: int) -> str:
    """A name of the bundled worlds' kind and two syllables more: a different one for each of 17 million numbers.

    >>> entity_name(0) != entity_name(1)
    True
    """
    base, syllables = every_name(), [syllable for syllable in SECOND_SYLLABLES if len(syllable) == 2]
    number = number * 7_919_003 % (len(base) * len(syllables) ** 2)  # neighbours become different
    number, first = divmod(number, len(syllables))
    number, second = divmod(number, len(syllables))
    return base[number] + syllables[first] + syllables[second]


@functools.cache
def every_name() -> tuple[str, ...]:
    return tuple(itertools.chain(*(names(pool) for pool in ("heldout", "train", "warm_start"))))


def make_entity(number: int, size: int) -> Entity:
    """An entity of a world of that many, always the same one."""
    rng = random.Random(number)

    def other(kind: str) -> str:
        digits = [digit for digit in range(10) if KIND_OF_DIGIT[digit] == kind]
        return entity_name(rng.randrange(size // 10) * 10 + rng.choice(digits))

    name, kind = entity_name(number), KIND_OF_DIGIT[number % 10]
    return Entity(name, kind, other("town"), str(rng.choice(YEARS)), other("person"))


def write_corpus(path: Path, size: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number in range(size):
            entity = make_entity(number, size)
            file.write(json.dumps({"id": entity.name, "text": document(entity)}) + "\n")


def draw_query(rng: random.Random, kind: str, size: int) -> tuple[str, str]:
    """A query, and the id of the document to be found."""
    entity = make_entity(rng.randrange(size), size)
    if kind == "name":
        return entity.name, entity.name
    if rng.random() < 2 / 3:
        return one_hop(entity, rng.choice(ASKS)).text, entity.name
    leads = rng.choice(list(LEADS_TO_KIND))
    middle = Entity(getattr(entity, leads), LEADS_TO_KIND[leads], "", "", "")
    return two_hops(World({middle.name: middle}), entity, leads, rng.choice(ASKS)).text, entity.name


def hostile_queries(size: int) -> dict[str, str]:
    """By what they are: the longest that are read, and short ones of words that most documents hold."""
    rng = random.Random(size)
    words, years = COMMON_WORDS.split(), [str(year) for year in YEARS]
    parts: dict[str, Callable[[], str]] = {
        "names": lambda: entity_name(rng.randrange(size)) + " ",
        "years": lambda: rng.choice(years) + " ",
        "common words": lambda: rng.choice(words) + " ",
        "names, years and common words": lambda: rng.choice((*words, *years, entity_name(rng.randrange(size)))) + " ",
        "one word": lambda: "a",
        "quotes": lambda: '"',
        "operators": lambda: rng.choice(['"', "*", "NEAR(", "-", " AND ", " OR ", " NOT ", "(", ")", "^", ":", "the"]),
        "Chinese": lambda: chr(rng.randrange(0x4E00, 0x9FFF)),
        "characters that grow when normalised": lambda: "\ufdfa",
        "letters with accents": lambda: "e\u0301" + rng.choice(" a\u0308"),
        "any characters": lambda: chr(rng.randrange(1, 0xD7FF)),
    }
    long = {
        name: "".join(itertools.islice(iter(part, None), HOSTILE // len(part()) + HOSTILE // 5))[:HOSTILE]
        for name, part in parts.items()
    }
    return long | {"short: the": "the", "short: a question without a name": "When was the town built in the year?"}


# What is found -------------------------------------------------------------------------------------------------------


def measure_quality(config: Config, folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (ROOT / "data/qa_tasks_heldout.jsonl").read_text("utf-8").splitlines()]
    two = [row for row in rows if len(row["supporting"]) == 2]
    sought = {  # queries, with the id of the document to be found
        "question of one hop": [(row, row["question"], row["supporting"][0]) for row in rows if row not in two],
        "question of two hops": [(row, row["question"], row["supporting"][0]) for row in two],
        "question of two hops, second document": [(row, row["question"], row["supporting"][1]) for row in two],
        "name": [(row, row["supporting"][0], row["supporting"][0]) for row in rows],
        "second name": [(row, row["supporting"][1], row["supporting"][1]) for row in two],
    }
    corpus, found = ROOT / "data" / "qa_documents.jsonl", []
    for backend in ("words", "meaning"):
        build(backend, corpus, index_path(folder, backend, "bundled"), config.encoder)
    answers: dict[tuple[str, str], list] = {}
    for backend in BACKENDS:
        with opened(backend, index_path(folder, backend, "bundled"), config.encoder) as (index, _):
            for name, cases in sought.items():
                queries = [query for _, query, _ in cases]
                parts = [queries[start : start + TURN] for start in range(0, len(queries), TURN)]
                answers[backend, name] = [hits for part in parts for hits in index.search_all(part, max(RECALL_AT))]
                for documents in ("seen", "new"):
                    found.append({"backend": backend, "query": name, "documents": documents} | recall(
                        [(hits, wanted) for (asked, _, wanted), hits in zip(cases, answers[backend, name], strict=True)
                         if asked["documents"] == documents]))  # fmt: skip
    for name, cases in sought.items():
        assert answers["server", name] == answers["words", name], f"the server found something else: {name}"
        assert len(answers["server", name]) == len(cases)
    return found


def recall(cases: list[tuple[list[Hit], str]]) -> dict:
    ranks = [[hit.document for hit in hits].index(wanted) if wanted in [hit.document for hit in hits] else 10**9
             for hits, wanted in cases]  # fmt: skip
    return {"queries": len(ranks)} | {f"recall@{k}": sum(rank < k for rank in ranks) / len(ranks) for k in RECALL_AT}


# Speed ---------------------------------------------------------------------------------------------------------------


def measure_speed(config: Config, folder: Path, size: int) -> list[dict]:
    """One entry for each backend."""
    corpus = folder / f"{size}.jsonl"
    write_corpus(corpus, size)
    paths = {backend: index_path(folder, backend, size) for backend in BACKENDS}
    entries = {backend: {"backend": backend, "documents": size} for backend in BACKENDS}
    for backend in ("words", "meaning"):
        with own_process() as process:
            entries[backend]["build"] = process.submit(build, backend, corpus, paths[backend], config.encoder).result()
        entries[backend]["build"]["bytes_of_corpus"] = corpus.stat().st_size
        print(json.dumps(entries[backend]), flush=True)
    with ExitStack() as stack:
        processes = {backend: stack.enter_context(own_process()) for backend in BACKENDS}
        for backend, process in processes.items():
            begun = process.submit(begin, backend, paths[backend], config.encoder).result()
            entries[backend] |= {"opening_seconds": begun, "rounds": []}
        for number in range(config.rounds + 1):
            for backend in BACKENDS[:: 1 if number % 2 else -1]:
                measured = processes[backend].submit(run_round, size, number).result()
                entries[backend]["rounds"] += [measured] if number else []  # the first one is for warming up
        for backend, process in processes.items():
            entries[backend]["memory_bytes"] = process.submit(memory).result()
        hostile = {backend: [] for backend in BACKENDS}
        for _ in range(HOSTILE_ROUNDS):
            for backend, process in processes.items():
                hostile[backend].append(process.submit(run_hostile, size).result())
        for backend, process in processes.items():
            entries[backend] |= summary(entries[backend].pop("rounds")) | summary_of_hostile(hostile[backend])
            entries[backend]["memory_bytes_after_hostile_queries"] = process.submit(memory).result()
            process.submit(end).result()
    for backend in ("words", "meaning"):
        paths[backend].unlink()
    corpus.unlink()
    for entry in entries.values():
        print(json.dumps(entry), flush=True)
    return list(entries.values())


def summary(rounds: list[dict]) -> dict:
    """Medians over the rounds; quantiles over the queries of all rounds."""
    found: dict = {"found_in_2": {}, "single": {}, "together": {}}
    for kind in ("name", "question"):
        found["found_in_2"][kind] = round(median(entry[kind]["found"] for entry in rounds), 3)
        for way in ("single", "together"):
            number = 1 if way == "single" else TURN
            times = np.array([entry[kind][way]["seconds"] for entry in rounds])
            found[way][kind] = {
                "queries_per_second": round(median(number * times.shape[1] / times.sum(axis=1)), 1),
                "queries_per_second_by_round": (number * times.shape[1] / times.sum(axis=1)).round(1).tolist(),
                "cpu_ms_per_query": median(entry[kind][way]["cpu"] for entry in rounds) / number / times.shape[1] * 1e3,
                "ms": {name: float(np.quantile(times, q)) * 1e3 for name, q in
                       (("median", 0.5), ("99th percentile", 0.99), ("slowest", 1.0))},
            }  # fmt: skip
    return found | {"failures": sum(entry["failures"] for entry in rounds)}


def summary_of_hostile(rounds: list[dict]) -> dict:
    def times(clock: str, name: str) -> list[float]:
        return [entry[clock][name] * 1e3 for entry in rounds]

    return {
        "hostile_ms": {
            name: {
                "median": median(times("wall", name)),
                "slowest": max(times("wall", name)),
                "cpu": median(times("cpu", name)),
            }
            for name in rounds[0]["wall"]
        },
        "hostile_failures": sum(entry["failures"] for entry in rounds),
    }


@contextmanager
def own_process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
        yield process


def index_path(folder: Path, backend: str, name: object) -> Path:
    return folder / f"{name}.{SUFFIXES[backend]}"


def prepare(backend: str) -> None:
    """One thread, and the imports that take long."""
    torch.set_num_threads(1)
    if backend == "meaning":
        import faiss  # noqa: F401
        import sentence_transformers  # noqa: F401


def build(backend: str, corpus: Path, path: Path, encoder: str) -> dict:
    prepare(backend)
    before, wall, cpu = peak_memory_bytes("cpu"), time.perf_counter(), time.process_time()
    build_index(IndexConfig(corpus=str(corpus), index=str(path), encoder=encoder if backend == "meaning" else None))
    return {
        "seconds": round(time.perf_counter() - wall, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "memory_bytes": peak_memory_bytes("cpu") - before,
        "bytes": path.stat().st_size,
    }


@contextmanager
def opened(backend: str, path: Path, encoder: str) -> Iterator[tuple[Index, int | None]]:
    """An index, and the process id of its server if it has one."""
    if backend == "words":
        from common.plumbing.retrieval.sqlite_index import SqliteIndex

        yield SqliteIndex(path, SECONDS), None
    elif backend == "meaning":
        from common.plumbing.retrieval.dense_index import DenseIndex, load_encoder

        yield DenseIndex(path, load_encoder(encoder), SECONDS), None
    else:
        from common.plumbing.retrieval.remote_index import RemoteIndex

        command = [sys.executable, str(ROOT / "experiment_multiturn_qa" / "serve_index.py"), "--index", str(path),
                   "--port", "0", "--search-seconds", str(SECONDS)]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
            try:
                url = next(match[0] for line in server.stdout if (match := re.search(r"http://\S+", line)))
                index = RemoteIndex(url, SECONDS)
                index.check()
                yield index, server.pid
            finally:
                server.terminate()


_state: dict = {}  # of the process of a backend


def begin(backend: str, path: Path, encoder: str) -> float:
    """Seconds until the index can be searched, with loading the encoder or starting the server."""
    prepare(backend)
    before, start = peak_memory_bytes("cpu"), time.perf_counter()
    stack = ExitStack()
    index, server = stack.enter_context(opened(backend, path, encoder))
    index.search("document", 1)
    _state.update(index=index, server=server, stack=stack, before=before)
    return round(time.perf_counter() - start, 2)


def run_round(size: int, number: int) -> dict:
    """All kinds of queries, with the seconds of each search."""
    rng, index, measured, failures = random.Random(f"{size} {number}"), _state["index"], {}, 0

    def timed(calls: list[Callable]) -> tuple[dict, list]:
        cpu, seconds, answers = cpu_seconds(), [], []
        for call in calls:
            start = time.perf_counter()
            answers.append(call())
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "cpu": cpu_seconds() - cpu}, answers

    for kind in ("name", "question"):
        drawn = [draw_query(rng, kind, size) for _ in range(SINGLE)]
        single, answers = timed([lambda query=query: index.search_all([query], 2) for query, _ in drawn])
        turns = [[draw_query(rng, kind, size)[0] for _ in range(TURN)] for _ in range(TOGETHER)]
        together, more = timed([lambda queries=queries: index.search_all(queries, 2) for queries in turns])
        failures += sum(isinstance(answer, SearchError) for part in answers + more for answer in part)
        found = sum(
            wanted in [hit.document for hit in answer] for (_, wanted), [answer] in zip(drawn, answers, strict=True)
        )
        measured[kind] = {"single": single, "together": together, "found": found / SINGLE}
    return measured | {"failures": failures}


def cpu_seconds() -> float:
    """Of this process, and of its server."""
    server = psutil.Process(_state["server"]).cpu_times() if _state["server"] else None
    return time.process_time() + (server.user + server.system if server else 0)


def run_hostile(size: int) -> dict:
    """Seconds of each hostile query, and how many had no answer."""
    found: dict = {"wall": {}, "cpu": {}, "failures": 0}
    for name, query in hostile_queries(size).items():
        wall, cpu = time.perf_counter(), cpu_seconds()
        [answer] = _state["index"].search_all([query], 2)
        found["wall"][name], found["cpu"][name] = time.perf_counter() - wall, cpu_seconds() - cpu
        found["failures"] += isinstance(answer, SearchError)
    return found


def memory() -> dict[str, int]:
    peaks = {"process": peak_memory_bytes("cpu") - _state["before"]}
    if _state["server"]:
        status = Path(f"/proc/{_state['server']}/status").read_text("utf-8")
        peaks["server, with its imports"] = int(re.search(r"VmHWM:\s*(\d+)", status)[1]) * 1024
    return peaks


def end() -> None:
    _state["stack"].close()


# Tables --------------------------------------------------------------------------------------------------------------


def tables(results: dict) -> str:
    return "\n\n".join((quality_table(results), building_table(results), speed_table(results), hostile_table(results)))


def quality_table(results: dict) -> str:
    head = [f"{backend} @{k}" for backend in ("words", "meaning") for k in RECALL_AT]
    lines = [row("query", "queries", *head), "|---" * (2 + len(head)) + "|"]
    quality = {(entry["backend"], entry["query"], entry["documents"]): entry for entry in results.get("quality", [])}

    def both(backend: str, query: str, key: str, form: str) -> str:
        return " / ".join(format(quality[backend, query, documents][key], form) for documents in ("seen", "new"))

    for query in dict.fromkeys(query for _, query, _ in quality):
        recalls = [both(which, query, f"recall@{k}", ".2f") for which in ("words", "meaning") for k in RECALL_AT]
        lines.append(row(query, both("words", query, "queries", "d"), *recalls))
    return "\n".join(lines)


def building_table(results: dict) -> str:
    lines = [row("documents", "backend", "building: CPU s", "memory", "file", "opening: s", "memory of searching")]
    lines.append("|---" * 7 + "|")
    for entry in results["speed"]:
        made = entry.get("build")
        built = (short(made["cpu_seconds"]), mb(made["memory_bytes"]), mb(made["bytes"])) if made else ("", "", "")
        memory = " + ".join(mb(value) for value in entry["memory_bytes"].values())
        lines.append(
            row(f"{entry['documents']:,}", entry["backend"], *built, f"{entry['opening_seconds']:.2f}", memory)
        )
    return "\n".join(lines)


def speed_table(results: dict) -> str:
    """Milliseconds are median / 99th percentile."""
    head = ("one by one: per second", "ms", "64 together: per second", "ms", "of a step", "found")
    lines = [row("query", "documents", "backend", *head), "|---" * (3 + len(head)) + "|"]
    for kind, entry in itertools.product(("name", "question"), results["speed"]):
        cells: list[str] = []
        for way in ("single", "together"):
            times = entry[way][kind]["ms"]
            cells.append(f"{entry[way][kind]['queries_per_second']:,.0f}")
            cells.append(f"{short(times['median'])} / {short(times['99th percentile'])}")
        share = entry["together"][kind]["ms"]["median"] / 1e3 / STEP_SECONDS
        found = f"{entry['found_in_2'][kind]:.2f}"
        lines.append(row(kind, f"{entry['documents']:,}", entry["backend"], *cells, f"{share:.1%}", found))
    return "\n".join(lines)


def hostile_table(results: dict) -> str:
    """The hostile query that took longest once, and the next one."""
    lines = [row("documents", "backend", *("hostile query", "slowest, ms", "median, ms", "CPU ms") * 2)]
    lines.append("|---" * 10 + "|")
    for entry in results["speed"]:
        cells: list[str] = []
        for name, times in sorted(entry["hostile_ms"].items(), key=lambda item: -item[1]["slowest"])[:2]:
            cells += [name, *(short(times[key]) for key in ("slowest", "median", "cpu"))]
        lines.append(row(f"{entry['documents']:,}", entry["backend"], *cells))
    return "\n".join(lines)


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def short(number: float) -> str:
    """Two digits, or a whole number."""
    return f"{number:.2g}" if number < 10 else f"{number:,.0f}"


def mb(number: int) -> str:
    return f"{short(number / 1e6)} MB"


if __name__ == "__main__":
    main()
