"""What can be wrong with a server is one sentence, nothing waits for good, and the next good request is answered."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch
from policies import gap, scale

from common.errors import EngineError

import harness.engines.http
import harness.engines.vllm

COMPLETIONS, RELOAD, RESET = "/v1/completions", "/collective_rpc", "/reset_prefix_cache"
SETTINGS = {"max_new_tokens": 6, "key": (0, 1)}
PROMPTS = [[5, 6, 7], list(range(40, 60))]
PAGE = b"<!DOCTYPE html><title>Directory listing</title>"


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], str]]:
    """answering(content) is the address of a program that sends `content` for each request, and hangs up."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        contents = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # closed
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(contents[-1])

        threading.Thread(target=serve, daemon=True).start()

        def address(content: bytes) -> str:
            contents.append(content)
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        yield address
        listener.shutdown(socket.SHUT_RDWR)  # `accept` ends


def sentence(call: Callable, *arguments, **settings) -> str:
    with pytest.raises(EngineError) as caught:
        call(*arguments, **settings)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


def http(content: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


# No engine -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "http://:80", "http://127.0.0.1:99999", "http://[::1", "http://host/v1"]
)
def test_what_is_no_address_is_refused(connect, url):
    assert sentence(connect, url) == f"{url} is not the address of an engine, such as http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "has not answered GET /version: "),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"', "has not answered GET /version: peer closed connection"),
        (http(PAGE), "has answered GET /version with something other than a JSON object"),
        (http(PAGE, "404 Not Found"), "has refused GET /version (status 404: <!DOCTYPE html>"),
        (http(b'{"error": "x"}', "401 Unauthorized"), "(status 401: x): give its key in the variable VLLM_API_KEY"),
        (http(b"{}"), "has answered with other settings than are known here"),
    ],
)
def test_another_program_is_told_from_an_engine(connect, answering, content, found):
    assert found in sentence(connect, answering(content))


def test_a_key_is_sent(stand_in, connect, policy, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sk-1")  # of the server, too
    assert connect(stand_in().url).sample(policy, PROMPTS, 1, **SETTINGS)


def test_a_server_with_other_settings_is_refused(stand_in, connect):
    for flags, remedy in (
        ({"dev_mode": False}, "start it with VLLM_SERVER_DEV_MODE=1"),
        ({"logprobs_mode": "raw_logprobs"}, "start it with --logprobs-mode processed_logprobs"),
        ({"dtype": "bfloat16"}, "give --engine-dtype bfloat16, or start it with --dtype float32"),
    ):
        assert remedy in sentence(connect, stand_in(**flags).url)
    server = stand_in()
    assert "--dtype bfloat16" in sentence(connect, server.url, torch.bfloat16)
    connect(server.url)
    del server.flags["no_enable_chunked_prefill"]
    assert "start it with --no-enable-chunked-prefill" in sentence(connect, server.url)


# Wrong answers -------------------------------------------------------------------------------------------------------

FAULTS = {
    "wrong_prompt_ids": "a completion of another prompt",
    "ids_outside": "ids that are not tokens of the policy, which has 1024",
    "no_token_ids": "completions without ids, log-probs or a reason to finish",
    "no_log_probs": "completions without ids, log-probs or a reason to finish",
    "positive_log_probs": "a log-prob that is not finite, or above 0",
    "nan_log_probs": "a log-prob that is not finite, or above 0",
    "fewer_log_probs": "log-probs for",
    "too_few": "1 completions instead of 2",
    "wrong_finish_reason": "a completion whose end does not agree with its reason to finish",
    "tokens_after_end": "tokens after an end of turn",
    "too_many_tokens": "with a budget of 6",
    "invalid_json": "something other than a JSON object",
    "cut_answer": "peer closed connection",
    "status_500": "(status 500: The stand-in was told to fail.)",
}


def test_malformed_answers_are_refused(stand_in, connect, policy):
    server = stand_in()
    engine = connect(server.url)
    good = engine.sample(policy, PROMPTS, 2, **SETTINGS)
    for name, found in FAULTS.items():
        server.fault(name, 1)
        assert found in sentence(engine.sample, policy, PROMPTS, 2, **SETTINGS), name
        assert [row.ids for row in engine.sample(policy, PROMPTS, 2, **SETTINGS)] == [row.ids for row in good], name
    assert server.calls[RELOAD] == 1


def test_answers_of_wrong_types_are_refused(connect, stand_in, policy, monkeypatch):
    """No part of an answer can raise something other than the sentence."""
    engine = connect(stand_in().url)
    engine.push(policy)
    choice = {"index": 0, "token_ids": [2], "prompt_token_ids": [5], "finish_reason": "stop"}
    choice |= {"logprobs": {"token_logprobs": [-1.0]}}
    answers = [None, [], {}, "choices", [choice, choice], [None], [[]]]
    wrong = [{name: v} for name in choice if name != "index" for v in (None, 1.5, "x", [], {}, [None])]
    wrong += [{"token_ids": [value]} for value in ("x", None)]
    wrong += [{"logprobs": {"token_logprobs": value}} for value in (None, 1, "x", ["x"], [None], [-1, -1])]
    answer = {}

    async def ask(*_) -> dict:
        return answer

    monkeypatch.setattr(engine.server.client, "ask", ask)
    for choices in [*answers, *([choice | damage] for damage in wrong)]:
        answer["choices"] = choices
        assert "has answered with" in sentence(engine.sample, policy, [[5]], 1, **SETTINGS), choices
    answer["choices"] = [choice]
    assert engine.sample(policy, [[5]], 1, **SETTINGS)[0].completion_ids == [2]


# Pushes that fail ----------------------------------------------------------------------------------------------------


def test_the_next_good_push_repairs_a_failed_one(stand_in, connect, policy):
    """Even of the weights that the engine had before, of which it may have lost a part."""
    server = stand_in()
    engine = connect(server.url)
    engine.sample(policy, PROMPTS, 2, **SETTINGS)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    scale(policy)
    server.fault("failed_reload", 1, RELOAD)
    found = sentence(engine.sample, policy, PROMPTS, 2, **SETTINGS)
    assert "Worker failed with error" in found
    assert found.endswith("its weights may be incomplete until it has loaded others")
    assert server.calls[COMPLETIONS] == len(PROMPTS)  # nothing was sampled with them
    policy.load_state_dict(before)
    rows = engine.sample(policy, PROMPTS, 2, push=False, **SETTINGS)
    assert gap(policy, rows) < 1e-4


def test_weights_that_cannot_be_written_are_named(stand_in, connect, policy, tmp_path):
    engine = connect(stand_in().url)
    (tmp_path / "file").touch()
    engine.folder = tmp_path / "file" / "engine"
    assert f"could not be written to {engine.folder} (" in sentence(engine.sample, policy, PROMPTS, 2, **SETTINGS)


def test_a_busy_cache_is_waited_for(stand_in, connect, policy, monkeypatch):
    monkeypatch.setattr(harness.engines.vllm, "CACHE_SECONDS", 0.3)
    server = stand_in()
    engine = connect(server.url)
    server.fault("busy_cache", 2, RESET)
    assert gap(policy, engine.sample(policy, PROMPTS, 2, **SETTINGS)) < 1e-4
    assert server.calls[RESET] == 3
    scale(policy)
    server.fault("busy_cache", None, RESET)
    assert "is busy with requests of others" in sentence(engine.sample, policy, PROMPTS, 2, **SETTINGS)
    assert server.calls[COMPLETIONS] == len(PROMPTS)


# Servers that are silent ---------------------------------------------------------------------------------------------


def test_a_slow_answer_is_waited_for_until_the_engine_is_closed(stand_in, connect, policy, monkeypatch):
    monkeypatch.setattr(harness.engines.http, "HEALTH", 0.2)
    server = stand_in()
    engine = connect(server.url)
    server.fault("hang", None, COMPLETIONS)
    waiting = engine.begin(policy, PROMPTS, 2, **SETTINGS)
    deadline = time.monotonic() + 60
    while server.calls["/health"] < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not waiting.future.done()
    engine.close()
    assert waiting.future.cancelled()


def test_a_server_that_hangs_is_given_up(stand_in, connect, policy, monkeypatch):
    """It is asked whether it is alive, and does not say so."""
    for name in ("HEALTH", "ALIVE"):
        monkeypatch.setattr(harness.engines.http, name, 0.3)
    server = stand_in()
    engine = connect(server.url)
    engine.push(policy)
    for path in (COMPLETIONS, "/health"):
        server.fault("hang", None, path)
    assert "has not answered /health for 0.3 seconds" in sentence(engine.sample, policy, PROMPTS, 2, **SETTINGS)


def test_a_server_that_is_gone_is_named(stand_in, connect, policy):
    server = stand_in()
    engine = connect(server.url)
    engine.sample(policy, PROMPTS, 2, **SETTINGS)
    server.stop()
    server.closed.wait()
    found = sentence(engine.sample, policy, PROMPTS, 2, **SETTINGS)
    assert "has not answered POST /v1/completions: nothing listens there" in found
    engine.server.client.ending = lambda: "was killed (SIGKILL)"
    scale(policy)
    found = sentence(engine.sample, policy, PROMPTS, 2, **SETTINGS)
    assert "nothing listens there (All connection attempts failed); its process was killed (SIGKILL)" in found
    assert "has not answered GET /version: nothing listens there" in sentence(connect, server.url)
