"""An inference server as a child process that ends with the run, however the run ends.

A guard process stands between the two: `python -m harness.engines.server RUN COMMAND`. It starts COMMAND, and ends all
processes of COMMAND when it receives SIGTERM or when the process RUN has ended, even by SIGKILL.
"""

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import psutil

from common.errors import UserError

PATIENCE = 5.0  # seconds that the server's processes may take to end after SIGTERM
INTERVAL = 0.1  # seconds between two checks of a process
PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>


class ChildServer:
    """A server that is healthy when the constructor returns; `close` ends it with all its processes.

    It also ends when this process is killed. Ctrl-C in a terminal does not reach it.

    Args:
        port: the port of 127.0.0.1 where `command` will answer GET /health with status 200.
        log: the server's output is appended to this file.
        environment: added to this process's environment for the server.
        patience: seconds that the server may take to become healthy.
    """

    def __init__(
        self, command: list[str], port: int, log: Path, environment: dict[str, str], patience: float = 900.0
    ) -> None:
        if shutil.which(command[0]) is None:
            raise UserError(f"{command[0]} could not be started: check the path of the program")
        self._command, self._log, self._run = command, log, os.getpid()
        with log.open("ab") as file:
            self._start_of_log = file.tell()
            self._guard = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(self._run), *command],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
                env={"PYTHONUNBUFFERED": "1", **os.environ, **environment},  # otherwise its last lines are lost
            )  # fmt: skip
        try:
            self._wait_for_health(port, patience)
        except BaseException:
            self.close()
            raise

    def ending(self, within: float = 0.0) -> str | None:
        """How the server ended within some seconds, e.g. "was killed (SIGKILL)"; None while it runs.

        A connection to a killed server can break before this reports anything.
        """
        try:
            status = self._guard.wait(within)
        except subprocess.TimeoutExpired:
            return None
        number = status - 128 if status > 128 else -status  # the number of a signal
        if number in signal.valid_signals():
            return f"was killed ({signal.Signals(number).name})"
        return f"ended with status {status}"

    def _wait_for_health(self, port: int, patience: float) -> None:
        import httpx2  # not at the top, where the guard would import it, too

        deadline = time.monotonic() + patience
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            while (ending := self.ending(within=2 * INTERVAL)) is None and time.monotonic() < deadline:
                with contextlib.suppress(httpx2.HTTPError):
                    if client.get("/health").status_code == 200:
                        return
        what = f"{ending} before it was ready" if ending else f"was not ready within {patience:g} seconds"
        last = telling_line(self._log, self._start_of_log)
        said = f"the log {self._log} says: {last}" if last else f"it has written nothing to {self._log}"
        raise UserError(f"the server ({shorten(shlex.join(self._command), 100)}) {what}; {said}")

    def close(self) -> None:
        """End all processes of the server, and wait for them."""
        if os.getpid() == self._run:  # not in a forked child, which also leaves the block
            self._guard.terminate()
            self._guard.wait()


def telling_line(log: Path, start: int) -> str:
    """The last line of a log that names an error, from byte `start` on, or else the last line; without colors."""
    lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
    lines = [line for line in lines if line.strip()] or [""]
    line = next((line for line in reversed(lines) if "Error" in line), lines[-1])
    return shorten(re.sub(r"\x1b\[[0-9;]*m", "", line), 300)


shorten = partial(textwrap.shorten, placeholder=" ...")


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def guard(run: int, command: list[str]) -> int:
    """Returns the status of the command, or 128 + N if signal N killed it, once all its processes have ended."""
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))
    if sys.platform == "linux":  # orphaned server processes become children of this process
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while server.poll() is None and not stops and os.getppid() == run:
        time.sleep(INTERVAL)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        left = psutil.Process().children(recursive=True)
        for process in left:
            with contextlib.suppress(psutil.Error):
                end(process)
        psutil.wait_procs(left, timeout=PATIENCE)
    status = server.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), sys.argv[2:]))
