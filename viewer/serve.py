"""The page of a run at 127.0.0.1, made again when a file of the run has changed.

It answers three addresses and reads no file by the name that it is asked for: `/`, `/version`, by which the page learns
that there is news, and `/samples/<step>.json`. It answers nobody who reached it by another host's name (DNS rebinding),
and its headers keep other sites from reading or framing the page.

    python -m viewer.serve RUN      # as --watch of a train.py starts it; python -m viewer is for people
"""

import hashlib
import json
import math
import os
import re
import sys
import threading
import time
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from viewer.report import live_page, whole_page
from viewer.results import open_run
from viewer.runs import RunError, printable
from viewer.sampled_rows import encode_step

ADDRESS = "127.0.0.1"
PORT = 8008
OVER = "over"  # the version of the last page of a run, which needs no server
LOOK = 5.0  # seconds: whoever has not asked for so long has gone away, or will not ask before the server has ended
FILES = ("config.json", "summary.json", "metrics.jsonl", "samples.jsonl", "tokens.jsonl", "diagnosis.jsonl")
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Handler(BaseHTTPRequestHandler):
    """Answers GET for these addresses, and refuses all else."""

    server: "Server"
    timeout = 20  # a connection is closed after this many seconds without a byte

    def do_GET(self) -> None:
        self.server.asked_at = time.monotonic()
        try:
            self._answer(*self._find())
        except (RunError, OSError) as error:
            if not isinstance(error, ConnectionError | TimeoutError):  # a browser that has gone away is no error
                self._answer(503, printable(error))
        if self.server.is_over and self.path == "/":
            self.server.has_given_last.set()

    def _find(self) -> tuple[int, str, str]:
        """The status, the text, and its content type."""
        hosts = [f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")]
        if self.headers.get_all("Host") not in ([host] for host in hosts):
            return 403, f"this page is at http://{hosts[0]}/ only", "text/plain"
        if self.path == "/":
            return 200, self.server.page(), "text/html"
        if self.path == "/version":
            return 200, self.server.version(), "text/plain"
        match = re.fullmatch(r"/samples/([0-9]{1,15})\.json", self.path)
        if match and (samples := self.server.samples(int(match[1]))):
            return 200, samples, "application/json"
        return 404, "there is no such page", "text/plain"

    def _answer(self, status: int, text: str, kind: str = "text/plain") -> None:
        body = text.encode("utf-8", errors="replace")
        self.send_response(status)
        own = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in (HEADERS | own).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        """The terminal is left alone."""


class Server(ThreadingHTTPServer):
    """Holds a run, which is read again when one of its files has changed.

    Once `is_over` is set, it gives the last page, which needs no server.
    """

    daemon_threads = True
    allow_reuse_address = sys.platform != "win32"  # there it would share a port that is in use

    def __init__(self, directory: Path, port: int):
        self._directory, self._run = directory, open_run(directory)  # an unreadable run is reported at once
        self._version, self._lock = None, threading.Lock()
        self.is_over, self.has_given_last, self.asked_at = False, threading.Event(), -math.inf
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            raise RunError(f"port {port} of {ADDRESS} cannot be used ({error.strerror}): try --port 0") from None

    def version(self) -> str:
        """A text that differs after each change of a file; RunError: the files are gone."""
        found = [self._directory / name for name in FILES if (self._directory / name).exists()]
        if not found:
            raise RunError(f"the run's directory {self._directory} is gone")
        if self.is_over:
            return OVER
        seen = [(path.name, path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino) for path in found]
        return hashlib.sha256(repr(seen).encode()).hexdigest()

    def page(self) -> str:
        with self._lock:
            version = self.version()
            if version != self._version:
                self._run = open_run(self._directory)
                whole = version == OVER
                self._page = whole_page(self._run, self._directory) if whole else live_page(self._run, version)
                self._version = version
            return self._page

    def samples(self, step: int) -> str | None:
        """All rows of a step, as JSON; None if there are none."""
        rows = self._run.samples.read(step)
        return json.dumps(encode_step(rows), allow_nan=False) if rows else None


def serve(directory: Path, port: int) -> None:
    """Serve until Ctrl-C."""
    with Server(directory, port) as server:
        print(f"http://{ADDRESS}:{server.server_port}/   (Ctrl-C ends it)", flush=True)
        server.serve_forever()


def watch(directory: Path) -> None:
    """Serve a run that goes on, and open its page in a browser, until the input ends: the run has its other end.

    Prints one sentence with the address. A browser that still looks at the end gets the last page.
    """
    try:
        server = Server(directory, PORT)
    except RunError:  # the port is taken
        server = Server(directory, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://{ADDRESS}:{server.server_port}/"
    place = f"{server.server_port}:{ADDRESS}:{server.server_port}"
    print(address if has_screen() else f"{address} (from your own computer: ssh -L {place} this-machine)", flush=True)
    for stream in (sys.stdout, sys.stderr):  # the output of a browser would be in the middle of the run's progress line
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if has_screen():
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()  # it can wait for the browser
    sys.stdin.read(1)
    if time.monotonic() - server.asked_at < LOOK:
        server.is_over = True
        server.has_given_last.wait(2 * LOOK)


def has_screen() -> bool:
    """Whether a browser would have a window: without one, Python would start one that takes over the terminal."""
    names = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in names)


if __name__ == "__main__":
    watch(Path(sys.argv[1]))
