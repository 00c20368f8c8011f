"""The page of a run at 127.0.0.1, made again when a file of the run has changed.

It answers three addresses and reads no file by the name that it is asked for: `/`, `/version`, by which the page learns
that there is news, and `/samples/<step>.json`. It answers nobody who reached it by another host's name (DNS rebinding),
and its headers keep other sites from reading or framing what it shows.
"""

import hashlib
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from viewer.report import live_page
from viewer.results import open_run
from viewer.runs import RunError, printable
from viewer.sampled_rows import encode_step

ADDRESS = "127.0.0.1"
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
        try:
            self._answer(*self._find())
        except (RunError, OSError) as error:
            if not isinstance(error, ConnectionError | TimeoutError):  # a browser that has gone away is no error
                self._answer(503, printable(error))

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
    """Holds a run, which is read again when one of its files has changed."""

    daemon_threads = True
    allow_reuse_address = sys.platform != "win32"  # there it would share a port that is in use

    def __init__(self, directory: Path, port: int):
        self._directory, self._run = directory, open_run(directory)  # an unreadable run is reported at once
        self._version, self._lock = None, threading.Lock()
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            raise RunError(f"port {port} of {ADDRESS} cannot be used ({error.strerror}): try --port 0") from None

    def version(self) -> str:
        """A text that differs after each change of a file; RunError: the files are gone."""
        found = [self._directory / name for name in FILES if (self._directory / name).exists()]
        if not found:
            raise RunError(f"the run's directory {self._directory} is gone")
        seen = [(path.name, path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino) for path in found]
        return hashlib.sha256(repr(seen).encode()).hexdigest()

    def page(self) -> str:
        with self._lock:
            version = self.version()
            if version != self._version:
                self._run = open_run(self._directory)
                self._page, self._version = live_page(self._run, version), version
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
