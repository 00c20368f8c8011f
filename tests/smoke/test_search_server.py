"""experiment_multiturn_qa/serve_index.py as users and clients meet it, killed and restarted while they search."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import httpx2

from common.errors import UserError
from common.search import Hit, SearchError

from harness.search.remote_index import RemoteIndex, read_answer
from harness.search.search_server import MAX_QUERIES, MAX_TOP_K, make_app

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
                return await client.request(method, path, content=body, headers={"Content-Type": "application/json"})

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
        content = ask("POST", "/retrieve", {"queries": ["a"]} | k)[1]
        [hits] = read_answer(json.dumps(content).encode(), 1, 9)
        assert [hit.document for hit in hits] == ["d0", "d1"]  # without scores in the order of the server
        assert hits == sorted(hits, key=lambda hit: -hit.score)
    assert ask("GET", "/") == ask("GET", "/health") == (200, {"documents": 3})


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 422),
        (b"\xff", 400),
        (b"[" * 200_000, 400),
        ({}, 422),
        ({"queries": "a"}, 422),
        ({"queries": ["a", 1]}, 422),
        ({"queries": [""] * (MAX_QUERIES + 1)}, 422),
        ({"queries": ["a"], "topk": MAX_TOP_K + 1}, 422),
        ({"queries": ["broken"]}, 500),
    ],
    ids=lambda value: "" if not isinstance(value, int) else str(value),
)
def test_requests_that_cannot_be_answered_end_no_server(ask, content, status):
    assert ask("POST", "/retrieve", content)[0] == status
    assert ask("POST", "/retrieve", {"queries": ["a"]})[0] == 200


def test_a_port_out_of_range_is_refused(load_script):
    with pytest.raises(UserError, match="--port must be at least 0 and at most 65535, not 99999"):
        load_script(SCRIPT).main(["--port", "99999"])


def start(folder: Path, port: str = "0") -> tuple[subprocess.Popen, str]:
    """A server as a program, and its URL."""
    command = [sys.executable, str(ROOT / SCRIPT), "--port", port, "--corpus", "docs.jsonl"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return process, next(word for line in process.stdout for word in line.split() if word.startswith("http://"))


def test_a_server_is_killed_started_again_and_ended(tmp_path, load_script, monkeypatch):
    """Its answers are those of its documents; while it is down, there are errors. A second one finds its port taken."""
    rows = [{"id": name, "text": f"The ship {name} was built in 1846."} for name in ("Fardil", "Mabto")]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    process, url = start(tmp_path)
    port = url.rpartition(":")[2]
    try:
        index = RemoteIndex(url, 30)
        index.check()

        def ask() -> list:
            answers = index.search_all(["Fardil", "nobody", "mabto"], 1)
            return [answer if isinstance(answer, SearchError) else [hit.text for hit in answer] for answer in answers]

        found = [[rows[0]["text"]], [], [rows[1]["text"]]]
        assert ask() == found
        process.kill()
        process.wait()
        assert all(isinstance(answer, SearchError) for answer in ask())
        process, _ = start(tmp_path, port)
        assert ask() == found
        about = httpx2.get(url, trust_env=False).json()
        assert (about["documents"], len(about["content"])) == (2, 64)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UserError, match=r"--port \d+: Address already in use; --port 0 takes a free port$"):
            load_script(SCRIPT).main(["--port", port])
        with socket.create_connection(("127.0.0.1", int(port))) as client:
            client.sendall(b'POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"quer')  # and no more
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert len(errors.splitlines()) < 6
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", ["fastapi", "uvicorn"])
def test_a_missing_package_is_named(load_script, monkeypatch, name):
    monkeypatch.delitem(sys.modules, "harness.search.search_server")
    monkeypatch.delattr("harness.search.search_server")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"serving needs {name}: pip install -e '\.\[search\]'"):
        load_script(SCRIPT).main(["--port", "0"])
