"""An inference server as a child process, which ends with the run, however that ends."""

import contextlib
import http.client
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from common.errors import UserError

GUARD = Path(__file__).with_name("guard.py")
INTERVAL = 0.2  # seconds between two questions whether the server is ready
REST = 2.0  # seconds that a server has to end after SIGTERM if its guard was killed
ENDING = 30.0  # seconds within which the guard has ended every process that can be ended
SHORT = 100  # characters of a command in a sentence
TELLING = 300  # characters of a log in a sentence
END_OF_LOG = 1 << 20  # bytes of a log that are searched
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*|.)")  # what colors a log


@contextmanager
def child_server(
    command: Sequence[str], port: int, log: Path, environment: Mapping[str, str] | None = None, patience: float = 900.0
) -> Iterator["ChildServer"]:
    """Start a server, wait until it is healthy, and end it with all its processes when the block is left.

    It is ended also when this process is killed: a second process (guard.py) waits for that. Ctrl-C in a terminal
    does not reach it.

    Args:
        command: the program and its arguments.
        port: of 127.0.0.1, on which `command` will answer GET /health with status 200.
        log: what the server writes is appended to it.
        environment: what the server's environment has besides that of this process.
        patience: seconds that it may take to become healthy.

    Raises:
        UserError: the port is in use; the server could not be started, has ended, or is not healthy in time.
    """
    if os.name != "posix":
        raise UserError("a server can be started by the run on Linux and macOS only: start it yourself")
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        raise UserError(f"port {port} of this machine is in use by another program: choose another port, or end it")
    server = ChildServer(command, log, environment or {})
    try:
        server.wait_for_health(port, patience)
        yield server
    finally:
        server.end()


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens, below those that systems give to outgoing connections."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)  # not of the run's random numbers
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port


class ChildServer:
    """A server that was started, and what became of it."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]):
        self._command, self._log = [str(part) for part in command], log
        self._run, self._pid = os.getpid(), None
        self._failure: str | None = None
        self._ending: str | None = None
        self._has_ended = threading.Event()
        try:
            with log.open("ab") as file:
                self._start_of_log = file.tell()
                # -I -S: it sees neither this directory, whose http.py is not Python's, nor what slows its start down
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(GUARD), str(self._run), *self._command],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, bufsize=0, start_new_session=True,
                    env={"PYTHONUNBUFFERED": "1", **os.environ, **environment},  # or its last words are lost
                )  # fmt: skip
        except OSError as error:
            raise UserError(f"{log} cannot be written ({error.strerror}), and the server was not started") from error
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def ending(self, within: float = 0.0) -> str | None:
        """How the server ended, e.g. "was killed (SIGKILL)" or "ended with status 1"; None while it runs.

        Args:
            within: seconds to wait for that. A connection to a server that was killed breaks some milliseconds
                before this is known.
        """
        self._has_ended.wait(within)
        return self._ending

    def wait_for_health(self, port: int, patience: float) -> None:
        """Wait until GET /health is answered with 200, or raise a UserError that says why this will not happen."""
        deadline = time.monotonic() + patience
        while not is_healthy(port):
            if ending := self.ending(within=INTERVAL):
                raise UserError(self._failure or self._about(f"{ending} before it was ready"))
            if time.monotonic() > deadline:
                raise UserError(self._about(f"was not ready within {patience:g} seconds"))
        if ending := self.ending(within=INTERVAL):  # and it was another program that answered
            raise UserError(self._about(f"{ending} before it was ready"))

    def end(self) -> None:
        """End all processes of the server, and wait until they have ended."""
        if os.getpid() != self._run:  # a forked child of the run leaves the block, too
            return
        with contextlib.suppress(OSError):
            self._guard.stdin.write(b"\n")  # a child of this process that was forked may hold the pipe open
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        self._watcher.join(ENDING)

    def _watch(self) -> None:
        """Read what the guard reports; if it is killed, do its work."""
        with self._guard.stdout as reports:
            for line in reports:
                word, _, value = line.decode(errors="replace").rstrip("\n").partition(" ")
                if word == "started":
                    self._pid = int(value)
                elif word == "failed":
                    program = shlex.quote(self._command[0])
                    self._failure = f"{program} could not be started ({value}): check the path of the program"
                    self._end_with("could not be started")
                elif word == "ended":
                    self._end_with(in_words(int(value)))
        status = self._guard.wait()
        self._end_with(f"was ended because its guard {in_words(status)}")
        if status != 0 and self._pid:
            with contextlib.suppress(OSError):
                os.killpg(self._pid, signal.SIGTERM)
                time.sleep(REST)
                os.killpg(self._pid, signal.SIGKILL)

    def _end_with(self, ending: str) -> None:
        self._ending = self._ending or ending
        self._has_ended.set()

    def _about(self, ending: str) -> str:
        command = shlex.join(self._command)
        command = command if len(command) <= SHORT else command[: SHORT - 4] + " ..."
        last = telling_line(self._log, self._start_of_log)
        said = f"the log {self._log} says: {last}" if last else f"it has written nothing to {self._log}"
        return f"the server ({command}) {ending}; {said}"


def is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)  # which no proxy of the environment sees
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def in_words(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed ({signal.Signals(-status).name})"
    return f"was killed (signal {-status})"


def telling_line(log: Path, start: int) -> str:
    """The last line of a log, from byte `start` on, that names an error, or else the last one: printable, and short."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - END_OF_LOG))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    line = _ESCAPE.sub("", next((line for line in reversed(lines) if "Error" in line), lines[-1]))
    return " ".join("".join(letter if letter.isprintable() else " " for letter in line).split())[:TELLING]
