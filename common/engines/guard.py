"""The parent of an inference server: a small process that ends the server, whatever happens to the run.

`python -I -S guard.py RUN COMMAND...` starts COMMAND in a process group of its own, with its output in the guard's
standard error. It ends the whole group as soon as anything can be read from its standard input or that is closed (the
kernel does so when the run is killed), or when the process RUN is no longer its parent, or after SIGTERM; and what is
left of it when COMMAND itself has ended. Standard output says "started PID", or "failed WHY", then "ended STATUS".

Standard library only, and not a module of the package: it is started by its path, and needs nothing that the run does.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

PATIENCE = 10.0  # seconds that the server's first process may take to end after SIGTERM
REST = 1.0  # seconds that the others have after it: Python's resource tracker then removes shared memory
INTERVAL = 0.05  # seconds
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of <linux/prctl.h>


def main() -> None:
    run, *command = sys.argv[1:]
    stops: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: stops.append(number))
    try:
        server = Server(command)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return report("failed", getattr(error, "strerror", None) or str(error))
    report("started", server.pid)
    while server.is_left() and server.status is None and not stops and os.getppid() == int(run):
        if select.select([0], [], [], INTERVAL)[0]:
            break
    server.end()


class Server:
    """The processes of a command, in a group whose number is that of the first one."""

    def __init__(self, command: list[str]):
        self.status: int | None = None  # of the first process, when it has ended: negative for a signal
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, stderr=2, start_new_session=True, preexec_fn=bound_to_parent()
        )
        self.pid = process.pid
        process.returncode = 0  # `is_left` waits for it, and not subprocess

    def is_left(self) -> bool:
        """Whether any process is left, after those that have ended were waited for."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return True
                if pid == self.pid:
                    self.status = os.waitstatus_to_exitcode(status)
                    report("ended", self.status)
        return self._is_sent(0)

    def end(self) -> None:
        """SIGTERM to the group; later SIGKILL, also to what has left the group; return when no process is left."""
        began = seen = time.monotonic()
        self._is_sent(signal.SIGTERM)
        while self.is_left():
            now = time.monotonic()
            if self.status is None:
                seen = now
            if now > began + PATIENCE or now > seen + REST:
                self._is_sent(signal.SIGKILL)
                for pid in adopted():
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(INTERVAL)

    def _is_sent(self, number: int) -> bool:
        try:
            os.killpg(self.pid, number)
        except OSError:  # no such group; on macOS also: only zombies
            return False
        return True


def bound_to_parent() -> Callable[[], None] | None:
    """On Linux: orphans of the server become children of this process, and the server ends if this process is killed.

    Returns:
        What the server's first process does between fork and exec. SIGTERM and not SIGKILL: vLLM then ends its other
        processes, of which nobody else knows any more.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    guard = os.getpid()

    def bind() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != guard:  # it was killed before
            os._exit(1)

    return bind


def adopted() -> list[int]:
    """On Linux, the children of this process: all that is left of the server has become one of them, or will."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def report(what: str, value: object) -> None:
    with contextlib.suppress(OSError):  # the run is gone
        os.write(1, f"{what} {value}\n".encode(errors="replace"))


if __name__ == "__main__":
    main()
