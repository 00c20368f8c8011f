"""Calls of a user's functions in processes of their own, with a time limit.

A function that loops, crashes or prints can harm neither the run nor other functions: whatever happens becomes a text
that the policy reads.
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
from types import ModuleType
from typing import TypeVar

from common.errors import UserError

from common.plumbing.terminal import printable

NUM_WORKERS = 4  # processes a file, and calls at the same time
START_SECONDS = 60.0  # for a process to start and to import the user's file, which may read a table
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
    """A worker did not answer, and has been ended; the text says why."""


class Worker:
    """A process that has imported a user's file, and does one call at a time."""

    def __init__(self, request: dict):
        self._socket, theirs = socket.socketpair()
        pipe, writing_end = os.pipe()
        self._lifeline = os.fdopen(writing_end, "wb", buffering=0)  # the worker ends when nobody holds it any more
        try:
            # -P: beside the worker's file are modules that must not be found in place of Python's own
            command = [sys.executable, "-P", str(WORKER)]
            self._process = subprocess.Popen(command, stdin=theirs, stdout=pipe, start_new_session=True)
        finally:
            theirs.close()
            os.close(pipe)
        _running.add(self)
        error = self.ask(request, START_SECONDS)
        if error:
            self.end()
            raise NoAnswerError(error)

    def ask(self, request: dict, seconds: float) -> str:
        """The answer to a request: a text, or a line that begins with "error:".

        Raises:
            NoAnswerError: it took too long, or the process ended.
        """
        deadline = time.monotonic() + seconds
        answer = b""
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(json.dumps(request).encode() + b"\n")
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
            raise NoAnswerError(f"gave no answer within {seconds:g} s") from None
        except (OSError, json.JSONDecodeError):
            raise NoAnswerError(f"ended its process ({self.end()})") from None
        except BaseException:  # Ctrl-C: its answer would be taken for that to another request
            self.end()
            raise

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> str:
        """Kill the process and those that it has started; what it ended with."""
        if self._process.returncode is None:  # else its number may be another's
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # one that is ending already keeps its status
        status = self._process.wait()
        _running.discard(self)
        return f"{signal.strsignal(-status)}" if status < 0 else f"status {status}"

    def end(self) -> str:
        """The same, by the thread that uses it: another one could still be reading."""
        status = self.kill()
        self._socket.close()
        self._lifeline.close()
        return status


class Workers:
    """The workers of one file. They are started when they are needed, and again when one has been ended."""

    def __init__(self, module: ModuleType, source: bytes, shown: str, seconds: float):
        self._module, self._source, self._shown, self._seconds = module, source, shown, seconds
        self._free = threading.BoundedSemaphore(NUM_WORKERS)
        self._idle: list[Worker] = []

    def call(self, name: str, arguments: dict) -> str:
        try:
            json.dumps(arguments)
        except (TypeError, ValueError, RecursionError) as error:
            return f"error: {type(error).__name__}: {printable(str(error), 300)}"
        with self._free:
            worker = self._take()
            try:
                answer = worker.ask({"name": name, "arguments": arguments}, self._seconds)
            except NoAnswerError as error:
                return f"error: {name} {error}"
            self._idle.append(worker)
            return answer

    def start_one(self) -> None:
        self._idle.append(self._take())

    def _take(self) -> Worker:
        """An idle worker, or a new one.

        Raises:
            UserError: none can be started. A policy must not learn that a tool is broken when the machine is.
        """
        with suppress(IndexError):
            while True:
                worker = self._idle.pop()
                if worker.is_alive():
                    return worker
                worker.end()
        name, path = self._module.__name__, self._module.__file__
        request = {"name": name, "path": path, "source": self._source.decode("latin-1"), "search": sys.path}
        try:
            worker = Worker(request)
        except (NoAnswerError, OSError) as error:
            raise UserError(f"--tools {self._shown}: no process for its functions can be started: {error}") from error
        return worker
