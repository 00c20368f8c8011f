"""Calls of the functions of one file in processes of their own, with a time limit: a user's tools, and math-verify.

A function that loops, crashes or prints can harm neither the run nor other functions. Each process is a new Python that
imports nothing but the file (`tool_worker.py`), so that it needs little memory and shares no accelerator.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from common.errors import UserError

from harness.base.terminal import printable

NUM_WORKERS = 4  # processes a file, and calls at the same time
START_SECONDS = 120.0  # for a process to start and to import the file, which may read a table
WORKER = Path(__file__).with_name("tool_worker.py")
Result = TypeVar("Result")


def in_threads(function: Callable[..., Result], *items: Sequence, parallel: bool) -> list[Result]:
    """`list(map(function, *items))`, some calls at a time or one after the other.

    Threads cost more than a short call, and gain where one waits: `parallel` is for functions of a user's file.
    """
    if not parallel or len(items[0]) < 2:
        return list(map(function, *items))
    pool = ThreadPoolExecutor(NUM_WORKERS)
    try:
        return list(pool.map(function, *items))
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        if not isinstance(error, Exception):  # Ctrl-C: nobody waits for what is being computed
            close()
        raise
    finally:
        pool.shutdown()


def close() -> None:
    """End all workers, also those that are busy, whose calls return an error. Later calls start new ones."""
    for worker in list(_running):
        worker.kill()


_running: set["Worker"] = set()
atexit.register(close)


class NoAnswerError(Exception):
    """A worker did not answer, and has been ended; the text says why.

    `is_slow`: its time was up, by the clock or by the limit that the function itself has set on the processor's time.
    """

    def __init__(self, reason: str, is_slow: bool):
        super().__init__(reason)
        self.is_slow = is_slow


class Worker:
    """A process that imports a file, and then does one call at a time. It starts without being waited for."""

    def __init__(self, request: dict):
        self._socket, theirs = socket.socketpair()
        pipe, writing_end = os.pipe()
        self._lifeline = os.fdopen(writing_end, "wb", buffering=0)  # the worker ends when nobody holds it any more
        self._owner, self._is_ready = os.getpid(), False
        try:
            # -P: beside the worker's file are modules that must not be found in place of Python's own
            command = [sys.executable, "-P", str(WORKER)]
            # a session of its own: Ctrl-C in the terminal does not reach it
            self._process = subprocess.Popen(command, stdin=theirs, stdout=pipe, start_new_session=True)
        finally:
            theirs.close()
            os.close(pipe)
        _running.add(self)
        with suppress(OSError):  # it has ended already, which `when_ready` finds out
            self._socket.sendall(json.dumps(request).encode() + b"\n")

    def when_ready(self) -> "Worker":
        """Itself, once it has imported the file; NoAnswerError: it cannot, or took too long."""
        if not self._is_ready:
            self._is_ready = True
            answer = self._receive(START_SECONDS)
            if answer.startswith("error:"):
                self.end()
                raise NoAnswerError(answer, is_slow=False)
        return self

    def ask(self, request: dict, seconds: float) -> str:
        """The answer to a request, or a line that begins with "error:"; NoAnswerError: too late, or it has ended."""
        with suppress(OSError):
            self._socket.settimeout(seconds)
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        return self._receive(seconds)

    def _receive(self, seconds: float) -> str:
        deadline, answer = time.monotonic() + seconds, b""
        try:
            while not answer.endswith(b"\n"):
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))  # 0 would mean: do not wait
                part = self._socket.recv(1 << 16)
                if not part:
                    raise ConnectionResetError
                answer += part
            content = json.loads(answer)
            return content["text"] if "text" in content else f"error: {printable(content['error'], 300)}"
        except TimeoutError:
            self.end()
            raise NoAnswerError(f"gave no answer within {seconds:g} s", is_slow=True) from None
        except (OSError, json.JSONDecodeError):
            status = self.end()
            how = signal.strsignal(-status) if status < 0 else f"status {status}"
            raise NoAnswerError(f"ended its process ({how})", is_slow=status == -signal.SIGVTALRM) from None
        except BaseException:  # Ctrl-C: its answer would be taken for that to another request
            self.end()
            raise

    def is_usable(self) -> bool:
        """Whether it runs, and was started by this process and not by one of which this is a fork."""
        return self._owner == os.getpid() and self._process.poll() is None

    def kill(self) -> int:
        """Kill the process and those that it has started; the status that it ended with."""
        _running.discard(self)
        if self._owner != os.getpid():
            return 0
        if self._process.returncode is None:  # else its number may be another's
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # one that is ending already keeps its status
        return self._process.wait()

    def end(self) -> int:
        """The same, by the thread that uses it: another one could still be reading."""
        status = self.kill()
        self._socket.close()
        self._lifeline.close()
        return status


class Workers:
    """The workers of one file. They are started when they are needed, and again when one has been ended.

    Args:
        source: the text of the file `path`, as it was when the run read it; the user calls it `shown`.
        seconds: what a call may take.
        number: processes, and so calls at the same time.
        memory: bytes of address space that each may use; None: as much as there is.
        first: a function that a process calls before it is ready.
    """

    def __init__(
        self,
        path: str,
        source: bytes,
        shown: str,
        seconds: float,
        number: int = NUM_WORKERS,
        memory: int | None = None,
        first: str | None = None,
    ):
        self._shown, self._seconds, self._number = shown, seconds, number
        self._request = {"path": path, "source": source.decode("latin-1"), "memory": memory, "first": first}
        self._free = threading.BoundedSemaphore(number)
        self._idle: list[Worker] = []

    def start(self) -> None:
        """Start all processes, without waiting for them."""
        self._idle += [self._new() for _ in range(self._number - len(self._idle))]

    def start_one(self) -> None:
        """Have one ready, so that what fails only there is found before training."""
        self._idle.append(self._take())

    def ask(self, name: str, arguments: dict) -> str:
        """What a function answers, or a line that begins with "error:" if it raised; see `Worker.ask`."""
        with self._free:
            worker = self._take()
            answer = worker.ask({"name": name, "arguments": arguments}, self._seconds)
            self._idle.append(worker)
            return answer

    def call(self, name: str, arguments: dict) -> str:
        """The same for a policy, which reads also why there is no answer."""
        try:
            json.dumps(arguments)
        except (TypeError, ValueError, RecursionError) as error:
            return f"error: {type(error).__name__}: {printable(str(error), 300)}"
        try:
            return self.ask(name, arguments)
        except NoAnswerError as error:
            return f"error: {name} {error}"

    def close(self) -> None:
        """End the idle workers."""
        while self._idle:
            self._idle.pop().end()

    def _new(self) -> Worker:
        return Worker(self._request | {"search": sys.path})

    def _take(self) -> Worker:
        """An idle worker, or a new one. UserError: none can be started, which is no fault of the policy."""
        try:
            with suppress(IndexError):
                while True:
                    worker = self._idle.pop()
                    if worker.is_usable():
                        return worker.when_ready()
                    worker.end()
            return self._new().when_ready()
        except (NoAnswerError, OSError) as error:
            raise UserError(f"{self._shown}: no process for its functions can be started: {error}") from error
