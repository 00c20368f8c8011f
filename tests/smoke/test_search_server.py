"""experiment_multiturn_qa/serve_index.py as users and clients use it, killed and restarted while they search."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import httpx2
from run_files import ROOT, write_rows

from common.errors import UserError
from common.search import Hit, SearchError

from harness.search.remote_index import RemoteIndex, read_answer

SCRIPT = "experiment_multiturn_qa/serve_index.py"


class Index:
    """Finds the query itself, but nothing for "slow", and raises for "broken"."""

    num_documents, content_hash = 3, "a hash"

    def search_all(self, queries, k):
        if "broken" in queries:
            raise OSError("the disk is gone")
        return [
            SearchError("too slow") if query == "slow" else [Hit(f"d{n}", f"{query}\n{n}", -float(n)) for n in range(k)]
            for query in queries
        ]


@pytest.fixture(scope="module")
def script(load_script) -> ModuleType:
    return load_script(SCRIPT)


@pytest.fixture(scope="module")
def ask(script):
    """Send a request to the application directly; returns status and JSON."""
    transport = httpx2.ASGITransport(script.make_app(Index(), 2), raise_app_exceptions=False)

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
    for k in ({}, {"topk": None}, {"topk": 0}):
        content = ask("POST", "/retrieve", {"queries": ["a"]} | k)[1]
        [hits] = read_answer(json.dumps(content).encode(), 1, 9)
        assert [hit.document for hit in hits] == ["d0", "d1"]  # without scores, in the server's order
        assert hits == sorted(hits, key=lambda hit: -hit.score)
    assert ask("GET", "/") == ask("GET", "/health") == (200, {"documents": 3, "content": "a hash"})


@pytest.mark.parametrize(("content", "status"), [
    (b"{", 422), (b"\xff", 400), (b"[" * 200_000, 400), ({}, 422), ({"queries": ["a", 1]}, 422),
    ({"queries": [""] * 4097}, 422), ({"queries": ["a"], "topk": 1001}, 422), ({"queries": ["broken"]}, 500),
], ids=lambda value: str(value) if isinstance(value, int) else "")  # fmt: skip
def test_requests_that_cannot_be_answered_end_no_server(ask, content, status):
    assert ask("POST", "/retrieve", content)[0] == status
    assert ask("POST", "/retrieve", {"queries": ["a"]})[0] == 200


def start(folder: Path, port: str = "0") -> tuple[subprocess.Popen, str]:
    """A server as a program, and its URL."""
    command = [sys.executable, str(ROOT / SCRIPT), "--port", port, "--corpus", "docs.jsonl"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return process, next(word for line in process.stdout for word in line.split() if word.startswith("http://"))


@pytest.mark.slow
def test_a_server_is_killed_started_again_and_ended(tmp_path, script, monkeypatch):
    """The server answers from its documents; while it is down, there are errors. A second one finds its port taken."""
    monkeypatch.chdir(tmp_path)
    rows = [{"id": name, "text": f"The ship {name} was built in 1846."} for name in ("Fardil", "Mabto")]
    write_rows("docs.jsonl", rows)
    process, url = start(tmp_path)
    port = url.rpartition(":")[2]
    try:
        index = RemoteIndex(url, 30)

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
        with pytest.raises(UserError, match=r"--port \d+: Address already in use; --port 0 takes a free port$"):
            script.main(["--port", port])
        with socket.create_connection(("127.0.0.1", int(port))) as client:
            client.sendall(b'POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"quer')  # nothing more
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert len(errors.splitlines()) < 6
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", ["fastapi", "uvicorn"])
def test_what_cannot_serve_is_told(script, monkeypatch, name):
    with pytest.raises(UserError, match="--port must be at least 0 and at most 65535, not 99999"):
        script.main(["--port", "99999"])
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"serving needs {name}: pip install -e '\.\[search\]'"):
        script.main(["--port", "0"])
