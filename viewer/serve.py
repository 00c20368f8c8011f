"""The page of a run at 127.0.0.1, up to date while the run goes on.

It answers three addresses and reads no file by the name that it is asked for: `/`, `/data.json`, which the page asks
for again and again, and `/samples/<step>.json`. It answers nobody who reached it by another host's name (DNS
rebinding), and its headers keep other sites from reading or framing what it shows.
"""

import json
import re
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer

from viewer.report import live_data, render, title_of
from viewer.results import open_run
from viewer.runs import Run, RunError, printable
from viewer.sampled import encode_step

ADDRESS = "127.0.0.1"
FILES = ("config.json", "summary.json", "metrics.jsonl", "samples.jsonl", "tokens.jsonl", "diagnosis.jsonl")
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


class LiveRuns:
    """What the page shows of one or two runs, made anew when a file of theirs has changed."""

    def __init__(self, directories: Sequence[Path]):
        self._runs = [open_run(directory) for directory in directories]
        self._lock = threading.Lock()
        self._data, self._seen = "", None

    def data(self) -> str:
        """JSON.

        Raises:
            RunError: a directory is gone, or a file cannot be read.
        """
        with self._lock:
            seen = [self._look(run) for run in self._runs]
            if seen != self._seen:
                for run in self._runs:
                    run.update()
                self._data, self._seen = live_data(self._runs), seen
            return self._data

    def page(self) -> str:
        return render(self.data(), title_of(self._runs), live=True)

    def samples(self, step: int) -> str | None:
        """All rows of a step of the first run, as JSON; None if there are none."""
        self.data()
        with self._lock:
            rows = self._runs[0].samples.read(step)
        return json.dumps(encode_step(rows), allow_nan=False) if rows else None

    @staticmethod
    def _look(run: Run) -> list[tuple[int, int, int] | None]:
        """Size and time of each file, and which one it is."""
        if not run.directory.is_dir():
            raise RunError(f"the run's directory {run.directory} is gone")
        seen = []
        for name in FILES:
            try:
                status = (run.directory / name).stat()
                seen.append((status.st_size, status.st_mtime_ns, status.st_ino))
            except OSError:
                seen.append(None)
        return seen


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of what `Server.runs` shows, and refuses all else."""

    server: "Server"
    timeout = 20  # seconds without a byte, after which a connection is closed
    server_version, sys_version = "viewer", ""

    def do_GET(self) -> None:
        hosts = [f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")]
        if self.headers.get_all("Host") not in ([host] for host in hosts):
            self._answer(403, f"this page is at http://{hosts[0]}/ only")
            return
        runs = self.server.runs
        try:
            if self.path == "/":
                self._answer(200, runs.page(), "text/html")
            elif self.path == "/data.json":
                self._answer(200, runs.data(), "application/json")
            elif match := re.fullmatch(r"/samples/([0-9]{1,15})\.json", self.path):
                samples = runs.samples(int(match[1]))
                found = (200, samples, "application/json") if samples else (404, "there are no samples of this step")
                self._answer(*found)
            else:
                self._answer(404, "there is no such page")
        except (RunError, OSError) as error:
            if not isinstance(error, ConnectionError | TimeoutError):
                self._answer(503, printable(error))

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, status: int, text: str, kind: str = "text/plain") -> None:
        body = text.encode("utf-8", errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Of a request that http.server itself refuses: another method, or no HTTP."""
        self.close_connection = True
        self._answer(code, "this server answers GET and HEAD only")

    def log_message(self, *_) -> None:
        """The terminal is left alone."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = sys.platform != "win32"  # there it would share a port that is in use

    def __init__(self, directories: Sequence[Path], port: int):
        self.runs = LiveRuns(directories)
        self.runs.data()  # what cannot be read is said at once
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            raise RunError(f"port {port} of {ADDRESS} cannot be used ({error.strerror}): try --port 0") from None

    def server_bind(self) -> None:
        """Without the lookup of this machine's name that http.server makes."""
        TCPServer.server_bind(self)
        self.server_port = self.server_address[1]

    def handle_error(self, request, client_address) -> None:
        """A browser that has gone away is no error of ours."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def serve(directories: Sequence[Path], port: int) -> None:
    """Serve until Ctrl-C.

    Raises:
        RunError: a directory is not a run's, or the port is in use.
    """
    with Server(directories, port) as server:
        print(f"http://{ADDRESS}:{server.server_port}/   (Ctrl-C ends it)", flush=True)
        server.serve_forever()
