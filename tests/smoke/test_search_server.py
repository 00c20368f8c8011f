"""experiment_multiturn_qa/serve_index.py as users and clients meet it, killed and restarted while they search."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from multiprocessing import get_context
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import httpx2

from common.errors import UserError
from common.search import Hit, SearchError

from common.plumbing.retrieval.remote_index import RemoteIndex
from common.plumbing.retrieval.server import MAX_BYTES, MAX_QUERIES, MAX_TOP_K, make_app

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "experiment_multiturn_qa/serve_index.py"


class Index:
    """Finds the query itself, but nothing for "slow", and raises for "broken"."""

    def search_all(self, queries, k):
        if "broken" in queries:
            raise OSError("the disk is gone")
        return [
            SearchError("too slow") if query == "slow" else [Hit(f"d{n}", f"{query}\n{n}", -float(n)) for n in range(k)]
            for query in queries
        ]


@pytest.fixture(scope="module")
def ask():
    """Send a request to the application itself, and get status and JSON."""
    transport = httpx2.ASGITransport(make_app(Index(), 2, {"documents": 3}), raise_app_exceptions=False)

    def ask(method: str, path: str, content: object = None) -> tuple[int, object]:
        async def send():
            body = content if isinstance(content, bytes) or content is None else json.dumps(content).encode()
            async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.request(method, path, content=body)

        answer = asyncio.run(send())
        is_json = answer.headers.get("content-type") == "application/json"
        return answer.status_code, answer.json() if is_json else answer.text

    return ask


def test_the_answers_are_search_r1s(ask):
    document = {"id": "d0", "contents": "a\n0"}
    scored = {"queries": ["a", "slow"], "topk": 1, "return_scores": True}
    assert ask("POST", "/retrieve", scored) == (200, {"result": [[{"document": document, "score": 0.0}], None]})
    assert ask("POST", "/retrieve", {"queries": ["a"], "topk": 1}) == (200, {"result": [[document]]})
    assert ask("POST", "/retrieve", {"queries": []}) == (200, {"result": []})
    for k in ({}, {"topk": None}, {"topk": 0}):
        assert len(ask("POST", "/retrieve", {"queries": ["a"]} | k)[1]["result"][0]) == 2
    half = ask("POST", "/retrieve", b'{"queries": ["half \\ud83d", "b"], "topk": 1}')[1]["result"]
    assert [hits[0]["contents"] for hits in half] == ["half ?\n0", "b\n0"]
    assert ask("GET", "/") == ask("GET", "/health") == (200, {"documents": 3})


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"{", 400, "not JSON"),
        (b"\xff", 400, "not JSON"),
        (b"[" * 200_000, 400, "not JSON"),
        (b" " * (MAX_BYTES + 1), 413, f"{MAX_BYTES} bytes"),
        ([], 422, "valid dictionary"),
        ({}, 422, "queries: Field required"),
        ({"queries": "a"}, 422, "queries: Input should be a valid list"),
        ({"queries": ["a", 1]}, 422, "queries.1: Input should be a valid string"),
        ({"queries": [""] * (MAX_QUERIES + 1)}, 422, f"at most {MAX_QUERIES} items"),
        ({"queries": ["a"], "topk": -1}, 422, "topk: Input should be greater than or equal to 0"),
        ({"queries": ["a"], "topk": MAX_TOP_K + 1}, 422, f"less than or equal to {MAX_TOP_K}"),
        ({"queries": ["a"], "return_scores": "maybe"}, 422, "return_scores"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_requests_that_make_no_sense_are_refused(ask, content, status, message):
    answered, content = ask("POST", "/retrieve", content)
    assert answered == status
    assert message in content["detail"]


def test_an_index_that_breaks_ends_no_server(ask):
    assert ask("POST", "/retrieve", {"queries": ["broken"]})[0] == 500
    assert ask("POST", "/retrieve", {"queries": ["a"]})[0] == 200


def test_a_server_that_ends_says_so_to_who_still_waits():
    has_begun, released, sent = threading.Event(), threading.Event(), []

    class Slow:
        def search_all(self, queries, k):
            has_begun.set()
            released.wait(30)
            return []

    async def receive() -> dict:
        return {"type": "http.request", "body": b'{"queries": ["a"]}'}

    async def send(message: dict) -> None:
        sent.append(message)

    async def end_during_a_search() -> None:
        scope = {"type": "http", "method": "POST", "path": "/retrieve", "headers": [], "query_string": b""}
        request = asyncio.create_task(make_app(Slow(), 2, {})(scope, receive, send))
        await asyncio.to_thread(has_begun.wait, 30)
        request.cancel()  # as uvicorn does when its time to end is over
        await request
        released.set()

    asyncio.run(end_during_a_search())
    assert sent[0]["status"] == 503


def test_a_port_out_of_range_is_refused(load_script):
    with pytest.raises(UserError, match="--port must be 0 to 65535, not 99999"):
        load_script(SCRIPT).main(["--port", "99999"])


def test_a_server_starts_answers_and_ends_without_a_traceback(tmp_path, load_script, monkeypatch):
    """As a program; meanwhile a second one finds its port taken."""
    rows = [{"id": name, "text": f"The ship {name} was built in 1846."} for name in ("Fardil", "Mabto")]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(ROOT / SCRIPT), "--port", "0", "--corpus", "docs.jsonl"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = next(word for line in process.stdout for word in line.split() if word.startswith("http://"))
        index = RemoteIndex(url, 30)
        index.check()
        texts = [[hit.text for hit in hits] for hits in index.search_all(["Fardil", "nobody", "mabto"], 1)]
        assert texts == [[rows[0]["text"]], [], [rows[1]["text"]]]
        about = httpx2.get(url, trust_env=False).json()
        assert (about["documents"], len(about["content"])) == (2, 64)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UserError, match=r"--port \d+: Address already in use; --port 0 takes a free port$"):
            load_script(SCRIPT).main(["--port", url.rpartition(":")[2]])
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert errors.strip() in ("", "interrupted")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", ["fastapi", "uvicorn"])
def test_a_missing_package_is_named(load_script, monkeypatch, name):
    monkeypatch.delitem(sys.modules, "common.plumbing.retrieval.server")
    monkeypatch.delattr("common.plumbing.retrieval.server")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"serving needs {name}: pip install -r requirements-search.txt"):
        load_script(SCRIPT).main(["--port", "0"])


@pytest.mark.slow
def test_no_row_is_lost_when_the_server_is_killed(load_script):
    """A short form of benchmarks/search_soak.py; its servers are forks of this process, which start at once."""
    soak, serve = load_script("benchmarks/search_soak.py"), load_script(SCRIPT)

    class ForkedServer(soak.Server):
        def start(self) -> None:
            reading, writing = os.pipe()

            def run() -> None:
                os.dup2(writing, 1)
                sys.stdout = os.fdopen(1, "w", buffering=1)
                serve.main(["--index", str(self._index), "--port", self.url.rpartition(":")[2]])

            self._process = get_context("fork").Process(target=run)
            self._process.start()
            self._process.poll, self._process.wait = lambda: self._process.exitcode, self._process.join
            os.close(writing)
            self._process.stdout = os.fdopen(reading)
            self._read_url()

    config = soak.Config(steps=20, queries=20, outages=2, step_seconds=0.05, down_seconds=0.3)
    report = soak.soak(config, ForkedServer)
    assert report["queries_sent"] == report["answers"] + report["errors"] == 20 * report["steps"]
    assert len(report["steps_of_each_client"]) == 4
    assert min(report["steps_of_each_client"]) >= 5
    assert report["answers"] > 0
    assert report["errors"] > 0  # one of the two outages can fall between the steps of all clients
    assert sum(outage["errors"] for outage in report["outages"]) == report["errors"]
    assert report["errors_outside_outages"] == 0
    assert report["answers_unlike_the_local_index"] == 0
