"""Search on a server that speaks Search-R1's protocol (protocol.py), for a corpus beyond one machine.

Whatever the server does, or fails to do, becomes a `SearchError` for the queries that it concerns, and within the time
limit. A call starts a thread with an event loop of its own: nothing outlives it that a fork, another thread or the loop
of a notebook could be in conflict with, and Ctrl-C has to wait for nothing.
"""

import asyncio
import ipaddress
import netrc
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import httpx2

from common.errors import UserError
from common.search import Hit, SearchError

from common.plumbing.retrieval.protocol import ServerError, read_answer, write_request
from common.plumbing.terminal import printable, say_above_progress

QUERIES_PER_REQUEST = 16  # a request that fails, or is answered too late, takes all of its queries with it
MAX_BYTES = 2**23  # of the answer to a request
HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
START = "`python experiment_multiturn_qa/serve_index.py` starts one"


class RemoteIndex:
    """The index of a server. It may be searched by several threads, after a fork, and from a running event loop.

    Over https a fork can make the child's searches fail, if a search of another thread has not ended by then.
    """

    def __init__(self, url: str, seconds: float):
        """
        Args:
            url: of the server, with or without `/retrieve`. A password for it stands in ~/.netrc.
            seconds: until when all queries of a call are answered; those that are not then have failed.

        Raises:
            UserError: this is not the URL of a server, or it holds a password.
        """
        self._url, self._seconds = _read_url(url), seconds
        # Proxies that the environment names are for other machines than this one.
        self._trust_env = not _is_this_machine(self._url.host)
        # Made once, also for plain HTTP: each client would make its own, and OpenSSL can deadlock in that after a fork.
        self._tls = httpx2.create_ssl_context()
        self._auth = _read_passwords()
        self._outage: dict[str, list] = {}  # "now": [when it began, failed searches]

    def __str__(self) -> str:
        return str(self._url)

    def check(self) -> None:
        """Search once.

        Raises:
            UserError: there is no server, or it is not one of these.
        """
        [answer] = self._ask_all(["document"], k=1)
        if isinstance(answer, SearchError):
            raise UserError(f"--search-url {self}: {_explain(answer)}; {START}") from answer

    def search(self, query: str, k: int) -> list[Hit]:
        """At most `k` hits.

        Raises:
            SearchError: there is no answer.
        """
        [answer] = self.search_all([query], k)
        if isinstance(answer, SearchError):
            raise answer
        return answer

    def search_all(self, queries: Sequence[str], k: int) -> list[list[Hit] | SearchError]:
        """The hits of each query, or why there are none; and tell the user when searches begin to fail, and to work."""
        answers = self._ask_all(queries, k)
        failures = [answer for answer in answers if isinstance(answer, SearchError)]
        of_server = [answer for answer in failures if isinstance(answer, ServerError)]
        if of_server or (failures and len(failures) == len(answers)):
            beginning = [time.monotonic(), 0]
            outage = self._outage.setdefault("now", beginning)  # by one of several threads
            outage[1] += len(failures)
            if outage is beginning:
                say_above_progress(f"searches at {self} fail: {_explain((of_server or failures)[0])}; the run goes on")
        elif answers and not failures and (outage := self._outage.pop("now", None)):
            since, number = outage
            say_above_progress(f"searches at {self} work again: {number} failed in {time.monotonic() - since:.0f} s")
        return answers

    def _ask_all(self, queries: Sequence[str], k: int) -> list[list[Hit] | SearchError]:
        deadline = time.monotonic() + self._seconds
        answers: list[list[Hit] | SearchError | None] = [None] * len(queries)
        if queries:
            thread = threading.Thread(target=self._run, args=(queries, k, answers, deadline), daemon=True)
            with suppress(RuntimeError):  # no more threads: no answer
                thread.start()
                thread.join(self._seconds)  # not longer, even if the name of the server is still being looked up
        return [
            ServerError(f"the search server gave no answer within {self._seconds:g} s") if answer is None else answer
            for answer in list(answers)  # a copy: the thread may still write
        ]

    def _run(self, queries: Sequence[str], k: int, answers: list, deadline: float) -> None:
        """Write the answers to `answers`, where they stay None if there are none before the deadline."""
        try:
            asyncio.run(self._send_all(queries, k, answers, deadline))
        except Exception as error:  # of this machine, which has no file descriptors left, say
            answers[:] = [_failure("the search server cannot be asked", error) if a is None else a for a in answers]

    async def _send_all(self, queries: Sequence[str], k: int, answers: list, deadline: float) -> None:
        """All requests at once, over at most 100 connections (httpx's limit)."""
        client = httpx2.AsyncClient(verify=self._tls, trust_env=self._trust_env, timeout=None, headers=HEADERS)
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline - time.monotonic()), client, asyncio.TaskGroup() as group:
                for start in range(0, len(queries), QUERIES_PER_REQUEST):
                    part = slice(start, start + QUERIES_PER_REQUEST)
                    group.create_task(self._send(client, queries[part], k, answers, part))

    async def _send(
        self, client: httpx2.AsyncClient, queries: Sequence[str], k: int, answers: list, part: slice
    ) -> None:
        """One request, for a part of the queries."""
        try:
            answers[part] = read_answer(await self._post(client, write_request(queries, k)), len(queries), k)
        except SearchError as error:
            failure = error
        except httpx2.ConnectError as error:
            failure = _failure("the search server cannot be reached", error)
        except Exception as error:  # whatever a peer can do to a connection; the libraries have no common class for it
            failure = _failure("the search server ended the connection", error)
        else:
            return
        answers[part] = [_failure(str(failure), failure.__cause__) for _ in queries]

    async def _post(self, client: httpx2.AsyncClient, content: bytes) -> bytes:
        """The body of the answer.

        Raises:
            SearchError: it is not a plain answer with status 200, or too long.
        """
        async with client.stream("POST", self._url, content=content, auth=self._auth) as response:
            if response.status_code != 200:
                raise ServerError(f"the search server answered with status {response.status_code}")
            if response.headers.get("content-encoding", "identity") != "identity":  # small, and huge when unpacked
                raise ServerError("the search server's answer is compressed")
            body = bytearray()
            async for block in response.aiter_raw():
                body += block
                if len(body) > MAX_BYTES:
                    raise ServerError(f"the search server's answer is longer than {MAX_BYTES} bytes")
        return bytes(body)


def _failure(text: str, cause: BaseException | None) -> SearchError:
    failure = ServerError(text)
    failure.__cause__ = cause
    return failure


def _explain(error: SearchError) -> str:
    """For the user: also what the library said."""
    cause = printable(str(error.__cause__ or ""), 200)
    return f"{error} ({cause})" if cause else str(error)


def _read_url(text: str) -> httpx2.URL:
    try:
        url = httpx2.URL(text.strip())
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError
        if not 0 < (url.port or 80) < 2**16:
            raise ValueError
    except (httpx2.InvalidURL, ValueError):
        raise UserError(
            f"--search-url {printable(text, 100)} is not the URL of a server, such as http://127.0.0.1:8000"
        ) from None
    if url.userinfo:
        raise UserError(
            "--search-url holds a password, which config.json of the run would keep: omit it, and write it into "
            f"~/.netrc: machine {printable(url.host, 100)} login NAME password PASSWORD"
        )
    path = url.path.rstrip("/")
    return url.copy_with(path=path if path.endswith("/retrieve") else f"{path}/retrieve")


def _read_passwords() -> httpx2.Auth | None:
    """Those of ~/.netrc, by machine."""
    try:
        return httpx2.NetRCAuth()
    except (OSError, RuntimeError, netrc.NetrcParseError):  # the second: there is no home directory
        return None


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
