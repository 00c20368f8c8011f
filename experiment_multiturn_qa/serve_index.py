"""Serve an index to several runs, or to other machines, by the protocol of Search-R1's retrieval servers.

    python experiment_multiturn_qa/serve_index.py --corpus my_documents/ --port 8000
    python experiment_multiturn_qa/train.py --search-url http://127.0.0.1:8000

    curl http://127.0.0.1:8000/retrieve -H "Content-Type: application/json" \\
        -d '{"queries": ["Who built the Fardil?"], "topk": 2, "return_scores": true}'

`GET /` describes the index. A query that fails, because it takes longer than --search-seconds for example, has the
result null. Whoever can reach the port can search: there are no passwords.
"""

from harness.base.interrupt import handle_as_usual  # first: Ctrl-C during the imports shows no traceback
import asyncio
import errno
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro
from annotated_types import Interval
from pydantic import BaseModel, Field

from common.errors import UserError
from common.search import Hit, Index, SearchError

from harness.base.config import Count
from harness.base.terminal import say
from harness.run.start import run_main
from harness.search.opening import open_index
from harness.search.search_config import SearchConfig, check_search


@dataclass(frozen=True, kw_only=True)
class Config(SearchConfig):
    # time limit of a query; it must be below the clients' limit, or the other queries of its request fail, too
    search_seconds: float = 2.0
    search_url: Annotated[None, tyro.conf.Fixed, tyro.conf.Suppress] = None  # the index is on this disk
    runs_dir: str = "runs"  # directory of indexes made without --index: <runs-dir>/search_index/
    threads: Count = 1  # CPU threads for the encoder
    host: str = "127.0.0.1"  # address to serve at; 0.0.0.0: all addresses of this machine
    port: Annotated[int, Interval(ge=0, le=65535)] = 8000  # port; 0: a free one, which is printed


class Asked(BaseModel):
    """The body of a request."""

    queries: Annotated[list[str], Field(max_length=4096)]
    topk: int | None = Field(None, ge=0, le=1000)  # None, and 0 as with Search-R1: as many as the server likes
    return_scores: bool = False


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__, config=(tyro.conf.DisallowNone,))
    try:
        import fastapi  # noqa: F401
        import uvicorn
    except ModuleNotFoundError as error:
        raise UserError(f"serving needs {error.name}: pip install -e '.[search]'") from error
    check_search(config)
    handle_as_usual()
    torch.set_num_threads(config.threads)
    listener = listen(config.host, config.port)  # first: opening an index can take long
    host, port = listener.getsockname()[:2]
    app = make_app(index := open_index(config), config.top_k)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    say(f"{index.num_documents:,} documents or parts of them at {url} (Ctrl-C ends it)", anyway=True)

    async def quietly(scope, receive, send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:  # the server ended before the rest of the request came
            return

    # after Ctrl-C or SIGTERM, running requests get two seconds
    settings = uvicorn.Config(quietly, log_level="warning", timeout_graceful_shutdown=2)
    uvicorn.Server(settings).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """A socket that already accepts connections."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        problem = (error.strerror or str(error)).partition(" (")[0]
        hint = "; --port 0 takes a free port" if error.errno == errno.EADDRINUSE else ""
        raise UserError(f"--host {host} --port {port}: {problem}{hint}") from error


def make_app(index: Index, top_k: int):
    """The application: it returns `top_k` hits if a request does not say how many."""
    from fastapi import FastAPI, Response

    app = FastAPI(title="search", openapi_url=None)

    @app.get("/")
    @app.get("/health")
    def about() -> dict:
        return {"documents": index.num_documents, "content": index.content_hash}

    @app.post("/retrieve")
    def retrieve(asked: Asked) -> Response:
        def write(hit: Hit) -> dict:
            document = {"id": hit.document, "contents": hit.text}
            return {"document": document, "score": hit.score} if asked.return_scores else document

        answers = index.search_all(asked.queries, asked.topk or top_k)
        result = [None if isinstance(answer, SearchError) else list(map(write, answer)) for answer in answers]
        return Response(json.dumps({"result": result}), media_type="application/json")

    return app


if __name__ == "__main__":
    run_main(main)
