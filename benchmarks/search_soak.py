"""Two thousand steps' worth of searches at a served index that is killed twice: is every query answered or counted?

    python benchmarks/search_soak.py    # 6 minutes on two busy cores; writes the entry search_soak of
                                        # benchmarks/results/measurements.json

Four processes search as runs do, 64 queries a step, while the server (experiment_multiturn_qa/serve_index.py, another
process, with the bundled documents) is killed by SIGKILL after a third and after two thirds of the steps, and started
again some seconds later at the same port. A step takes at least a quarter of a second, so that the clients take many
steps in an outage. Queries are the bundled questions, names, and texts that mean something to SQLite, JSON or HTTP.
Every answer is compared with that of the local index; a failure that does not overlap an outage is counted apart.
"""

import json
import multiprocessing
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

import psutil
import tyro

from common.errors import UserError
from common.search import Index, SearchError
from viewer.results import write_json

from common.plumbing.config import ROOT
from common.plumbing.machine import describe_machine
from common.plumbing.retrieval.documents import read_corpus
from common.plumbing.retrieval.protocol import whole
from common.plumbing.retrieval.remote_index import RemoteIndex
from common.plumbing.retrieval.sqlite_index import SqliteIndex, build_sqlite

RESULTS = Path(__file__).resolve().parent / "results" / "measurements.json"
SERVER = ROOT / "experiment_multiturn_qa" / "serve_index.py"
STEPS_AFTER = 3  # steps of each client after the last outage, at least
HOSTILE = ["", '"', "NEAR(a b, 2) OR -x*", "'; DROP TABLE documents; --", "half \ud83d", "\0\r\n\r\n", "x y " * 25_000]


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = 2000  # of all clients together, at least
    queries: int = 64  # a step
    clients: int = 4
    outages: int = 2
    down_seconds: float = 2.0  # between the kill and the start of the next server
    step_seconds: float = 0.25  # of a step, at least
    search_seconds: float = 5.0  # the clients' time limit
    top_k: int = 2


class Server:
    """The served index, at the same port whenever it is started."""

    def __init__(self, index: Path):
        self._index, self.url, self.cpu_seconds = index, "http://127.0.0.1:0", 0.0

    def start(self) -> None:
        port = self.url.rpartition(":")[2]
        command = [sys.executable, str(SERVER), "--index", str(self._index), "--port", port]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._read_url()

    def _read_url(self) -> None:
        lines = []
        for line in self._process.stdout:
            lines.append(line)
            if found := re.search(r"http://\S+", line):
                self.url = found[0]
                return
        raise RuntimeError("".join(lines))

    def wait_until_it_answers(self) -> None:
        while True:
            try:
                return RemoteIndex(self.url, 5).check()
            except UserError:
                if self._process.poll() is not None:
                    raise

    def kill(self) -> None:
        self.cpu_seconds += _cpu_of(self)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    report = soak(config)
    print(json.dumps(report, indent=1))
    write_json(RESULTS, {"machine": describe_machine()} | report, entry="search_soak")


def soak(config: Config, server_class: type[Server] = Server) -> dict:
    """Let the clients search, and the server die; what became of every query."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.sqlite"
        build_sqlite(path, read_corpus(str(ROOT / "data/qa_documents.jsonl"), chunk_words=100, chunk_overlap=20))
        server = server_class(path)
        server.start()
        try:
            server.wait_until_it_answers()
            return _soak(config, server, SqliteIndex(path, seconds=60))
        finally:
            server.kill()


def _soak(config: Config, server: Server, local: Index) -> dict:
    context = multiprocessing.get_context("fork")  # a client is a run that has imported everything
    steps_each = -(-config.steps // config.clients)
    progress, is_over = context.Value("l", 0), context.Event()
    pipes, processes = [], []
    for number in range(config.clients):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (config, server.url, local, number, steps_each, progress, is_over, theirs)
        processes.append(context.Process(target=_client, args=arguments))
        pipes.append(ours)
    began = time.monotonic()
    for process in processes:
        process.start()
    outages = []
    for number in range(1, config.outages + 1):
        _wait_for(lambda least=number * config.steps / (config.outages + 1): progress.value >= least)
        killed = time.monotonic()
        server.kill()
        time.sleep(config.down_seconds)
        server.start()
        server.wait_until_it_answers()
        outages.append((killed, time.monotonic()))
    is_over.set()
    reports = [pipe.recv() for pipe in pipes]
    wall = time.monotonic() - began
    for process in processes:
        process.join()
    return _summary(config, server, local, reports, outages, began, wall)


def _wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def _client(
    config: Config,
    url: str,
    local: Index,
    number: int,
    num_steps: int,
    progress: "Synchronized[int]",
    is_over: Event,
    pipe: Connection,
) -> None:
    """Search step after step; then report each step, and the seconds of this process."""
    index, rng, pool = RemoteIndex(url, config.search_seconds), random.Random(number), _queries()
    steps, begun_cpu = [], time.process_time()
    steps_after = 0
    while len(steps) < num_steps or steps_after < STEPS_AFTER:
        steps_after += is_over.is_set()
        queries = [*rng.sample(pool, config.queries - 1), rng.choice(HOSTILE)]
        begin = time.monotonic()
        answers = index.search_all(queries, config.top_k)
        end = time.monotonic()
        errors = Counter(str(answer) for answer in answers if isinstance(answer, SearchError))
        steps.append((begin, end, len(queries), len(answers), errors, queries, answers))
        with progress.get_lock():
            progress.value += 1
        time.sleep(max(0.0, begin + config.step_seconds - time.monotonic()))
    seconds, begun_cpu = time.process_time() - begun_cpu, time.process_time()
    expected, rows = {}, []
    for begin, end, num_sent, num_returned, errors, queries, answers in steps:
        wrong = 0
        for query, answer in zip(queries, answers, strict=True):
            if not isinstance(answer, SearchError):
                if query not in expected:
                    expected[query] = local.search(whole(query), config.top_k)
                wrong += answer != expected[query]
        rows.append((begin, end, num_sent, num_returned, errors, wrong))
    local_seconds = (time.process_time() - begun_cpu) / max(len(expected), 1)
    pipe.send({"steps": rows, "cpu_seconds": seconds, "local_seconds_per_query": local_seconds})


def _queries() -> list[str]:
    """The bundled questions, and the names of the documents."""
    queries = []
    for name, field in (("qa_tasks", "question"), ("qa_tasks_heldout", "question"), ("qa_documents", "id")):
        lines = (ROOT / f"data/{name}.jsonl").read_text(encoding="utf-8").splitlines()
        queries += [json.loads(line)[field] for line in lines]
    return queries


def _summary(
    config: Config,
    server: Server,
    local: Index,
    reports: list[dict],
    outages: list[tuple[float, float]],
    began: float,
    wall: float,
) -> dict:
    steps = [step for report in reports for step in report["steps"]]
    errors = Counter()
    outside, by_outage = 0, [0] * len(outages)
    for begin, end, _, _, of_step, _ in steps:
        errors += of_step
        during = [number for number, (killed, up) in enumerate(outages) if begin <= up and end >= killed]
        if during:
            by_outage[during[0]] += of_step.total()
        else:
            outside += of_step.total()
    num_returned = sum(step[3] for step in steps)
    waits = sorted(end - begin for begin, end, *_ in steps)
    answered = sorted(end - begin for begin, end, _, _, of_step, _ in steps if not of_step)
    return {
        "config": asdict(config),
        "documents": local.num_documents,
        "steps": len(steps),
        "steps_of_each_client": [len(report["steps"]) for report in reports],
        "queries_sent": sum(step[2] for step in steps),
        "answers": num_returned - errors.total(),
        "errors": errors.total(),
        "answers_unlike_the_local_index": sum(step[5] for step in steps),
        "errors_outside_outages": outside,
        "errors_by_message": dict(errors.most_common()),
        "outages": [
            {"killed_at_s": round(killed - began, 2), "answers_again_at_s": round(up - began, 2), "errors": number}
            for (killed, up), number in zip(outages, by_outage, strict=True)
        ],
        "milliseconds_of_a_step's_searches": {
            "median": round(1000 * statistics.median(answered), 2),
            "99th_percentile": round(1000 * answered[int(0.99 * len(answered))], 2),
            "longest_answered": round(1000 * answered[-1], 2),
            "longest": round(1000 * waits[-1], 2),
        },
        "wall_seconds": round(wall, 1),
        "cpu_seconds": {
            "clients": [round(report["cpu_seconds"], 1) for report in reports],
            "servers": round(server.cpu_seconds + _cpu_of(server), 1),
            "local_index_per_1000_queries": round(
                1000 * statistics.mean(report["local_seconds_per_query"] for report in reports), 2
            ),
        },
    }


def _cpu_of(server: Server) -> float:
    times = psutil.Process(server._process.pid).cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
