"""The other end of remote_index.py: an index as a web application. It needs the extra search."""

import asyncio
import errno
import json
import socket
from typing import Annotated

import uvicorn
from fastapi import FastAPI, Response
from pydantic import BaseModel, Field

from common.errors import UserError
from common.search import Hit, Index, SearchError

MAX_QUERIES, MAX_TOP_K = 4096, 1000  # of a request


class Asked(BaseModel):
    """The body of a request."""

    queries: Annotated[list[str], Field(max_length=MAX_QUERIES)]
    topk: int | None = Field(None, ge=0, le=MAX_TOP_K)  # None, and 0 as with Search-R1: as many as the server likes
    return_scores: bool = False


def make_app(index: Index, top_k: int, about: dict) -> FastAPI:
    """What the server answers: `about` to GET /, and `top_k` hits to a request that does not say how many."""
    app = FastAPI(title="search", openapi_url=None)

    @app.get("/")
    @app.get("/health")
    def health() -> dict:
        return about

    @app.post("/retrieve")
    def retrieve(asked: Asked) -> Response:
        answers = index.search_all(asked.queries, asked.topk or top_k)
        result = [_write_hits(answer, asked.return_scores) for answer in answers]
        return Response(json.dumps({"result": result}), media_type="application/json")

    return app


def _write_hits(answer: list[Hit] | SearchError, return_scores: bool) -> list[dict] | None:
    """What a server says to a query, None if it failed."""
    if isinstance(answer, SearchError):
        return None
    documents = [{"id": hit.document, "contents": hit.text} for hit in answer]
    if not return_scores:
        return documents
    return [{"document": document, "score": hit.score} for document, hit in zip(documents, answer, strict=True)]


def listen(host: str, port: int) -> socket.socket:
    """A socket at which clients may knock already."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        problem = (error.strerror or str(error)).partition(" (")[0]
        hint = "; --port 0 takes a free port" if error.errno == errno.EADDRINUSE else ""
        raise UserError(f"--host {host} --port {port}: {problem}{hint}") from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Answer until Ctrl-C or SIGTERM; requests that are being answered get two seconds."""

    async def quietly(scope, receive, send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:  # the end has come before the rest of the request
            return

    settings = uvicorn.Config(quietly, log_level="warning", timeout_graceful_shutdown=2)
    uvicorn.Server(settings).run(sockets=[listener])
