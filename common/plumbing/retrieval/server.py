"""The other end of remote_index.py: an index as a web application. It needs requirements-search.txt."""

import asyncio
import errno
import json
import socket
from typing import Annotated

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from common.errors import UserError
from common.search import Index

from common.plumbing.retrieval.protocol import whole, write_answer

MAX_QUERIES, MAX_TOP_K = 4096, 1000  # of a request
MAX_BYTES = 2**24  # of a request


class Asked(BaseModel):
    """The body of a request."""

    queries: Annotated[
        list[Annotated[str, BeforeValidator(lambda query: whole(query) if isinstance(query, str) else query)]],
        Field(max_length=MAX_QUERIES),
    ]
    topk: int | None = Field(None, ge=0, le=MAX_TOP_K)  # None, and 0 as with Search-R1: as many as the server likes
    return_scores: bool = False


def make_app(index: Index, top_k: int, about: dict) -> FastAPI:
    """What the server answers.

    Args:
        top_k: hits for a request that does not say how many.
        about: what `GET /` tells.
    """
    app = FastAPI(title="search", openapi_url=None)

    @app.get("/")
    @app.get("/health")
    def health() -> dict:
        return about

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        asked = _read(await _body(request))

        def answer() -> bytes:
            return write_answer(index.search_all(asked.queries, asked.topk or top_k), asked.return_scores)

        try:
            return Response(await run_in_threadpool(answer), media_type="application/json")
        except asyncio.CancelledError:  # uvicorn ends, and would print a traceback
            raise HTTPException(503, "the server ends") from None

    return app


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for block in request.stream():
        body += block
        if len(body) > MAX_BYTES:
            raise HTTPException(413, f"a request may have {MAX_BYTES} bytes")
    return bytes(body)


def _read(body: bytes) -> Asked:
    try:
        return Asked.model_validate(json.loads(body))
    except ValidationError as error:
        first = error.errors()[0]
        raise HTTPException(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, RecursionError):  # the latter: too many brackets
        raise HTTPException(400, "the request is not JSON") from None


def listen(host: str, port: int) -> socket.socket:
    """A socket at which clients may knock already.

    Raises:
        UserError: the port is taken, or this machine has no such address.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as error:
        problem = (getattr(error, "strerror", None) or str(error)).partition(" (")[0]
        hint = "; --port 0 takes a free port" if getattr(error, "errno", None) == errno.EADDRINUSE else ""
        raise UserError(f"--host {host} --port {port}: {problem}{hint}") from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Answer until Ctrl-C or SIGTERM; requests that are being answered get two seconds."""
    settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)
    uvicorn.Server(settings).run(sockets=[listener])
