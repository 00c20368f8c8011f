"""The search tool: its requests to an index, the text for the policy, and its counts.

A search server that fails, hangs, breaks off or lies: errors for exactly the affected queries, and in time.
"""

import asyncio
import base64
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from http_stand_in import Server, http, serving

from common.environment import env_step
from common.errors import UserError
from common.search import SEARCH_WEIGHTS, Hit, Searcher, SearchError, SearchState
from tasks import qa

from harness.search.remote_index import QUERIES_PER_REQUEST, RemoteIndex, read_answer

ROW = {"question": "Where was the one who built the ship Fardil born?", "answer": "Waplem", "supporting": ["s1", "p1"]}
SHIP = Hit("s1", "The ship Fardil was built in Tinhur in 1846. Jarce built Fardil.", 7.0)
PERSON = Hit("p1", "Jarce was born in Waplem in 1734.\nThe father of Jarce was Mabto.", 6.0)
LOG = Hit("log", "error: disk full", 1.0)


class Shelf:
    """An index of three documents; one query takes too long."""

    def __init__(self):
        self.asked: list[list[str]] = []

    def search_all(self, queries, k):
        self.asked.append(list(queries))
        found = [[hit for hit in (SHIP, PERSON, LOG) if query in hit.text][:k] for query in queries]
        return [
            SearchError("no answer") if query == "slow" else hits for query, hits in zip(queries, found, strict=True)
        ]


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
    assert take(state, call("Fardil"))[0] == [SHIP.text]
    (text,), _, done = take(state, call("Jarce"))
    assert text.splitlines() == [SHIP.text, "Jarce was born in Waplem in 1734. The father of Jarce was Mabto."]
    assert not done
    observation, rewards, done = take(state, "<answer>Waplem</answer>")
    assert (observation, done) == (None, True)
    assert rewards["correct"] == rewards["f1"] == rewards["retrieved"] == rewards["executed_calls"] == 1
    assert (rewards["calls"], state.describe()["failed_searches"]) == (2, 0)
    weights = qa.REWARD_WEIGHTS | SEARCH_WEIGHTS
    assert [name for name, weight in weights.items() if weight] == ["correct"]


BOTH = ["s1", "p1"]


@pytest.mark.parametrize(("queries", "supporting", "answer", "share"), [
    (["Tinhur"], BOTH, "Waplem", 0.5), (["Tinhur", "Mabto"], BOTH, "Waplem", 1), (["Tinhur", "slow"], BOTH, "?", 0.5),
    (["Jarce"], "p1", "Waplem", 1), (["Jarce"], 7, "Waplem", 0), (["Jarce"], ["p1", 7], "Waplem", 0.5),
    (["Jarce"], "s", "Waplem", 0),
    # without documents, a hit must contain the answer
    (["Jarce"], None, "waplem", 1), (["Jarce"], None, ["never", 1734], 1), (["Jarce"], None, "Bamor", 0),
])  # fmt: skip
def test_what_was_found_in_all_turns_counts(searcher, queries, supporting, answer, share):
    state = state_of(searcher, row={"question": "?", "answer": answer, "supporting": supporting})
    for query in queries:
        take(state, call(query))
    assert take(state, "<answer>5</answer>")[1]["retrieved"] == share


def test_all_queries_of_a_turn_are_sent_once_and_together(searcher, shelf):
    states = [state_of(searcher) for _ in range(3)]
    texts = [call("Fardil"), call("Fardil") + call("Jarce"), "<answer>5</answer>"]
    queries = [state.queries(text) for state, text in zip(states, texts, strict=True)]
    searcher.send(query for asked in queries for query in asked)
    for state, text in zip(states, texts, strict=True):
        env_step(state, text)
    searcher.send([])
    assert shelf.asked == [["Fardil", "Jarce"]]


def test_a_search_that_fails_is_read_and_counted_unlike_a_document_that_begins_so(searcher):
    state = state_of(searcher)
    assert take(state, call("slow") + call("Jarce"))[0][0] == "error: no answer"
    assert take(state, call("disk"))[0] == ["error: disk full"]
    assert [hit.document for hit in state.found] == ["s1", "p1", "log"]
    described = state.describe()
    assert described["failed_searches"] == described["failed_calls"] == 1
    assert state.outcomes["executed"] == 2


@pytest.mark.parametrize("text", [
    call("Fardil", name="find"), call("Fardil", argument="expression"), call("Fardil").replace('"}}', '", "k": 9}}'),
    call("Fardil").replace('"Fardil"', '["Fardil"]'), call("Fardil").removesuffix("}</tool_call>"),
    f"<think>{call('Fardil')}</think>",
])  # fmt: skip
def test_what_is_no_search_finds_nothing(searcher, shelf, text):
    state = state_of(searcher)
    take(state, text)
    assert (shelf.asked, state.found) == ([], [])


def test_what_is_not_answered_is_not_searched(searcher, shelf):
    """In the last turn, and beyond the limit of a turn; a user's tool called search is not the index, either."""
    state = state_of(searcher)
    state.is_last_turn = True
    observation, rewards, done = take(state, call("Fardil"))
    assert (observation, done, shelf.asked, rewards["retrieved"]) == (None, True, [], 0)
    assert state.outcomes["unanswered"] == 1
    observation = take(state_of(searcher), "".join(call(f"q{number}") for number in range(10)))[0]
    assert shelf.asked == [[f"q{number}" for number in range(8)]]
    assert observation[8:] == ["error: at most 8 calls per turn"] * 2
    state = state_of(Searcher(None, top_k=2), search=lambda query: "my own answer")
    assert take(state, call("Fardil"))[0] == ["my own answer"]
    assert state.found == []


# A search server ------------------------------------------------------------------------------------------------------

LONG = 30  # seconds: longer than a request takes on the busiest machine
SHORT = 0.3  # seconds: for servers that never answer
N = QUERIES_PER_REQUEST
QUERIES = [f"query {number}" for number in range(2 * N)]


def hits_of(query: str, k: int) -> list[Hit]:
    return [Hit(f"{query}#{rank}", f"Text {rank}\nof {query}", 1.5 - rank) for rank in range(k)]


def answer_to(queries: list[str], k: int) -> bytes:
    def item(hit: Hit) -> dict:
        return {"document": {"id": hit.document, "contents": hit.text}, "score": hit.score}

    return json.dumps({"result": [[item(hit) for hit in hits_of(query, k)] for query in queries]}).encode()


def right(asked: dict, send: Callable) -> bytes:
    return http(answer_to(asked["queries"], asked["topk"]))


def half_right(wrong: Callable) -> Callable:
    """A wrong reply to the request with the first query, and right replies to all others."""
    return lambda asked, send: (wrong if QUERIES[0] in asked["queries"] else right)(asked, send)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(right) as running:
        yield running


def ask(url: str, query: str = "a", seconds: float = LONG) -> list[Hit] | SearchError:
    [answer] = RemoteIndex(url, seconds).search_all([query], 1)
    return answer


def assert_first_failed(answers: list, match: str) -> None:
    """The queries of the first request failed, each with one line, and the second request was answered."""
    for error in answers[:N]:
        assert isinstance(error, SearchError)
        assert match in str(error)
        assert "\n" not in str(error)
    assert answers[N:] == [hits_of(query, 2) for query in QUERIES[N:]]


def test_a_request_is_search_r1s_and_what_is_said_comes_back(server):
    queries = ['the "ship"', "", "π\n\0 {}", "x" * 100_000]
    for url in (server.url, f"{server.url}/retrieve", f"{server.url}/"):
        assert RemoteIndex(url, LONG).search_all(queries, 3) == [hits_of(query, 3) for query in queries]
    assert server.asked == [{"queries": queries, "topk": 3, "return_scores": True}] * 3
    assert set(server.lines) == {"POST /retrieve HTTP/1.1\r\n"}
    assert RemoteIndex(server.url, LONG).search_all([], 1) == []
    assert ask(server.url, "half \ud83d") == hits_of("half ?", 1)


def test_all_queries_are_in_flight_at_once(server):
    together = threading.Barrier(3)  # no request is answered before all have arrived
    server.reply = lambda asked, send: (together.wait(LONG / 2), right(asked, send))[1]
    queries = [*QUERIES, "one more"]
    assert RemoteIndex(server.url, LONG).search_all(queries, 1) == [hits_of(query, 1) for query in queries]
    assert sorted(len(asked["queries"]) for asked in server.asked) == [1, N, N]


PASSAGE = {"id": "17", "contents": '"A title"\nIts text'}
WIKI = Hit("17", '"A title"\nIts text', 0.83)
OTHER = {"title": "A title", "text": "Its text"}


@pytest.mark.parametrize(("item", "hit"), [
    ({"document": PASSAGE, "score": 0.83}, WIKI), ({"document": PASSAGE | {"id": 17} | OTHER, "score": 0.83}, WIKI),
    ({"document": PASSAGE | {"id": None} | OTHER, "score": 12}, Hit("A title", WIKI.text, 12.0)),
    ({"document": {"id": "a"} | OTHER, "score": 1}, Hit("a", "A title\nIts text", 1)),
    ({"document": {"id": "a", "text": "Its text"}, "score": 1}, Hit("a", "Its text", 1)),
    ({"document": {"contents": "x"}}, Hit("", "x", 0)), (PASSAGE, WIKI._replace(score=0)),
])  # fmt: skip
def test_what_other_servers_leave_out_is_accepted(item, hit):
    assert read_answer(json.dumps({"result": [[item]]}).encode(), 1, 1) == [[hit]]


@pytest.mark.parametrize(("reply", "match"), [
    (http(b"oh", "500 Internal Server Error"), "status 500"),
    (http(b"", "307 Temporary Redirect", Location="/elsewhere"), "status 307"),
    (http(b"<html>Welcome</html>"), "not JSON"),
    (http(b'{"result": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "not JSON"),
    (http(b'{"result": {"0": []}}'), "no list of results"), (http(b'{"result": [[], []]}'), "2 results instead of"),
    (http(b'{"result"', Content_Length=1000), "ended the connection"), (b"", "ended the connection"),
    (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 100_000, "ended the connection"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_a_request_that_fails_takes_no_others_with_it(server, reply, match):
    server.reply = half_right(lambda asked, send: reply)
    assert_first_failed(RemoteIndex(server.url, LONG).search_all(QUERIES, 2), match)
    assert len(server.asked) == 2  # nothing is sent twice, or elsewhere


@pytest.mark.parametrize(("begin", "then"), [
    (b"", b""), (http(answer_to(QUERIES[:N], 2))[:-1], b""), (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b" "),
], ids=["hang", "hang_in_the_body", "drip"])  # fmt: skip
def test_nobody_waits_longer_than_the_time_limit(server, begin, then):
    def reply(asked, send):
        send(begin)
        while not server.released.wait(0.01):
            send(then)

    server.reply = half_right(reply)
    index = RemoteIndex(server.url, SHORT)
    assert_first_failed(index.search_all(QUERIES, 2), "no answer within 0.3 s")
    server.reply = right
    assert index.search_all(QUERIES[:1], 2) == [hits_of(QUERIES[0], 2)]


DOCUMENT = b'[{"document": {"id": "1", "contents": "x"}, "score": %b}]'


@pytest.mark.parametrize("wrong", [
    b"null", b"{}", b"[null]", b'[{"document": null, "score": 1}]', b'[{"document": {"id": "1"}, "score": 1}]',
    b'[{"document": {"id": ["1"], "contents": "x"}, "score": 1}]', DOCUMENT % b"NaN", DOCUMENT % (b"1" + b"0" * 400),
], ids=lambda wrong: wrong.decode()[:60])  # fmt: skip
def test_a_result_that_cannot_be_used_spoils_no_other(wrong):
    good = DOCUMENT % b"1"
    first, second, third = read_answer(b'{"result": [%b, %b, %b]}' % (good, wrong, good), 3, 2)
    assert first == third == [Hit("1", "x", 1.0)]
    assert isinstance(second, SearchError)


def test_a_proxy_is_used_for_other_machines_only(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for host in ("127.0.0.1", "localhost"):
        assert ask(f"http://{host}:{server.server_address[1]}") == hits_of("a", 1)
    monkeypatch.setenv("HTTP_PROXY", server.url)
    assert ask("http://search.example") == hits_of("a", 1)
    assert server.lines[-1].startswith("POST http://search.example/retrieve")


def test_it_works_in_a_running_loop_and_in_threads(server):
    index = RemoteIndex(server.url, LONG)

    async def cell():
        return index.search_all(["in a notebook"], 1)

    assert asyncio.run(cell()) == [hits_of("in a notebook", 1)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda query: index.search_all([query], 2), QUERIES))
    assert found == [[hits_of(query, 2)] for query in QUERIES]


def test_ctrl_c_ends_a_search_at_once(server):
    gave_up = []

    def interrupt(asked, send):
        os.kill(os.getpid(), signal.SIGINT)
        gave_up.append(not server.released.wait(LONG))

    server.reply = interrupt
    with pytest.raises(KeyboardInterrupt):
        ask(server.url, seconds=2 * LONG)
    assert gave_up == []  # the server still waits


def test_an_outage_is_told_once_and_its_end_too(server, capsys):
    index, wrong = RemoteIndex(server.url, LONG), http(b"", "503 Service Unavailable")
    for reply in (right, lambda *_: wrong, lambda *_: wrong, right, right):
        server.reply = reply
        index.search_all(QUERIES, 2)
    failed, works = capsys.readouterr().out.splitlines()
    assert failed.startswith(f"searches at {server.url}/retrieve fail: ")
    assert "503" in failed
    assert works == f"searches at {server.url}/retrieve work again"
    server.reply = lambda *_: http(b'{"result": [null, []]}')  # one slow query is no outage
    assert [type(answer) for answer in index.search_all(["a", "b"], 2)] == [SearchError, list]
    assert capsys.readouterr().out == ""


def test_the_server_is_tried_at_the_start(server):
    RemoteIndex(server.url, LONG).check()
    server.reply = lambda *_: http(b"<html>Welcome</html>")
    for url, problem in ((server.url, r"retrieve: .* not JSON"), ("http://127.0.0.1:9", r"cannot be reached \(.+\)")):
        with pytest.raises(UserError, match=rf"--search-url http://127.0.0.1:\d+/.*{problem}; .*serve_index.py"):
            RemoteIndex(url, LONG).check()


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://a/b", "http://", "http://a:b:c", "http://a:99999", "http://[::1", "x\x00y"]
)
def test_what_is_no_url_is_refused(url):
    with pytest.raises(UserError, match=r"--search-url .*is not the URL of a server"):
        RemoteIndex(url, LONG)


def test_a_password_is_read_from_netrc_only(server, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    ask(server.url)
    assert [headers["authorization"] for headers in server.headers] == [
        f"Basic {base64.b64encode(b'me:secret').decode()}"
    ]
    with pytest.raises(UserError, match=r"--search-url holds a password, .*netrc: machine 127.0.0.1"):
        RemoteIndex(server.url.replace("//", "//hidden@"), LONG)
