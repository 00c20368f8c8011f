"""Serve an index to several runs, or to other machines, by the protocol of Search-R1's retrieval servers.

    python experiment_multiturn_qa/serve_index.py --corpus my_documents/ --port 8000
    python experiment_multiturn_qa/train.py --search-url http://127.0.0.1:8000

    curl http://127.0.0.1:8000/retrieve -H "Content-Type: application/json" \\
        -d '{"queries": ["Who built the Fardil?"], "topk": 2, "return_scores": true}'

`GET /` says what is served. A query that fails, because it takes longer than --search-seconds for example, has the
result null. Whoever can reach the port can search: there are no passwords.
"""

from harness.base.interrupt import handle_as_usual  # first: Ctrl-C during the imports shows no traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro
from annotated_types import Interval

from common.errors import UserError

from harness.base.config import Count
from harness.base.terminal import say
from harness.run.start import run_main
from harness.search.opening import check_search, open_index
from harness.search.search_config import SearchConfig


@dataclass(frozen=True, kw_only=True)
class Config(SearchConfig):
    # a query that takes longer has failed; less than the clients' limit, so that the others of its request have not
    search_seconds: float = 2.0
    search_url: Annotated[None, tyro.conf.Fixed, tyro.conf.Suppress] = None  # what is served is on this disk
    runs_dir: str = "runs"  # where an index is kept that is made without --index: <runs-dir>/search_index/
    threads: Count = 1  # CPU threads for the encoder
    host: str = "127.0.0.1"  # address to serve at; 0.0.0.0: all addresses of this machine
    port: Annotated[int, Interval(ge=0, le=65535)] = 8000  # 0: a free one, which is printed


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    try:
        from harness.search import search_server as server
    except ModuleNotFoundError as error:
        raise UserError(f"serving needs {error.name}: pip install -e '.[search]'") from error
    check_search(config)
    handle_as_usual()
    torch.set_num_threads(config.threads)
    listener = server.listen(config.host, config.port)  # first: opening an index can take long
    index = open_index(config)
    about = {"documents": index.num_documents, "content": index.content_hash}
    say(f"{index.num_documents:,} documents at {server.url_of(listener)} (Ctrl-C ends it)", anyway=True)
    server.serve(server.make_app(index, config.top_k, about), listener)


if __name__ == "__main__":
    run_main(main)
