"""Search: a policy finds documents, instead of knowing them.

An index answers `search_all(queries, k)` with the documents that fit best; harness/search has several kinds. The policy
reads their texts, one per line, and never their ids or scores. All queries of a turn are sent to the index together,
before the environment takes the turn of each conversation.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from common.environment import CALL_WEIGHTS, MAX_CALLS, State
from common.tools import ToolCall, parse_calls

NOTHING_FOUND = "nothing found"
# Reward components besides the task's: for the calls, and the share of the supporting documents that were found.
SEARCH_WEIGHTS = CALL_WEIGHTS | {"retrieved": 0.0}


class Hit(NamedTuple):
    """A document that a search has found, or a part of one."""

    document: str  # its id
    text: str
    score: float  # larger is better; scores of different queries or indexes cannot be compared


class SearchError(Exception):
    """A search that could not be answered. The policy reads its message, one line."""


class Index(Protocol):
    """Documents that can be searched. Several threads may search at the same time."""

    def search_all(self, queries: Sequence[str], k: int) -> list[list[Hit] | SearchError]:
        """For each query, any text that a policy may write: at most `k` hits, best first; none if nothing fits.

        SearchError instead of hits: there is no answer, for example because it took too long or a server failed.
        """


class Searcher:
    """The search tool of all conversations: an index, and its answers to the queries of the present turn."""

    def __init__(self, index: Index | None, top_k: int):
        self._index, self._top_k = index, top_k
        self._answers: dict[str, list[Hit] | SearchError] = {}

    def send(self, queries: Iterable[str]) -> None:
        """Send all queries of a turn to the index together; equal queries only once."""
        distinct = list(dict.fromkeys(queries))
        answers = self._index.search_all(distinct, self._top_k) if distinct else []
        self._answers = dict(zip(distinct, answers, strict=True))

    def answer(self, query: str) -> list[Hit] | SearchError:
        """The index's answer to one of the queries that were sent."""
        return self._answers[query]

    def search(self, query: str) -> str:
        """Search the documents.

        Args:
            query: What to look for.
        """
        answer = self.answer(query)
        return f"error: {answer}" if isinstance(answer, SearchError) else render(answer)


@dataclass
class SearchState(State):
    """A conversation that can search, and the documents that it has found."""

    searcher: Searcher = field(kw_only=True)  # `tools` can hold its `search`
    found: list[Hit] = field(default_factory=list)
    num_failures: int = 0  # searches that the index could not answer

    def queries(self, action_text: str) -> list[str]:
        """The queries to the index in the turn that the policy takes with this text."""
        calls = [] if self.is_last_turn else parse_calls(action_text, self.call_form)[0][:MAX_CALLS]
        return [query for query in map(self._query, calls) if query is not None]

    def execute(self, call: ToolCall) -> tuple[str, bool]:
        query = self._query(call)
        if query is None:
            return super().execute(call)
        answer = self.searcher.answer(query)
        is_answered = not isinstance(answer, SearchError)
        self.num_failures += not is_answered
        self.found += answer if is_answered else []
        return super().execute(call)[0], is_answered  # a document may begin with "error:"

    def rewards(self) -> dict[str, float]:
        return super().rewards() | {"retrieved": share_retrieved(self.row, self.found)}

    def describe(self) -> dict[str, float]:
        return super().describe() | {"failed_searches": self.num_failures}

    def _query(self, call: ToolCall) -> str | None:
        """The query of a call; None if it calls another tool, or has other arguments."""
        is_search = call.error is None and call.name == "search" and self.tools.get("search") == self.searcher.search
        fits = is_search and call.arguments.keys() == {"query"} and isinstance(call.arguments["query"], str)
        return call.arguments["query"] if fits else None


def render(hits: list[Hit]) -> str:
    """The text that the policy reads: the documents' texts, best first, one per line.

    >>> render([Hit("d1", "The ship Fardil was built in 1846.", 7.1), Hit("d2", "Jarce built\\nMabto.", 2.0)])
    'The ship Fardil was built in 1846.\\nJarce built Mabto.'
    """
    return "\n".join(" ".join(hit.text.split()) for hit in hits) or NOTHING_FOUND


def share_retrieved(row: dict, hits: list[Hit]) -> float:
    """The share of a row's supporting documents that are among the hits; a part of a document, id#1, is enough.

    If the row does not name them: 1 if a hit holds the answer, else 0.

    >>> hits = [Hit("ships.md#4", "The ship Fardil was built in 1846.", 7.1)]
    >>> share_retrieved({"supporting": ["ships.md", "towns.md"]}, hits), share_retrieved({"answer": 1846}, hits)
    (0.5, 1.0)
    """
    if wanted := supporting(row):
        found = {name for hit in hits for name in (hit.document, hit.document.rpartition("#")[0])}
        return sum(name in found for name in wanted) / len(wanted)
    answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    return float(any(str(answer).casefold() in hit.text.casefold() for answer in answers for hit in hits))


def supporting(row: dict) -> list[str]:
    """The ids of the documents that a row names as supporting; a single id needs no list."""
    named = row.get("supporting")
    named = [named] if isinstance(named, str | int) else named
    return list(map(str, named)) if isinstance(named, list) else []
