"""Search on a server that speaks the protocol of Search-R1's retrieval servers (Jin et al. 2025).

    POST <url>/retrieve   {"queries": [...], "topk": k, "return_scores": true}
    answer                {"result": [[{"document": {"id": ..., "contents": ...}, "score": ...}, ...], ...]}

`null` in place of a query's list is an extension of experiment_multiturn_qa/serve_index.py: that query has failed.
Other servers omit ids (then the title is used), scores (then a hit is the document itself), or `contents` (then title
and text are used). They may also return more than k hits. Any failure of the server becomes a `SearchError` for the
affected queries, within the time limit.
"""

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx2
from pydantic import BaseModel, FiniteFloat, TypeAdapter

from common.errors import UserError
from common.search import Hit, SearchError

from harness.base.terminal import printable, say_above_progress
from harness.search.documents import whole

QUERIES_PER_REQUEST = 16  # if a request fails or is late, all its queries fail
# seconds that an unused connection is kept: shorter than on servers, which could close it under a request
KEPT = 2.0


class RemoteIndex:
    """The index on a server. Several threads may search; one separate thread, with its own loop, sends the requests.

    `url` may end with `/retrieve`; queries without an answer within `seconds` have failed.
    """

    def __init__(self, url: str, seconds: float):
        self._url, self._seconds, self._is_down = _read_url(url), seconds, False
        self._client = httpx2.AsyncClient(
            auth=httpx2.NetRCAuth() if Path("~/.netrc").expanduser().exists() else None,
            limits=httpx2.Limits(max_connections=100, keepalive_expiry=KEPT),
            timeout=None,  # for all pieces of an answer together, see `_send`
            # the environment's proxies are not meant for this machine
            trust_env=self._url.host not in ("localhost", "127.0.0.1", "::1"),
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def __str__(self) -> str:
        return str(self._url)

    def check(self) -> None:
        """Search once, so that a server that does not answer is noticed before training."""
        [answer] = self._ask(["document"], k=1)
        if isinstance(answer, SearchError):
            start = "`python experiment_multiturn_qa/serve_index.py` starts one"
            raise UserError(f"--search-url {self}: {_explain(answer)}; {start}") from answer

    def search_all(self, queries: Sequence[str], k: int) -> list[list[Hit] | SearchError]:
        """The hits of each query, or why it failed; tells the user when all begin to fail, and when they work again."""
        answers = self._ask(queries, k)
        failures = [answer for answer in answers if isinstance(answer, SearchError)]
        if self._is_down and len(failures) < len(answers):
            self._is_down = False
            say_above_progress(f"searches at {self} work again")
        elif not self._is_down and failures and len(failures) == len(answers):
            self._is_down = True
            say_above_progress(f"searches at {self} fail: {_explain(failures[0])}; the run goes on")
        return answers

    def _ask(self, queries: Sequence[str], k: int) -> list[list[Hit] | SearchError]:
        """Send all requests at once, over connections that stay open from turn to turn."""
        parts = [queries[start : start + QUERIES_PER_REQUEST] for start in range(0, len(queries), QUERIES_PER_REQUEST)]
        futures = [asyncio.run_coroutine_threadsafe(self._send(part, k), self._loop) for part in parts]
        try:
            return [answer for future in futures for answer in future.result()]
        finally:  # after Ctrl-C
            for future in futures:
                future.cancel()

    async def _send(self, queries: Sequence[str], k: int) -> list[list[Hit] | SearchError]:
        """Send one request; returns the result of each of its queries."""
        body = {"queries": list(map(whole, queries)), "topk": k, "return_scores": True}
        try:
            async with asyncio.timeout(self._seconds):
                response = await self._client.post(self._url, json=body)
            if response.status_code != 200:
                raise SearchError(f"the search server answered with status {response.status_code}")
            return read_answer(response.content, len(queries), k)
        except SearchError as error:
            failure = error
        except TimeoutError:
            failure = SearchError(f"the search server gave no answer within {self._seconds:g} s")
        except Exception as error:  # a connection can fail in any way; the libraries have no common class for it
            what = "cannot be reached" if isinstance(error, httpx2.ConnectError) else "ended the connection"
            failure = SearchError(f"the search server {what}")
            failure.__cause__ = error
        return [failure for _ in queries]


def _explain(error: SearchError) -> str:
    """For the user: includes the library's message."""
    cause = printable(str(error.__cause__ or ""), 200)
    return f"{error} ({cause})" if cause else str(error)


def _read_url(text: str) -> httpx2.URL:
    try:
        url = httpx2.URL(text.strip())
        is_server = url.scheme in ("http", "https") and url.host and 0 < (url.port or 80) < 2**16
    except httpx2.InvalidURL:
        is_server = False
    if not is_server:
        raise UserError(f"--search-url {printable(text, 80)} is not the URL of a server, as http://127.0.0.1:8000 is")
    if url.userinfo:
        line = f"machine {printable(url.host, 100)} login NAME password PASSWORD"
        raise UserError(f"--search-url holds a password, which config.json would keep: write it into ~/.netrc: {line}")
    return url.copy_with(path=url.path.rstrip("/").removesuffix("/retrieve") + "/retrieve")


class _Document(BaseModel, coerce_numbers_to_str=True):
    id: str | None = None
    title: str | None = None
    contents: str | None = None
    text: str | None = None


class _Item(_Document):
    """A document, which some servers put into a separate field."""

    document: _Document | None = None
    score: FiniteFloat | None = None

    def hit(self, rank: int) -> Hit:
        """Without a score the server's order counts. ValueError if there is no text."""
        found = self.document or self
        name, text = found.title if found.id is None else found.id, found.contents
        if text is None:
            if found.text is None:
                raise ValueError
            text = found.text if found.title is None else f"{found.title}\n{found.text}"
        return Hit(whole(name or ""), whole(text), float(-rank) if self.score is None else self.score)


_ITEMS = TypeAdapter(list[_Item])


def read_answer(body: bytes, num_queries: int, k: int) -> list[list[Hit] | SearchError]:
    """The hits for each query in a server's answer, at most `k`, or an error in their place.

    SearchError: nothing in the answer can be used.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):  # the latter: too many brackets
        raise SearchError("the search server's answer is not JSON") from None
    results = content.get("result") if isinstance(content, dict) else None
    if not isinstance(results, list):
        raise SearchError("the search server's answer has no list of results")
    if len(results) != num_queries:
        raise SearchError(f"the search server gave {len(results)} results instead of {num_queries}")
    return [_read_hits(result, k) for result in results]


def _read_hits(result: object, k: int) -> list[Hit] | SearchError:
    if result is None:
        return SearchError("the search server could not answer this query")
    try:
        return [item.hit(rank) for rank, item in enumerate(_ITEMS.validate_python(result)[:k])]
    except ValueError:
        return SearchError("the search server's answer has results that cannot be read")
