"""Questions that a model behind an OpenAI-compatible server writes (vLLM, llama.cpp, Ollama, or a service)."""

import asyncio
import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Any

import httpx2

from common.errors import UserError

from common.plumbing.questions.drafts import Outcome, Unit
from common.plumbing.questions.writers import ask, read_reply
from common.plumbing.retrieval.documents import Document
from common.plumbing.terminal import printable

NO_ANSWER = "the server did not answer"
KEY = "OPENAI_API_KEY"
TRIES = 5
PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds after the first try, doubled after each; the most that a server may ask for
CONNECT_SECONDS = 10.0
MOST_BYTES = 2**20  # of an answer
MOST_FAILURES = 3  # questions one after the other that the server does not answer
IN_PASSING = (408, 409, 425, 429)  # statuses, besides those from 500 on, after which the same request is sent again


class ServedWriter:
    """A server, of which only /chat/completions is used; it gets `at_once` requests at the same time.

    What may pass is tried again, with growing pauses: a busy server, its errors, a lost connection, a slow answer.

    Raises:
        UserError: `url` is no URL, or the key cannot be sent.
    """

    def __init__(self, url: str, settings: dict, seed: int, at_once: int, seconds: float):
        self._url, self._settings, self._seed = check_url(url).rstrip("/") + "/chat/completions", settings, seed
        self._at_once, self._seconds = at_once, seconds
        self._key = _read_key()
        self._has_answered, self._problem = False, ""

    def write(self, units: Sequence[Unit], start: int) -> Iterator[list[Outcome]]:
        """What becomes of the units from `start` on, in their order.

        A question that the server does not answer is given up if it answers one of the next.

        Raises:
            UserError: it refuses them, or has not answered `MOST_FAILURES` one after the other.
        """
        failed: list[Outcome] = []
        for outcome in self._in_order(units, start):
            if outcome != NO_ANSWER:
                yield [*failed, outcome]
                failed = []
                continue
            failed.append(outcome)
            if len(failed) == MOST_FAILURES:
                raise UserError(
                    f"--base-url: {self._url} did not answer {MOST_FAILURES} requests, each sent {TRIES} times "
                    f"({self._problem}): run the same command again to go on"
                )
        if failed:
            yield failed

    def _in_order(self, units: Sequence[Unit], start: int) -> Iterator[Outcome]:
        # The loop has a thread of its own: Ctrl-C in the middle of a loop leaves a stop behind that ends its next run.
        loop = asyncio.new_event_loop()
        thread = Thread(target=loop.run_forever, daemon=True)
        client = httpx2.AsyncClient(timeout=httpx2.Timeout(self._seconds, connect=CONNECT_SECONDS))
        gate = asyncio.Semaphore(self._at_once)
        window: deque[Future[Outcome]] = deque()  # behind a slow request, as many again are answered
        try:
            thread.start()
            for number in range(start, len(units)):
                request = self._outcome(client, gate, units[number][0], number)
                window.append(asyncio.run_coroutine_threadsafe(request, loop))
                if len(window) == 2 * self._at_once:
                    yield window[0].result()
                    window.popleft()
            while window:
                yield window[0].result()
                window.popleft()
        finally:
            asyncio.run_coroutine_threadsafe(_give_up(client), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _outcome(
        self, client: httpx2.AsyncClient, gate: asyncio.Semaphore, document: Document, number: int
    ) -> Outcome:
        body = self._settings | {"messages": ask(document), "seed": self._seed + number}
        async with gate:
            for attempt in range(1, TRIES + 1):
                reply, pause = await self._try(client, body)
                if reply is not None:
                    return read_reply(reply)
                if attempt < TRIES:
                    await asyncio.sleep(PAUSE * 2 ** (attempt - 1) if pause is None else pause)
        return NO_ANSWER

    async def _try(self, client: httpx2.AsyncClient, body: dict) -> tuple[str | None, float | None]:
        """The reply to a request, None if there is none now; and the pause that the server asks for, if it does."""
        try:
            async with asyncio.timeout(self._seconds):  # of all pieces together; that of httpx2 is for each of them
                status, headers, content = await self._post(client, body)
        except (TimeoutError, httpx2.ReadTimeout):
            self._problem = f"no answer within {self._seconds:g} seconds"
            return None, None
        except httpx2.HTTPError as error:
            self._problem = self._shown(f"{type(error).__name__}: {error}")
            if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout) and not self._has_answered:
                raise UserError(f"--base-url: no server answers at {self._url} ({self._problem})") from error
            return None, None
        self._has_answered = True
        reply = _content_of(content) if status == 200 else None
        if reply is None:
            self._problem = self._describe(status, content)
            if status != 200 and status < 500 and status not in IN_PASSING:
                hint = f"; is {KEY} set, and right?" if status in (401, 403) else ""
                raise UserError(f"--base-url: {self._url} refuses a request ({self._problem}){hint}")
        return reply, _pause_of(headers.get("retry-after", ""))

    async def _post(self, client: httpx2.AsyncClient, body: dict) -> tuple[int, Any, bytes]:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        content = b""
        async with client.stream("POST", self._url, json=body, headers=headers) as response:
            async for piece in response.aiter_bytes():
                content += piece
                if len(content) > MOST_BYTES:  # no chat completion; what is cut off cannot be read
                    break
            return response.status_code, response.headers, content

    def _describe(self, status: int, content: bytes) -> str:
        if status == 200:
            return "its answer is no chat completion"
        text = content.decode(errors="replace")
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            text = str(json.loads(text)["error"]["message"])
        return self._shown(f"status {status}" + (f": {text}" if text.strip() else ""))

    def _shown(self, text: str) -> str:
        """What a server, or the connection to it, says: it may repeat the key."""
        return printable(text.replace(self._key, "(key)") if self._key else text, 200)


def check_url(url: str) -> str:
    """
    Raises:
        UserError: this is not the URL of a server, or holds what should not be stored.
    """
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError):
        parsed = httpx2.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"--base-url {printable(url, 80)} is no URL of a server, such as http://127.0.0.1:8000/v1")
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise UserError(
            "--base-url must end with the path, as http://127.0.0.1:8000/v1 does: a key belongs into the environment "
            f"variable {KEY}"
        )
    return url


def _read_key() -> str:
    key = os.environ.get(KEY, "").strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"the environment variable {KEY} holds what no key can be: it has spaces or other signs in it")
    return key


def _content_of(content: bytes) -> str | None:
    """The text of a chat completion; None if this is none."""
    try:
        text = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return text if isinstance(text, str) else ""  # a model that has only thought has said nothing


def _pause_of(retry_after: str) -> float | None:
    """
    >>> _pause_of("2"), _pause_of("1e9"), _pause_of("Wed, 21 Oct 2026 07:28:00 GMT")
    (2.0, 60.0, None)
    """
    try:
        return min(max(float(retry_after), 0.0), LONGEST_PAUSE)
    except ValueError:
        return None


async def _give_up(client: httpx2.AsyncClient) -> None:
    requests = asyncio.all_tasks() - {asyncio.current_task()}
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    await client.aclose()
