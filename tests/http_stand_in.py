"""A server on a real socket, which answers, breaks off or hangs as a test says."""

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Reply = Callable[[dict, Callable[[bytes], object]], bytes | None]  # of a request's JSON, and a way to send a part


def http(body: bytes, status: str = "200 OK", **headers: object) -> bytes:
    headers = {"Content-Length": len(body), "Connection": "close"} | headers
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


class Server(socketserver.ThreadingTCPServer):
    """`reply` answers; `asked`, `lines` and `headers` are of the requests so far."""

    daemon_threads, request_queue_size = True, 64

    def __init__(self, reply: Reply):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.url = reply, f"http://127.0.0.1:{self.server_address[1]}"
        self.asked, self.lines, self.headers = [], [], []
        self.released = threading.Event()  # hanging replies wait for it, but not forever

    def handle_error(self, *_) -> None:  # a client that is gone
        pass


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        line, headers = self.rfile.readline().decode(), {}
        while header := self.rfile.readline().decode().strip():
            name, _, value = header.partition(": ")
            headers[name.lower()] = value
        asked = json.loads(self.rfile.read(int(headers["content-length"])))
        for kept, value in ((self.server.asked, asked), (self.server.lines, line), (self.server.headers, headers)):
            kept.append(value)
        self.wfile.write(self.server.reply(asked, self.wfile.write) or b"")


@contextmanager
def serving(reply: Reply) -> Iterator[Server]:
    with Server(reply) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()
