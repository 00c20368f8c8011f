"""Requests to an inference server over HTTP: its address and key, whether it is alive, and errors of one sentence."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import httpx2
import torch

from common.errors import EngineError

T = TypeVar("T")

HEALTH = 60.0  # seconds without an answer before asking, again and again, whether the server is alive
ALIVE = 20.0  # seconds to answer that, and to connect
UNUSED = 2.0  # seconds that an unused connection is kept; vLLM closes it after 5
KEY = "VLLM_API_KEY"  # vLLM reads its key from this variable


class RefusedError(EngineError):
    """The engine answered with an HTTP error status."""

    status: int


class Completion(NamedTuple):
    """One completion of a prompt, as the server returned it."""

    ids: list[int]
    log_probs: list[float]  # nats, one for each id, under the sampling distribution
    has_stopped: bool  # ended by an end-of-turn token or a stop text; else the budget was used up


class Client:
    """A server. Requests run in a separate thread, any number of them at the same time.

    A subclass says in `_check` what it needs of the server. Those that sample also have `max_length`, `load` and
    `complete`, as `harness.engines.vllm.VLLM` does.
    """

    length_flag: str  # the server's flag for `max_length`
    can_sleep = False

    def __init__(self, url: str, dtype: torch.dtype):
        try:
            parts = httpx2.URL(url)
            is_address = parts.scheme in ("http", "https") and parts.host and (parts.port or 0) < 2**16
            is_address = is_address and parts.path in ("", "/")
        except httpx2.InvalidURL:
            is_address = False
        if not is_address:
            raise EngineError(f"{url} is not the address of an engine, such as http://127.0.0.1:8000")
        self.about = f"the engine at {url}"  # its name in messages
        self.ending: Callable[[], str | None] = lambda: None  # how this run's server ended; None: it is running
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY, "").strip()) else {},
            timeout=httpx2.Timeout(ALIVE, read=None),
            limits=httpx2.Limits(max_connections=None, keepalive_expiry=UNUSED),
            verify=httpx2.create_ssl_context(),  # with the certificates of the environment
            trust_env=False,  # but not through its proxy
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()
        try:
            self._check(dtype)
        except BaseException:
            self.close()
            raise

    def _check(self, dtype: torch.dtype) -> None:
        """Refuse a server with unsuitable settings."""
        raise NotImplementedError

    def find_model(self, name: str) -> None:
        """Ask only for the server's model, and call it `name`; for servers that need no other settings."""
        self.about = self.about.replace("the engine", name)
        with self.reading("no model"):
            self._model = self._request("GET", "/v1/models", seconds=ALIVE)["data"][0]["id"]

    def wrong(self, what: str) -> EngineError:
        return EngineError(f"{self.about} has answered with {what}")

    @contextmanager
    def reading(self, otherwise: str) -> Iterator[None]:
        """Read an answer of the server; if it has another form, the error says that it is `otherwise`."""
        try:
            yield
        except (TypeError, LookupError, ValueError, AttributeError):
            raise self.wrong(otherwise) from None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine, which can await `complete`, in the background."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """End all requests that are waiting for an answer."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._http.aclose()

        if self._thread.is_alive():  # it does not run in a forked process
            self.submit(end()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _request(self, method: str, path: str, body: dict | None = None, seconds: float | None = None) -> dict:
        return self.submit(self._ask(method, path, body, seconds)).result()

    async def _ask(self, method: str, path: str, body: dict | None = None, seconds: float | None = None) -> dict:
        """The JSON object that the server returns; EngineError if there is no answer, or a different one.

        Without `seconds` the request may take as long as the server reports that it is alive.
        """
        request = asyncio.create_task(self._http.request(method, path, json=body))
        try:
            async with asyncio.timeout(seconds):
                while not (await asyncio.wait([request], timeout=HEALTH if seconds is None else None))[0]:
                    await self._ask("GET", "/health", seconds=ALIVE)
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
        try:
            content = response.json() if response.content.strip() else {}
        except ValueError:
            content = None
        if not response.is_success:
            error = content.get("error", content) if isinstance(content, dict) else None
            message = error.get("message", error) if isinstance(error, dict) else error
            reason = " ".join(str(message or response.text[:200]).split())[:300]
            remedy = f": give its key in the variable {KEY}" if response.status_code == 401 else ""
            refused = RefusedError(
                f"{self.about} has refused {method} {path} (status {response.status_code}: {reason}){remedy}"
            )
            refused.status = response.status_code
            raise refused
        if not isinstance(content, dict):
            raise EngineError(f"{self.about} has answered {method} {path} with something other than a JSON object")
        return content
