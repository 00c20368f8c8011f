"""Requests to an inference server: JSON over HTTP. A server that is gone, or silent for good, is noticed."""

import http.client
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from common.errors import UserError

HEALTH = 60.0  # seconds without an answer after which a server is asked whether it is alive, again and again
ALIVE = 20.0  # seconds for it to say so, to connect, and to send an answer that it has begun
KEY = "VLLM_API_KEY"  # the variable that vLLM reads its own key from


class EngineError(UserError):
    """What is wrong with an engine, in a sentence."""


class RefusedError(EngineError):
    """The engine has answered with an HTTP status of an error."""

    def __init__(self, sentence: str, status: int):
        super().__init__(sentence)
        self.status = status


class Client:
    """What one server is asked, from any number of threads.

    Args:
        url: http://host:port.
    """

    def __init__(self, url: str):
        try:
            parts = urlsplit(url)
            self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            self._place = (parts.hostname or "", parts.port)
            self._connect(*self._place)  # refuses spaces in a name
            self._place[0].encode("idna")
            is_address = (
                parts.scheme in ("http", "https") and self._place[0] and not (parts.path.strip("/") or parts.query)
            )
        except (ValueError, http.client.InvalidURL):
            is_address = False
        if not is_address:
            raise EngineError(f"{url} is not the address of an engine, such as http://127.0.0.1:8000")
        self.about = f"the engine at {url}"  # how sentences name it
        self.ending: Callable[[], str | None] = lambda: None  # how a server of this run has ended; None: it runs
        self._is_given_up = threading.Event()

    def give_up(self) -> None:
        """Let all requests that wait for an answer end with an error."""
        self._is_given_up.set()

    def get(self, path: str, seconds: float | None = None) -> dict:
        return self._ask("GET", path, None, seconds)

    def post(self, path: str, body: dict | None = None, seconds: float | None = None) -> dict:
        return self._ask("POST", path, body, seconds)

    def _ask(self, method: str, path: str, body: dict | None, seconds: float | None) -> dict:
        """The JSON object that the server answers, or {"list": ...} if that is a list.

        Args:
            seconds: None: as long as it takes, while the server is alive.

        Raises:
            EngineError: there is no answer, or another one.
        """
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if key := os.environ.get(KEY, "").strip():
            if not (key.isascii() and key.isprintable()):  # Python's own error would show it
                raise EngineError(f"the key in the variable {KEY} has characters that an HTTP header cannot have")
            headers["Authorization"] = f"Bearer {key}"
        connection = self._connect(*self._place, timeout=ALIVE)
        try:
            connection.request(method, path, content, headers)
            self._wait(connection.sock, path, seconds)
            response = connection.getresponse()
            answer = response.read()
        except ConnectionRefusedError as error:
            raise EngineError(f"{self.about} does not answer: nothing listens there{self._how_it_ended()}") from error
        except (OSError, http.client.HTTPException) as error:
            what = (" ".join(str(error).split())[:300] or type(error).__name__) + self._how_it_ended()
            raise EngineError(f"{self.about} has not answered {method} {path}: {what}") from error
        finally:
            connection.close()
        return self._read(method, path, response.status, answer)

    def _wait(self, sock: socket.socket, path: str, seconds: float | None) -> None:
        """Wait for the first byte of an answer, which can take minutes, as long as the server is alive."""
        began = asked = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            while not selector.select(timeout=0.2):
                now = time.monotonic()
                if self._is_given_up.is_set():
                    raise EngineError(f"{self.about} was not waited for any longer")
                if seconds is not None and now > began + seconds:
                    raise EngineError(f"{self.about} has not answered {path} for {seconds:g} seconds")
                if seconds is None and now > asked + HEALTH:
                    self.get("/health", seconds=ALIVE)
                    asked = now

    def _how_it_ended(self) -> str:
        ending = self.ending()
        return "" if ending is None else f"; its process {ending}"

    def _read(self, method: str, path: str, status: int, answer: bytes) -> dict:
        try:
            content = json.loads(answer) if answer.strip() else {}
        except (ValueError, RecursionError):
            content = None
        if status >= 400:
            error = content.get("error", content) if isinstance(content, dict) else None
            message = error.get("message", error) if isinstance(error, dict) else error
            reason = " ".join(str(message or answer[:200].decode(errors="replace")).split())[:300]
            remedy = f": give its key in the variable {KEY}" if status == 401 else ""
            raise RefusedError(f"{self.about} has refused {method} {path} (status {status}: {reason}){remedy}", status)
        if isinstance(content, list):
            return {"list": content}
        if not isinstance(content, dict):
            raise EngineError(f"{self.about} has answered {method} {path} with something other than a JSON object")
        return content
