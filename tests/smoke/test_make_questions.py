"""experiment_multiturn_qa/make_questions.py as users run it: killed in the middle, and given again."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "experiment_multiturn_qa/make_questions.py"
NUM_DOCUMENTS = 12
HANGS_AT = 9  # the request that is not answered, as long as `open` is not set


@pytest.fixture
def server() -> Iterator[SimpleNamespace]:
    """Chat completions that ask who keeps the tower in the prompt."""
    state = SimpleNamespace(num_requests=0, keys=set(), hangs=threading.Event(), open=threading.Event())

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.num_requests += 1
            state.keys.add(self.headers["Authorization"])
            if state.num_requests == HANGS_AT:
                state.hangs.set()
                state.open.wait(60)
            name = re.search(r"Tower (\w+) is kept", body["messages"][0]["content"])[1]
            reply = json.dumps({"question": f"Who keeps tower {name}?", "answer": f"Keeper{name}"})
            content = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
            try:
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except OSError:  # the client was killed
                pass

        def log_message(self, *_) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{http.server_port}/v1"
    threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
    yield state
    state.open.set()
    http.shutdown()
    http.server_close()


def test_a_killed_run_goes_on_and_keeps_the_key_to_itself(server, tmp_path, load_script, monkeypatch, capfd):
    """Its lines are complete, no question is paid for twice but those in flight, and none is made twice."""
    rows = [{"id": f"d{n}", "text": f"Tower t{n} is kept by Keepert{n}."} for n in range(NUM_DOCUMENTS)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--corpus", "docs.jsonl", "--output", "out.jsonl", "--per-part", "1", "--requests-at-once", "2"]
    flags += ["--base-url", server.url, "--served-model", "m"]
    monkeypatch.chdir(tmp_path)
    for name, value in {"PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "sk-secret", "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with subprocess.Popen([sys.executable, str(ROOT / SCRIPT), *flags]) as process:
        try:
            assert server.hangs.wait(60)
        finally:
            process.kill()
    kept = (tmp_path / "out.jsonl").read_text()
    made = [json.loads(line) for line in kept.splitlines()]
    assert kept.endswith("\n")
    assert 4 <= len(made) < HANGS_AT
    server.open.set()
    load_script(SCRIPT).main(flags)
    printed = capfd.readouterr()  # by both
    assert f"out.jsonl: {NUM_DOCUMENTS} questions (written {NUM_DOCUMENTS}; easy {NUM_DOCUMENTS})" in printed.out
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found[: len(made)] == made
    assert sorted(row["supporting"][0] for row in found) == sorted(row["id"] for row in rows)
    assert server.num_requests <= NUM_DOCUMENTS + 2 * 2
    assert server.keys == {"Bearer sk-secret"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files if path.parent == tmp_path} == {"docs.jsonl", "out.jsonl"}
    assert not any(b"sk-secret" in path.read_bytes() for path in files)
    assert "sk-secret" not in printed.out + printed.err
