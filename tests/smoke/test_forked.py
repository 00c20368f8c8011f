"""A forked program ends, prints and reads like a program that is started normally."""

import os
import signal
import subprocess
import sys
import time

import forked
import psutil
import pytest

PROGRAMS = {
    "a status": "import sys; sys.exit(3)",
    "a sentence": "import sys; sys.exit('error: no')",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "Ctrl-C": "raise KeyboardInterrupt",
    "what it is given": "import os, sys; print(sys.argv, os.getcwd(), os.environ['X'], sys.stdin.read(), __name__)",
    "a thread": "import atexit, threading; atexit.register(print, 1); threading.Timer(0.1, print, [2]).start()",
    "our modules": "import sys; print([name for name in sys.modules if name.split('.')[0] in ('common', 'viewer')])",
}
# It starts another program, prints its process id, and waits.
PARENT = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]).pid, flush=True)
time.sleep(100)
"""


@pytest.fixture(autouse=True)
def forking() -> None:
    if subprocess.Popen is not forked.Popen:
        pytest.skip("programs are not forked here")


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_forked_program_ends_as_any_other(tmp_path, monkeypatch, program):
    def outcome() -> tuple[int, str, list[str]]:
        command, environment = [sys.executable, "-c", program, "argument"], os.environ | {"X": "é"}
        result = subprocess.run(command, cwd=tmp_path, env=environment, input="text", capture_output=True, text=True)
        return result.returncode, result.stdout, result.stderr.splitlines()[-1:]

    found = outcome()
    monkeypatch.setattr(subprocess, "Popen", forked.Popen.__base__)
    assert outcome() == found


def test_what_a_program_starts_is_in_its_session():
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True)
    child = psutil.Process(int(process.stdout.readline()))
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    process.stdout.close()
    deadline = time.monotonic() + 60
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
