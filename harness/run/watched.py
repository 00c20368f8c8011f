"""The live page of a run, from a process of its own: it takes no time from the run, and shares nothing with it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.base.terminal import say

PATIENCE = 15.0  # seconds; the server waits at most ten for a browser to take the last page


@contextmanager
def watched(directory: Path) -> Iterator[None]:
    """Serve the page of a run within the block, opened in a browser where there is a screen.

    The server ends with the block: at the first byte of its input, or when the input ends because the run was killed.
    Ctrl-C in a terminal does not reach it.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-P", "-m", "viewer.serve", str(directory)]
    server = subprocess.Popen(command, **pipes, start_new_session=True)
    try:
        address = server.stdout.readline().strip()
        say(f"the run's page, live: {address}" if address else "--watch: the page could not be served; the run goes on")
        yield
    finally:
        with suppress(OSError):  # it has ended already
            server.stdin.write("x")  # an end alone would not be seen while a forked process has the pipe, too
            server.stdin.close()
        try:
            server.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            server.kill()
