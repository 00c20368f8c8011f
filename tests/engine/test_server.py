"""A server as a child process: it is healthy at the beginning, and leaves nothing behind when the run is gone."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from run_files import ROOT

from common.errors import UserError

from harness.engines.server import ChildServer, free_port

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="what is left is found by Linux")]

# A server with up to three children that outlive it: one writes a file after SIGTERM, the others ignore it, and the
# last one is in its own process group. It writes the ids of guard, server and children.
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
print(os.environ["ADDED"], flush=True)
with open(sys.argv[4], "w") as file:
    file.write(" ".join(str(pid) for pid in pids) + "\\n")
listener.serve_forever()
"""

# A run with a server, and with a forked child that holds copies of everything open.
RUN = """
import os, sys, time
from pathlib import Path
from harness.engines.server import ChildServer
server = ChildServer(sys.argv[3:], int(sys.argv[1]), Path(sys.argv[2]), {"ADDED": "yes"})
forked = os.fork()
if not forked:
    time.sleep(600)
print(forked, flush=True)
sys.stdin.readline()
os._exit(0)
"""


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def command(port, tmp_path):
    """Returns the command of a server that answers with this status and has so many children."""
    script = tmp_path / "server.py"
    script.write_text(SERVER, encoding="utf-8")

    def command(children: int = 0, status: int = 200) -> list[str]:
        return [sys.executable, str(script), str(port), str(status), str(children), str(tmp_path / "pids")]

    return command


@pytest.fixture
def start(port, tmp_path):
    return lambda command, **settings: ChildServer(command, port, tmp_path / "log", {"ADDED": "yes"}, **settings)


def processes_in(folder: Path) -> list[psutil.Process]:
    """The guard, the server, and its children; waits until the server has written their ids."""
    file = folder / "pids"
    wait_for(lambda: file.exists() and file.read_text().endswith("\n"))
    return [psutil.Process(int(pid)) for pid in file.read_text().split()]


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Without processes that have ended but are not yet reaped."""
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("is_killed", [False, True])
def test_no_process_is_left_of_a_server(command, start, tmp_path, is_killed):
    """Not even one that ignores SIGTERM or has left the group. A terminal's Ctrl-C reaches none."""
    with closing(start(command(children=3))) as server:
        processes = processes_in(tmp_path)
        assert len(living(processes)) == 5
        assert server.ending() is None
        assert os.getpgid(0) not in [os.getpgid(process.pid) for process in processes]
        if is_killed:
            processes[1].kill()
            assert server.ending(within=60) == "was killed (SIGKILL)"
            assert not living(processes)
    assert not living(processes)
    assert (tmp_path / "pids.tidied").exists()
    assert "yes\n" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("how", ["killed", "killed, and its forked child lives", "exits"])
def test_no_process_is_left_when_the_run_is_gone(command, port, tmp_path, how):
    run = [sys.executable, "-c", RUN, str(port), str(tmp_path / "log"), *command(children=2 if how == "killed" else 0)]
    pipe = subprocess.PIPE
    with subprocess.Popen(run, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as run:
        forked = psutil.Process(int(run.stdout.readline()))
        processes = processes_in(tmp_path)
        assert living(processes) == processes
        if how == "exits":
            run.stdin.write("\n")
        else:
            run.kill()
        if how == "killed":
            forked.kill()
        run.stdin.close()
        run.wait()
        wait_for(lambda: not living(processes))
        if how != "killed":
            forked.kill()


def test_ctrl_c_ends_the_wait_for_a_server(command, port, tmp_path):
    run = [sys.executable, "-c", RUN, str(port), str(tmp_path / "log"), *command(status=503)]
    with subprocess.Popen(run, stderr=subprocess.PIPE, text=True, cwd=ROOT) as run:
        processes = processes_in(tmp_path)
        wait_for(lambda: (tmp_path / "log").read_text().count("503") > 1)  # it has asked once, and asks again
        run.send_signal(signal.SIGINT)
        assert run.stderr.read().endswith("KeyboardInterrupt\n")
    assert not living(processes)


def test_a_server_that_does_not_become_healthy(command, start, tmp_path):
    with pytest.raises(UserError, match=r"^the server \(.* \.\.\.\) was not ready within 1 seconds; the log "):
        start(command(status=503), patience=1.0)
    assert not any(psutil.pid_exists(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_a_server_that_ends_before_it_is_ready(start, tmp_path):
    """The sentence has the last line with an error, without colors; an earlier server's output is kept, not read."""
    log = tmp_path / "log"
    log.write_text("OldError: of an earlier run\n", encoding="utf-8")
    text = "print('\\x1b[31mValueError: 7 is odd ' + 9999 * 'x'); print('good bye'); raise SystemExit(3)"
    with pytest.raises(UserError) as caught:
        start([sys.executable, "-c", text])
    assert str(caught.value).endswith(f"ended with status 3 before it was ready; the log {log} says: "
                                      "ValueError: 7 is odd ...")  # fmt: skip
    assert log.read_text(encoding="utf-8").startswith("OldError: of an earlier run\n\x1b[31mValueError")
