"""Call the functions of one file in separate processes with a time limit: a user's tools, and math-verify.

A function that loops, crashes or prints cannot harm the run or other functions. Each process is a new Python that
imports only the file (`tool_worker.py`), so that it needs little memory and shares no accelerator.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from common.errors import UserError

from harness.base.terminal import printable

NUM_WORKERS = 4  # processes per file, and calls at the same time
START_SECONDS = 120.0  # for a process to start and to import the file, which may read a table
WORKER = Path(__file__).with_name("tool_worker.py")
Result = TypeVar("Result")


def in_threads(function: Callable[..., Result], *items: Sequence, parallel: bool) -> list[Result]:
    """`list(map(function, *items))`, with several calls at a time or one after the other.

    Threads cost more than a short call, and gain time if a call waits: `parallel` is for functions of a user's file.
    """
    if not parallel or len(items[0]) < 2:
        return list(map(function, *items))
    pool = ThreadPoolExecutor(NUM_WORKERS)
    try:
        return list(pool.map(function, *items))
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        if not isinstance(error, Exception):  # Ctrl-C: nobody needs the pending results
            close()
        raise
    finally:
        pool.shutdown()


_running: set["Worker"] = set()


@atexit.register
def close() -> None:
    """End all workers, even busy ones, whose calls then return an error. Later calls start new workers."""
    for worker in list(_running):
        worker.kill()


class NoAnswerError(Exception):
    """A worker gave no answer, and was ended. `is_slow`: by the clock, or by its function's own limit of CPU time."""

    def __init__(self, reason: str, is_slow: bool):
        super().__init__(reason)
        self.is_slow = is_slow


class Worker:
    """A process that imports a file, and then executes one call at a time. Its start does not block."""

    def __init__(self, request: dict):
        self._socket, theirs = socket.socketpair()
        self._answers = self._socket.makefile("rb")
        pipe, writing_end = os.pipe()
        self._lifeline = os.fdopen(writing_end, "wb", buffering=0)  # the worker ends when nobody holds this any more
        self._is_ready = False
        try:
            # -P: modules beside the worker's file must not shadow Python's own
            command = [sys.executable, "-P", str(WORKER)]
            # its own session: Ctrl-C in the terminal does not reach it
            self._process = subprocess.Popen(command, stdin=theirs, stdout=pipe, start_new_session=True)
        finally:
            theirs.close()
            os.close(pipe)
        _running.add(self)
        self._send(json.dumps(request))

    def when_ready(self) -> "Worker":
        """Returns the worker once it has imported the file; NoAnswerError if it cannot, or takes too long."""
        if not self._is_ready:
            self._is_ready = True
            answer = self._receive(START_SECONDS)
            if answer.startswith("error:"):
                self.end()
                raise NoAnswerError(answer.removeprefix("error: "), is_slow=False)
        return self

    def ask(self, request: str, seconds: float) -> str:
        """The answer to a request, or a line that begins with "error:"; NoAnswerError: too late, or it has ended."""
        self._socket.settimeout(seconds)
        self._send(request)
        return self._receive(seconds)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> int:
        """Kill the process and its children; returns its exit status."""
        _running.discard(self)
        if self._process.returncode is None:  # otherwise another process may have its number
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # a process that is already ending keeps its status
        return self._process.wait()

    def end(self) -> int:
        """The same, called by the thread that uses the worker: another thread could still be reading."""
        status = self.kill()
        for file in (self._answers, self._socket, self._lifeline):
            file.close()
        return status

    def _send(self, request: str) -> None:
        with suppress(OSError):  # it has already ended; `_receive` will notice
            self._socket.sendall(request.encode() + b"\n")

    def _receive(self, seconds: float) -> str:
        try:
            self._socket.settimeout(seconds)
            content = json.loads(self._answers.readline())
            return content["text"] if "text" in content else f"error: {printable(content['error'], 300)}"
        except TimeoutError:
            self.end()
            raise NoAnswerError(f"gave no answer within {seconds:g} s", is_slow=True) from None
        except (OSError, json.JSONDecodeError):
            status = self.end()
            how = signal.strsignal(-status) if status < 0 else f"status {status}"
            raise NoAnswerError(f"ended its process ({how})", is_slow=status == -signal.SIGVTALRM) from None
        except BaseException:  # Ctrl-C: the next request would read this one's answer
            self.end()
            raise


@dataclass
class Workers:
    """The workers of one file. They start on demand, and again after one has been ended."""

    path: str
    source: bytes  # the text of the file when the run read it
    shown: str  # the user's name for the file
    seconds: float  # limit for a call
    number: int = NUM_WORKERS  # processes, and therefore calls at the same time
    memory: int | None = None  # bytes of address space per process; None: unlimited
    first: str | None = None  # a function that a process calls before it is ready
    longest: int = 4000  # characters of an answer; a policy hardly reads more

    def __post_init__(self) -> None:
        self._free = threading.BoundedSemaphore(self.number)
        self._idle: list[Worker] = []

    def start(self) -> None:
        """Start all processes, without waiting for them."""
        self._idle += [self._new() for _ in range(self.number - len(self._idle))]

    def start_one(self) -> None:
        """Start one and wait for it, so that faults that show only there are found before training."""
        self._idle.append(self._take())

    def ask(self, name: str, arguments: dict) -> str:
        """The result of a function, or a line that begins with "error:" if it raised; see `Worker.ask`."""
        request = json.dumps({"name": name, "arguments": arguments, "longest": self.longest})
        with self._free:
            worker = self._take()
            answer = worker.ask(request, self.seconds)
            self._idle.append(worker)
            return answer

    def call(self, name: str, arguments: dict) -> str:
        """The same for a policy, which also reads why there is no answer."""
        try:
            return self.ask(name, arguments)
        except NoAnswerError as error:
            return f"error: {name} {error}"

    def close(self) -> None:
        """End the idle workers."""
        while self._idle:
            self._idle.pop().end()

    def _new(self) -> Worker:
        source = self.source.decode("latin-1")
        return Worker(
            {"path": self.path, "source": source, "search": sys.path, "memory": self.memory, "first": self.first}
        )

    def _take(self) -> Worker:
        """An idle worker, or a new one. UserError: none can be started, which is not the policy's fault."""
        try:
            with suppress(IndexError):
                while True:
                    worker = self._idle.pop()
                    if worker.is_running():
                        return worker.when_ready()
                    worker.end()
            return self._new().when_ready()
        except (NoAnswerError, OSError) as error:
            raise UserError(f"{self.shown}: no process for its functions can be started: {error}") from error
