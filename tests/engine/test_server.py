"""A server as a child process: it is healthy when the block begins, and nothing of it is left when the run is gone."""

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.engines.server import child_server, free_port, telling_line
from common.errors import UserError

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
ROOT = Path(__file__).resolve().parents[2]

# A server with up to three children, which are still there when it has ended: one writes a file after SIGTERM, the
# others ignore it, the last one in a process group of its own. It writes the ids of guard, server and children.
SERVER = """
import http.server, os, signal, sys, time
port, status, children = (int(argument) for argument in sys.argv[1:4])
pids = [os.getppid(), os.getpid()]
def tidy(*_):
    time.sleep(0.1)
    open(sys.argv[4] + ".tidied", "w").close()
    os._exit(0)
for number in range(children):
    signal.signal(signal.SIGTERM, tidy if number == 0 else signal.SIG_IGN)
    pids.append(os.fork())
    if not pids[-1]:
        if number == 2:
            os.setsid()
        time.sleep(600)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(status)
        self.end_headers()
listener = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
with open(sys.argv[4], "w") as file:
    file.write(" ".join(str(pid) for pid in pids) + "\\n")
listener.serve_forever()
"""

# A run that is somewhere in the block, with a child that was forked and holds copies of all that is open.
RUN = """
import os, signal, sys, time
from pathlib import Path
from common.engines.server import child_server
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell switches off for what it runs with &
with child_server(sys.argv[3:], int(sys.argv[1]), Path(sys.argv[2])):
    forked = os.fork()
    if not forked:
        time.sleep(600)
    print(forked, flush=True)
    sys.stdin.readline()
    os._exit(0)
"""


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def server(port, tmp_path):
    """Returns a server's command, with this status of its answers, and so many children."""
    script = tmp_path / "server.py"
    script.write_text(SERVER, encoding="utf-8")

    def command(children: int = 0, status: int = 200) -> list[str]:
        return [sys.executable, str(script), str(port), str(status), str(children), str(tmp_path / "pids")]

    return command


def pids_in(folder: Path) -> list[int]:
    """Those of the guard, of the server, and of its children; waits until the server has written them."""
    file = folder / "pids"
    wait_for(lambda: file.exists() and file.read_text().endswith("\n"))
    return [int(pid) for pid in file.read_text().split()]


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    """A process that has ended and that nobody waits for (a zombie) is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def program(text: str) -> list[str]:
    return [sys.executable, "-I", "-c", text]


def test_no_process_is_left_after_the_block(server, port, tmp_path):
    """Neither after an error, nor one that ignores SIGTERM and has left the group. A terminal's Ctrl-C reached none."""

    def run() -> None:
        with child_server(server(children=3), port, tmp_path / "log") as child:
            pids.extend(pids_in(tmp_path))
            assert len(pids) == 5
            assert living(pids) == pids
            assert child.ending() is None
            assert os.getpgid(0) not in [os.getpgid(pid) for pid in pids]
            raise ZeroDivisionError

    pids = []
    with pytest.raises(ZeroDivisionError):
        run()
    assert living(pids) == []
    assert (tmp_path / "pids.tidied").exists()


@pytest.mark.parametrize("how", ["killed", "killed, and its forked child lives", "exits"])
def test_no_process_is_left_when_the_run_is_gone(server, port, tmp_path, how):
    command = [
        sys.executable,
        "-c",
        RUN,
        str(port),
        str(tmp_path / "log"),
        *server(children=2 if how == "killed" else 0),
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment()) as run:
        forked = int(run.stdout.readline())
        pids = pids_in(tmp_path)
        assert living(pids) == pids
        if how == "exits":
            run.stdin.write("\n")
        else:
            if how == "killed":
                os.kill(forked, signal.SIGKILL)
            run.kill()
        run.stdin.close()
        run.wait()
        wait_for(lambda: not living(pids))
        if how != "killed":
            assert is_alive(forked)
            os.kill(forked, signal.SIGKILL)


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def test_a_server_that_is_killed_says_so_and_leaves_nothing(server, port, tmp_path):
    with child_server(server(children=3), port, tmp_path / "log") as child:
        pids = pids_in(tmp_path)
        os.kill(pids[1], signal.SIGKILL)
        assert child.ending(within=60) == "was killed (SIGKILL)"
        wait_for(lambda: not living(pids))
    assert (tmp_path / "pids.tidied").exists()


def test_nothing_is_left_of_a_server_whose_guard_is_killed(server, port, tmp_path):
    with child_server(server(children=2), port, tmp_path / "log") as child:
        pids = pids_in(tmp_path)
        os.kill(pids[0], signal.SIGKILL)
        assert child.ending(within=60) == "was ended because its guard was killed (SIGKILL)"
        wait_for(lambda: not living(pids))


def test_a_server_ends_when_run_and_guard_are_killed(server, port, tmp_path):
    command = [sys.executable, "-c", RUN, str(port), str(tmp_path / "log"), *server()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment()) as run:
        forked = int(run.stdout.readline())
        pids = pids_in(tmp_path)
        for pid in (run.pid, pids[0], forked):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not living(pids))


def test_ctrl_c_ends_the_wait_for_a_server(server, port, tmp_path):
    command = [sys.executable, "-c", RUN, str(port), str(tmp_path / "log"), *server(status=503)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment()) as run:
        pids = pids_in(tmp_path)
        wait_for(lambda: (tmp_path / "log").read_text().count("503") > 1)  # it has asked, and asks again
        run.send_signal(signal.SIGINT)
        assert run.stderr.read().endswith("KeyboardInterrupt\n")
    assert living(pids) == []


def test_a_server_that_ends_before_it_is_ready(port, tmp_path):
    """The sentence has the last line with an error, without colors; what an earlier server wrote is kept, not read."""
    log = tmp_path / "log"
    log.write_text("OldError: of an earlier run\n", encoding="utf-8")
    text = "print('\\x1b[31mValueError: 7\\x07 is odd ' + 9999 * 'x'); print('good bye'); raise SystemExit(3)"
    with pytest.raises(UserError) as caught, child_server(program(text), port, log):
        pytest.fail("it is not ready")
    sentence = str(caught.value)
    assert f"ended with status 3 before it was ready; the log {log} says: ValueError: 7 is odd xxx" in sentence
    assert len(sentence) < 600
    assert log.read_text(encoding="utf-8").startswith("OldError: of an earlier run\n\x1b[31mValueError")


def test_a_server_that_does_not_become_healthy(server, port, tmp_path):
    command = ["sh", "-c", 'echo $PPID $$ > pids; exec "$@"', "sh", *server(status=503)]
    command[2] = command[2].replace("pids", str(tmp_path / "pids"))
    sentence = "the server (sh -c 'echo $PPID $$ > "
    with pytest.raises(UserError) as caught, child_server(command, port, tmp_path / "log", patience=1.0):
        pytest.fail("it is not ready")
    assert str(caught.value).startswith(sentence)
    assert " ...) was not ready within 1 seconds; " in str(caught.value)
    assert living(pids_in(tmp_path)) == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("loading\nready\n\n", "ready"),
        ("AnError: 1\rBError: 2\rend", "BError: 2"),
        ("\x9b2J\ta\u202e b\xff", "2J a bÿ"),
    ],
)
def test_the_line_of_a_log_that_tells_most(tmp_path, text, line):
    before = "OldError: of an earlier run\n"
    (tmp_path / "log").write_text(before + text, encoding="utf-8", newline="")
    assert telling_line(tmp_path / "log", len(before)) == line


@pytest.mark.parametrize(("name", "reason"), [("missing", "No such file or directory"), ("text", "Permission denied")])
def test_a_program_that_cannot_be_started(port, tmp_path, name, reason):
    (tmp_path / "text").write_text("no program", encoding="utf-8")
    sentence = f"{tmp_path / name} could not be started ({reason}): check"
    with pytest.raises(UserError, match=re.escape(sentence)), child_server([tmp_path / name], port, tmp_path / "log"):
        pytest.fail("it is not ready")


def test_a_port_that_is_in_use_is_refused(server, port, tmp_path):
    other, sentence = socket.create_server(("127.0.0.1", port)), f"port {port} .* is in use"
    with other, pytest.raises(UserError, match=sentence), child_server(server(), port, tmp_path / "log"):
        pytest.fail("it is not ready")
    assert not (tmp_path / "log").exists()


def test_what_a_server_writes_goes_to_its_log(server, port, tmp_path, monkeypatch):
    """However much it is, and all of it; and its environment is that of the run, with additions."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    text = "import os, sys; print(os.environ['ADDED'], os.environ['PATH']); print(20 * 2**20 * 'x', file=sys.stderr)"
    script = tmp_path / "server.py"
    script.write_text(f"{text}{SERVER}", encoding="utf-8")
    with child_server(server(), port, tmp_path / "log", {"ADDED": "yes"}):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 200
        connection.close()
    written = (tmp_path / "log").read_bytes()
    assert len(written) > 20 * 2**20
    assert f"yes {os.environ['PATH']}\n".encode() in written
    assert b"GET /v1/models" in written


def test_a_log_that_cannot_be_written(server, port, tmp_path):
    log = tmp_path / "no folder" / "log"
    with pytest.raises(UserError, match=f"{log} cannot be written"), child_server(server(), port, log):
        pytest.fail("it is not ready")
