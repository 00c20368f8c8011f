"""The protocol of Search-R1's retrieval servers (Jin et al. 2025), written and read.

    POST <url>/retrieve   {"queries": [...], "topk": k, "return_scores": true}
    answer                {"result": [[{"document": {"id": ..., "contents": ...}, "score": ...}, ...], ...]}

One list for each query. `null` in place of a list is an addition of experiment_multiturn_qa/serve_index.py: this query
has failed, alone. What other servers do is accepted: they leave out ids (the title is taken), scores (then a hit is the
document itself), or `contents` (title and text are taken), and give more than k hits (the first k are taken).
"""

import json
import math
from collections.abc import Sequence

from common.search import Hit, SearchError


class ServerError(SearchError):
    """The server as a whole, and not a query, is the reason."""


def write_request(queries: Sequence[str], k: int) -> bytes:
    """JSON could write half of a surrogate pair, but a server could not read it: "?" takes its place."""
    texts = [whole(query) for query in queries]
    return json.dumps({"queries": texts, "topk": k, "return_scores": True}).encode()


def whole(text: str) -> str:
    """The text as UTF-8 can hold it.

    >>> whole("half \\ud83d")
    'half ?'
    """
    return text.encode(errors="replace").decode()


def write_answer(answers: Sequence[list[Hit] | SearchError], return_scores: bool) -> bytes:
    """What a server says to a request."""
    return json.dumps({"result": [_write_hits(answer, return_scores) for answer in answers]}).encode()


def _write_hits(answer: list[Hit] | SearchError, return_scores: bool) -> list[dict] | None:
    if isinstance(answer, SearchError):
        return None
    documents = [{"id": whole(hit.document), "contents": whole(hit.text)} for hit in answer]
    if not return_scores:
        return documents
    return [{"document": document, "score": hit.score} for document, hit in zip(documents, answer, strict=True)]


def read_answer(body: bytes, num_queries: int, k: int) -> list[list[Hit] | SearchError]:
    """The hits that a server's answer has for each query, at most `k`, or an error in their place.

    Raises:
        SearchError: nothing in it can be used.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):  # the latter: too many brackets
        raise ServerError("the search server's answer is not JSON") from None
    results = content.get("result") if isinstance(content, dict) else None
    if not isinstance(results, list):
        raise ServerError("the search server's answer has no list of results")
    if len(results) != num_queries:
        raise ServerError(f"the search server gave {len(results)} results instead of {num_queries}")
    return [_read_hits(result, k) for result in results]


def _read_hits(result: object, k: int) -> list[Hit] | SearchError:
    if result is None:
        return SearchError("the search server could not answer this query")
    try:
        return [_read_hit(item, position) for position, item in enumerate(_checked(result, list)[:k])]
    except (TypeError, ValueError, OverflowError):  # the latter: an integer that no float can hold
        return ServerError("the search server's answer has results that cannot be read")


def _read_hit(item: object, position: int) -> Hit:
    """
    Raises:
        TypeError, ValueError, OverflowError: this is not a hit.
    """
    item = _checked(item, dict)
    document = _checked(item.get("document", item), dict)
    name, title, text = document.get("id"), document.get("title"), document.get("contents")
    score = item.get("score") if "document" in item else None
    score = -position if score is None else _checked(score, int, float)  # the order is the server's
    if not math.isfinite(score):
        raise ValueError
    if text is None:
        text = _text(document.get("text"))
        text = text if title is None else f"{_text(title)}\n{text}"
    if name is None:
        name = title or ""
    return Hit(_text(str(_checked(name, str, int))), _text(text), float(score))


def _text(value: object) -> str:
    _checked(value, str).encode()  # ValueError: half of a surrogate pair
    return value


def _checked(value: object, *kinds: type) -> object:
    """The value, which must be of one of the kinds; True is none of them."""
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise TypeError
    return value
