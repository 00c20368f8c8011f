"""The process that calls the functions of one file. It imports nothing but that file.

`tool_processes.py` starts it by its path. It reads and answers lines of JSON on a socket, its stdin. Its stdout is the
reading end of a pipe that never carries data; the other end closes when the parent ends, even if it is killed.
"""

import fcntl
import io
import json
import os
import resource
import signal
import sys
import threading
from contextlib import suppress
from types import ModuleType

FIRST_FREE = 3  # the number of the first file that is not stdin, stdout or stderr


class Harmless(io.RawIOBase):
    """Output of the user's code: goes to stderr, and cannot control a terminal even if it contains a model's text."""

    def __init__(self, file: int):
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:
        text = bytes(data).decode("utf-8", "replace")
        shown = "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text)
        with suppress(OSError):  # nobody reads it any more
            os.write(self._file, shown.encode("utf-8", "replace"))
        return len(data)


def main() -> None:
    channel = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE)
    _end_with_parent(fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE))
    _replace_standard_files()
    _leave_signals_to_parent()
    own_number, module = os.getpid(), None
    with open(channel, "rb") as requests, open(channel, "wb", closefd=False) as answers:
        for line in requests:
            request = json.loads(line)
            try:
                if module is None:
                    module = _import(**request)
                    answer = {"text": "ready"}
                else:
                    found = getattr(module, request["name"])(**request["arguments"])
                    answer = {"text": _as_text(found, request["longest"])}
            except BaseException as error:  # also SystemExit: an answer like any other
                answer = {"error": _describe(error)}
            if os.getpid() != own_number:  # the tool has forked, and this is its child
                os._exit(0)
            with suppress(Exception):  # the user's code may have replaced or closed it
                sys.stdout.flush()
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()


def _end_with_parent(pipe: int) -> None:
    """Make sure that this process and its children are killed as soon as the parent is gone."""

    def wait() -> None:
        os.read(pipe, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
    if hasattr(fcntl, "F_SETSIG"):
        # a thread would wait for a computation in C, such as 9**9**9 or a regular expression; the kernel does not
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgid(0))
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def _leave_signals_to_parent() -> None:
    """The parent decides whether the run ends. Signals end processes that a tool starts, as usual."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, lambda *_: None) for number in numbers]  # programs inherit ignored signals
    os.register_at_fork(after_in_child=lambda: [*map(signal.signal, numbers, previous)])


def _replace_standard_files() -> None:
    """Make stdin empty, and show only the output of Python's `print` and the like."""
    shown, nowhere = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE), os.open(os.devnull, os.O_RDWR)
    for number in range(FIRST_FREE):
        os.dup2(nowhere, number)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    printed = io.BufferedWriter(Harmless(shown))
    sys.stdout = sys.stderr = io.TextIOWrapper(printed, encoding="utf-8", errors="replace", line_buffering=True)


def _import(path: str, source: str, search: list[str], memory: int | None, first: str | None) -> ModuleType:
    """Import the file as it was when the run read it, even if it has changed, and call its function `first`."""
    with suppress(ValueError, OSError):  # the user's own limit is lower
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    sys.path[:] = search
    module = ModuleType("tools")
    module.__file__ = path
    sys.modules["tools"] = module
    exec(compile(source.encode("latin-1"), path, "exec"), module.__dict__)
    if first is not None:
        getattr(module, first)()
    return module


def _as_text(result: object, longest: int) -> str:
    """Text unchanged, other values as JSON if possible, else `str`; shortened, and always encodable."""
    if not isinstance(result, str):
        try:
            result = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            result = str(result)
    text = result if len(result) <= longest else result[:longest] + " ..."
    return text.encode("utf-8", "replace").decode()


def _describe(error: BaseException) -> str:
    text = ""
    with suppress(Exception):  # from the error's own __str__
        text = str(error)[:1000]
    return ": ".join(filter(None, [type(error).__name__, text]))


if __name__ == "__main__":
    main()
