"""The search tool: what is asked of an index, what the policy reads, and what is counted of it."""

import pytest

from common.environment import env_step
from common.search import NOTHING_FOUND, SEARCH_WEIGHTS, Hit, Searcher, SearchError, SearchState
from common.tasks import qa
from common.tools import ToolCall, call_tool, schemas

ROW = {"question": "Where was the one who built the ship Fardil born?", "answer": "Waplem", "supporting": ["s1", "p1"]}
SHIP = Hit("s1", "The ship Fardil was built in Tinhur in 1846. Jarce built Fardil.", 7.0)
PERSON = Hit("p1", "Jarce was born in Waplem in 1734.\nThe father of Jarce was Mabto.", 6.0)


class Shelf:
    """An index of two documents; one query takes too long for it."""

    def __init__(self):
        self.asked: list[list[str]] = []

    def search_all(self, queries, k):
        self.asked.append(list(queries))
        return [SearchError("no answer within 5 s") if query == "slow" else self.hits(query)[:k] for query in queries]

    def hits(self, query):
        return [hit for hit in (SHIP, PERSON) if query in hit.text]


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def searcher(shelf):
    return Searcher(shelf, top_k=2)


def state_of(searcher: Searcher, row: dict = ROW, **tools) -> SearchState:
    return SearchState(qa, row, {"search": searcher.search} | tools, "hermes", searcher=searcher)


def call(query: str, name: str = "search", argument: str = "query") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"{argument}": "{query}"}}}}</tool_call>'


def take(state: SearchState, text: str):
    state.searcher.send(state.queries(text))
    return env_step(state, text)


def test_a_conversation_of_two_hops(searcher):
    state = state_of(searcher)
    assert take(state, call("Fardil"))[0] == ["The ship Fardil was built in Tinhur in 1846. Jarce built Fardil."]
    (text,), _, done = take(state, call("Jarce"))
    assert text.splitlines() == [SHIP.text, "Jarce was born in Waplem in 1734. The father of Jarce was Mabto."]
    assert not done
    observation, rewards, done = take(state, "<answer>Waplem</answer>")
    assert observation is None
    assert done
    assert rewards["correct"] == rewards["f1"] == rewards["retrieved"] == rewards["executed_calls"] == 1
    assert rewards["calls"] == 2
    assert state.describe()["failed_searches"] == 0


@pytest.mark.parametrize(("queries", "share"), [(["Tinhur"], 0.5), (["Tinhur", "Mabto"], 1), (["Tinhur", "slow"], 0.5)])
def test_what_was_found_in_all_turns_counts(searcher, queries, share):
    state = state_of(searcher)
    for query in queries:
        take(state, call(query))
    assert take(state, "<answer>Tinhur</answer>")[1]["retrieved"] == share


def test_by_default_only_the_right_answer_is_rewarded():
    weights = qa.REWARD_WEIGHTS | SEARCH_WEIGHTS
    assert [name for name, weight in weights.items() if weight] == ["correct"]


def test_a_document_that_begins_like_an_error_is_none(shelf, searcher):
    shelf.hits = lambda query: [Hit("log", "error: disk full", 1.0)]
    state = state_of(searcher)
    assert take(state, call("disk"))[0] == ["error: disk full"]
    assert state.outcomes == {"executed": 1}


def test_nothing_found_is_an_answer(searcher):
    state = state_of(searcher)
    assert take(state, call("Nobody"))[0] == [NOTHING_FOUND]
    assert state.outcomes["executed"] == 1


def test_all_queries_of_a_turn_are_sent_once_and_together(searcher, shelf):
    states = [state_of(searcher) for _ in range(3)]
    texts = [call("Fardil"), call("Fardil") + call("Jarce"), "<answer>5</answer>"]
    queries = [state.queries(text) for state, text in zip(states, texts, strict=True)]
    searcher.send(query for asked in queries for query in asked)
    for state, text in zip(states, texts, strict=True):
        env_step(state, text)
    assert shelf.asked == [["Fardil", "Jarce"]]
    searcher.send([])
    assert len(shelf.asked) == 1


def test_a_search_that_fails_is_read_and_counted(searcher):
    """It costs only its own call."""
    state = state_of(searcher)
    assert take(state, call("slow") + call("Jarce"))[0][0] == "error: no answer within 5 s"
    assert [hit.document for hit in state.found] == ["s1", "p1"]
    described = state.describe()
    assert described["failed_searches"] == described["failed_calls"] == 1
    assert state.outcomes["executed"] == 1


@pytest.mark.parametrize(
    "text",
    [
        call("Fardil", name="find"),
        call("Fardil", argument="expression"),
        '<tool_call>{"name": "search", "arguments": {"query": "Fardil", "k": 9}}</tool_call>',
        '<tool_call>{"name": "search", "arguments": {"query": ["Fardil"]}}</tool_call>',
        '<tool_call>{"name": "search", "arguments": {"query": "Fardil"}',
        f"<think>{call('Fardil')}</think>",
    ],
)
def test_what_is_no_search_finds_nothing(searcher, shelf, text):
    state = state_of(searcher)
    take(state, text)
    assert shelf.asked == []
    assert state.found == []


def test_in_the_last_turn_nothing_is_searched(searcher, shelf):
    state = state_of(searcher)
    state.is_last_turn = True
    observation, rewards, done = take(state, call("Fardil"))
    assert (observation, done, shelf.asked) == (None, True, [])
    assert rewards["retrieved"] == 0
    assert state.outcomes["unanswered"] == 1


def test_calls_beyond_the_limit_are_not_searched(searcher, shelf):
    state = state_of(searcher)
    observation = take(state, "".join(call(f"q{number}") for number in range(10)))[0]
    assert shelf.asked == [[f"q{number}" for number in range(8)]]
    assert observation[8:] == ["error: at most 8 calls per turn"] * 2


def test_a_users_tool_of_that_name_is_not_the_index(shelf):
    """With --no-tool the index does not even exist."""
    searcher = Searcher(None, top_k=2)
    state = state_of(searcher, search=lambda query: "my own answer")
    assert take(state, call("Fardil"))[0] == ["my own answer"]
    assert state.found == []


def test_without_supporting_documents_the_answer_must_be_found(searcher):
    for answer, share in (("waplem", 1), (["never", 1734], 1), ("Bamor", 0)):
        state = state_of(searcher, row={"question": "?", "answer": answer})
        take(state, call("Jarce"))
        assert take(state, "<answer>5</answer>")[1]["retrieved"] == share


@pytest.mark.parametrize(("named", "share"), [("p1", 1), (["p1"], 1), (7, 0), (["p1", 7], 0.5), ("s", 0)])
def test_supporting_documents_are_named_one_by_one(searcher, named, share):
    state = state_of(searcher, row={"question": "?", "answer": "Waplem", "supporting": named})
    take(state, call("Jarce"))
    assert take(state, "<answer>5</answer>")[1]["retrieved"] == share


def test_the_policy_is_told_what_the_tool_is(searcher):
    (schema,) = schemas({"search": searcher.search})
    assert schema["function"]["parameters"]["required"] == ["query"]
    searcher.send(["Mabto"])
    assert call_tool({"search": searcher.search}, ToolCall("search", {"query": "Mabto"}))[1]
