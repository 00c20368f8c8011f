"""Requests to an inference server: JSON over HTTP. A server that is gone, or silent for good, is noticed."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx2

from common.errors import EngineError

T = TypeVar("T")

HEALTH = 60.0  # seconds without an answer after which a server is asked whether it is alive, again and again
ALIVE = 20.0  # seconds for it to say so, and to connect
UNUSED = 2.0  # seconds that an unused connection is kept; vLLM closes it after 5
KEY = "VLLM_API_KEY"  # the variable that vLLM reads its own key from


class RefusedError(EngineError):
    """The engine has answered with an HTTP status of an error."""

    def __init__(self, sentence: str, status: int):
        super().__init__(sentence)
        self.status = status


class Client:
    """What one server is asked. Requests run in a thread of their own, any number of them at the same time."""

    def __init__(self, url: str):
        try:
            parts = httpx2.URL(url)
            is_address = parts.scheme in ("http", "https") and parts.host and (parts.port or 0) < 2**16
            is_address = is_address and parts.path in ("", "/")
        except httpx2.InvalidURL:
            is_address = False
        if not is_address:
            raise EngineError(f"{url} is not the address of an engine, such as http://127.0.0.1:8000")
        self.about = f"the engine at {url}"  # how sentences name it
        self.ending: Callable[[], str | None] = lambda: None  # how a server of this run has ended; None: it runs
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY, "").strip()) else {},
            timeout=httpx2.Timeout(ALIVE, read=None),
            limits=httpx2.Limits(max_connections=None, keepalive_expiry=UNUSED),
            verify=httpx2.create_ssl_context(),  # with the certificates that the environment names
            trust_env=False,  # but not through its proxy
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine, which can await `ask`, in the background."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def get(self, path: str, seconds: float | None = None) -> dict:
        return self.submit(self.ask("GET", path, seconds=seconds)).result()

    def post(self, path: str, body: dict | None = None, seconds: float | None = None) -> dict:
        return self.submit(self.ask("POST", path, body, seconds)).result()

    async def ask(self, method: str, path: str, body: dict | None = None, seconds: float | None = None) -> dict:
        """The JSON object that the server answers; EngineError if there is no answer, or another one.

        Without `seconds` it may take as long as the server says that it is alive.
        """
        request = asyncio.create_task(self._http.request(method, path, json=body))
        try:
            async with asyncio.timeout(seconds):
                while not (await asyncio.wait([request], timeout=HEALTH if seconds is None else None))[0]:
                    await self.ask("GET", "/health", seconds=ALIVE)
                response = request.result()
        except TimeoutError:
            raise EngineError(f"{self.about} has not answered {path} for {seconds:g} seconds") from None
        except httpx2.HTTPError as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            reason = f"nothing listens there ({reason})" if isinstance(error, httpx2.ConnectError) else reason
            ending = await asyncio.to_thread(self.ending)
            ended = f"; its process {ending}" if ending else ""
            raise EngineError(f"{self.about} has not answered {method} {path}: {reason}{ended}") from error
        finally:
            request.cancel()
        return self._read(f"{method} {path}", response)

    def close(self) -> None:
        """Let all requests that wait for an answer end."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._http.aclose()

        if self._thread.is_alive():  # not so in a forked process
            self.submit(end()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _read(self, request: str, response: httpx2.Response) -> dict:
        try:
            content = response.json() if response.content.strip() else {}
        except ValueError:
            content = None
        if not response.is_success:
            error = content.get("error", content) if isinstance(content, dict) else None
            message = error.get("message", error) if isinstance(error, dict) else error
            reason = " ".join(str(message or response.text[:200]).split())[:300]
            remedy = f": give its key in the variable {KEY}" if response.status_code == 401 else ""
            sentence = f"{self.about} has refused {request} (status {response.status_code}: {reason}){remedy}"
            raise RefusedError(sentence, response.status_code)
        if not isinstance(content, dict):
            raise EngineError(f"{self.about} has answered {request} with something other than a JSON object")
        return content
