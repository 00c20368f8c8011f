"""Every fault of a server becomes one sentence, nothing waits forever, and the next good request succeeds."""

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch
from policies import gap, scale

from common.errors import EngineError

import harness.engines.client
import harness.engines.vllm

COMPLETIONS, RELOAD, RESET = "/v1/completions", "/collective_rpc", "/reset_prefix_cache"
SETTINGS = {"max_new_tokens": 6, "key": (0, 1)}
PROMPTS = [[5, 6, 7], list(range(40, 60))]
PAGE = b"<!DOCTYPE html><title>Directory listing</title>"


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], str]]:
    """answering(content) returns the address of a program that sends `content` for each request, and hangs up."""
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
        yield lambda content: contents.append(content) or f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)  # `accept` ends


@pytest.fixture
def server(stand_in):
    return stand_in()


@pytest.fixture
def engine(server, connect):
    return connect(server.url)


def sentence(call: Callable, *arguments, **settings) -> str:
    with pytest.raises(EngineError) as caught:
        call(*arguments, **settings)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


def http(content: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    return head.encode() + content


# No engine -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["", "localhost:8000", "http://127.0.0.1:99999", "http://[::1", "http://host/v1"])
def test_what_is_no_address_is_refused(connect, url):
    assert sentence(connect, url) == f"{url} is not the address of an engine, such as http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "has not answered GET /version: "),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"', "has not answered GET /version: peer closed connection"),
        (http(PAGE), "has answered GET /version with something other than a JSON object"),
        (http(PAGE, "404 Not Found"), "listing</title>): it is no server of vLLM or SGLang"),
        (http(b'{"error": "x"}', "401 Unauthorized"), "(status 401: x): give its key in the variable VLLM_API_KEY"),
        (http(b"{}"), "has answered with other settings than are known here"),
    ],
)
def test_another_program_is_told_from_an_engine(connect, answering, content, found):
    assert found in sentence(connect, answering(content))


def test_a_key_is_sent(server, connect, policy, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sk-1")  # the server reads it, too
    assert connect(server.url).sample(policy, PROMPTS, 1, **SETTINGS)


def test_a_server_with_other_settings_is_refused(stand_in, server, connect):
    for flags, remedy in (
        ({"dev_mode": False}, "start it with VLLM_SERVER_DEV_MODE=1"),
        ({"logprobs_mode": "raw_logprobs"}, "start it with --logprobs-mode processed_logprobs"),
        ({"dtype": "bfloat16"}, "give --engine-dtype bfloat16, or start it with --dtype float32"),
    ):
        assert remedy in sentence(connect, stand_in(**flags).url)
    assert "--dtype bfloat16" in sentence(connect, server.url, torch.bfloat16)
    del server.flags["no_enable_chunked_prefill"]
    assert "start it with --no-enable-chunked-prefill" in sentence(connect, server.url)


# Wrong answers -------------------------------------------------------------------------------------------------------

NEVER_ENDS = [3, 5, 3]  # ids without an end of turn
DAMAGED = [  # the change to the last of two completions, whose end of turn is 2
    ({"prompt_token_ids": [1]}, "a completion of another prompt"),
    ({"token_ids": [1024, 2]}, "ids that are not tokens of the policy, which has 1024"),
    ({"token_ids": None}, "completions without ids, log-probs or a reason to finish"),
    ({"token_ids": ["x"]}, "completions without ids, log-probs or a reason to finish"),
    ({"logprobs": None}, "completions without ids, log-probs or a reason to finish"),
    ({"logprobs": {"token_logprobs": [None, None]}}, "completions without ids, log-probs or a reason to finish"),
    ({"finish_reason": []}, "a completion whose end does not agree with its reason to finish"),
    ({"logprobs": {"token_logprobs": [-1.0, 0.5]}}, "a log-prob that is not finite, or above 0"),
    ({"logprobs": {"token_logprobs": [-1.0, math.nan]}}, "a log-prob that is not finite, or above 0"),
    ({"logprobs": {"token_logprobs": [-1.0]}}, "1 log-probs for 2 tokens"),
    ({"finish_reason": "length"}, "a completion whose end does not agree with its reason to finish"),
    ({"token_ids": [2, 3]}, "tokens after an end of turn"),
    ({"token_ids": NEVER_ENDS * 3, "logprobs": {"token_logprobs": [-1.0] * 9}}, "9 tokens, with a budget of 6"),
    # Training would treat it as if the policy had wanted to continue
    ({"token_ids": [3, 5], "finish_reason": "length"}, "a completion whose end does not agree"),
]


def test_malformed_answers_are_refused(server, engine, policy):
    good = engine.sample(policy, PROMPTS, 2, **SETTINGS)
    fine = {"token_ids": [3, 2], "logprobs": {"token_logprobs": [-1.0, -1.0]}, "finish_reason": "stop"}
    for change, found in DAMAGED:
        server.damage = lambda choices, change=change: choices[-1].update(fine | change)
        assert found in sentence(engine.sample, policy, PROMPTS, 2, **SETTINGS), change
    server.damage = lambda choices: choices.pop()
    assert "1 completions instead of 2" in sentence(engine.sample, policy, PROMPTS, 2, **SETTINGS)
    server.damage = lambda choices: choices.reverse()  # vLLM returns them as they end: that is not a fault
    assert [row.ids for row in engine.sample(policy, PROMPTS, 2, **SETTINGS)] == [row.ids for row in good]
    for name, found in (
        ("invalid_json", "something other than a JSON object"),
        ("cut_answer", "peer closed connection"),
        ("status_500", "(status 500: The stand-in was told to fail.)"),
    ):
        server.fault(name, 1)
        assert found in sentence(engine.sample, policy, PROMPTS, 2, **SETTINGS), name
        assert [row.ids for row in engine.sample(policy, PROMPTS, 2, **SETTINGS)] == [row.ids for row in good], name
    assert server.calls[RELOAD] == 1


def test_answers_that_ignore_the_stop_texts_are_refused(server, engine, policy):
    policy.stop_texts = ("nsw", " an")
    [an, sw, er] = policy.tokenizer.convert_tokens_to_ids(["an", "sw", "er"])
    for ids, reason, found in (
        ([an, sw], "stop", None),
        ([an, er] * 3, "length", None),
        ([an], "stop", None),  # with the space that some tokenizers drop, and vLLM does not
        ([an, sw], "length", "a completion whose end does not agree with its reason to finish"),
        ([sw, er], "stop", "a completion whose end does not agree with its reason to finish"),
        ([an, sw, er], "stop", "tokens after a stop text"),
        ([an, 1024], "stop", "ids that are not tokens of the policy, which has 1024"),
    ):
        answer = {"token_ids": ids, "logprobs": {"token_logprobs": [-1.0] * len(ids)}, "finish_reason": reason}
        server.damage = lambda choices, answer=answer: choices[-1].update(answer)
        if found is None:
            assert engine.sample(policy, PROMPTS, 2, **SETTINGS)[-1].completion_ids == ids
        else:
            assert found in sentence(engine.sample, policy, PROMPTS, 2, **SETTINGS)


# Pushes that fail ----------------------------------------------------------------------------------------------------


def test_the_next_good_push_repairs_a_failed_one(server, engine, policy):
    """Even a push of the old weights, because the engine may have lost some of them."""
    engine.sample(policy, PROMPTS, 2, **SETTINGS)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    scale(policy)
    server.fault("failed_reload", 1, RELOAD)
    found = sentence(engine.sample, policy, PROMPTS, 2, **SETTINGS)
    assert "Worker failed with error" in found
    assert found.endswith("its weights can be incomplete until it has loaded others")
    assert server.calls[COMPLETIONS] == len(PROMPTS)  # they were never used for sampling
    policy.load_state_dict(before)
    rows = engine.sample(policy, PROMPTS, 2, push=False, **SETTINGS)
    assert gap(policy, rows) < 1e-4


def test_weights_that_cannot_be_written_are_named(engine, policy, tmp_path):
    (tmp_path / "file").touch()
    engine.folder = tmp_path / "file" / "engine"
    assert f"could not be written to {engine.folder} (" in sentence(engine.sample, policy, PROMPTS, 2, **SETTINGS)


def test_a_busy_cache_is_waited_for(server, engine, policy, monkeypatch):
    monkeypatch.setattr(harness.engines.vllm, "CACHE_SECONDS", 0.3)
    server.fault("busy_cache", 2, RESET)
    assert gap(policy, engine.sample(policy, PROMPTS, 2, **SETTINGS)) < 1e-4
    assert server.calls[RESET] == 3
    scale(policy)
    server.fault("busy_cache", None, RESET)
    assert "is busy with other programs' requests" in sentence(engine.sample, policy, PROMPTS, 2, **SETTINGS)
    assert server.calls[COMPLETIONS] == len(PROMPTS)


# Servers that do not respond -----------------------------------------------------------------------------------------


def test_a_slow_answer_is_waited_for_until_the_engine_is_closed(server, engine, policy, monkeypatch):
    monkeypatch.setattr(harness.engines.client, "HEALTH", 0.2)
    server.fault("hang", None, COMPLETIONS)
    waiting = engine.begin(policy, PROMPTS, 2, **SETTINGS)
    deadline = time.monotonic() + 60
    while server.calls["/health"] < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not waiting.future.done()
    engine.close()
    assert waiting.future.cancelled()


def test_a_server_that_hangs_is_given_up(server, engine, policy, monkeypatch):
    """The client asks whether the server is alive, and gets no answer."""
    for name in ("HEALTH", "ALIVE"):
        monkeypatch.setattr(harness.engines.client, name, 0.3)
    engine.push(policy)
    for path in (COMPLETIONS, "/health"):
        server.fault("hang", None, path)
    assert "has not answered /health for 0.3 seconds" in sentence(engine.sample, policy, PROMPTS, 2, **SETTINGS)


def test_a_server_that_is_gone_is_named(server, engine, connect, policy):
    engine.sample(policy, PROMPTS, 2, **SETTINGS)
    server.stop()
    server.closed.wait()
    found = sentence(engine.sample, policy, PROMPTS, 2, **SETTINGS)
    assert "has not answered POST /v1/completions: nothing listens there" in found
    engine.server.ending = lambda: "was killed (SIGKILL)"
    scale(policy)
    found = sentence(engine.sample, policy, PROMPTS, 2, **SETTINGS)
    assert "nothing listens there (All connection attempts failed); its process was killed (SIGKILL)" in found
    assert "has not answered GET /version: nothing listens there" in sentence(connect, server.url)
