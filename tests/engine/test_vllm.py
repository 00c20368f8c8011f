"""vLLM samples from the current policy. With VLLM_URL on a real server of the bundled policy, else on a stand-in.

VLLM_URL=http://127.0.0.1:8000 python -m pytest -n 0 tests/engine/test_vllm.py
"""

import copy
import math
from itertools import pairwise

import httpx2
import pytest
import torch
from policies import gap, load, scale

from common.chat import encode_prompt
from common.errors import EngineError
from common.experience import collate
from common.logprobs import token_log_probs
from common.policy import Policy
from common.sampling import begin_rows, sample
from common.trajectory import Trajectory

import harness.engines.engine
from harness.engines.engine import seed_of
from harness.engines.folder import export

CLOSE = 1e-4  # nats between two computations in float32
QUESTIONS = ("What is 47 plus 29?", "What is 3 plus 4?", "What is 47 plus 29 plus 113 minus 25?")
SETTINGS = {"max_new_tokens": 12, "key": (0, 1)}


@pytest.fixture(scope="module")
def prompts(loaded) -> list[list[int]]:
    """With 18, 16 and 27 tokens."""
    return [encode_prompt(loaded.tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]


def ids_of(rows: list[Trajectory]) -> list[list[int]]:
    return [row.ids for row in rows]


# What it returns -----------------------------------------------------------------------------------------------------


def test_an_engine_returns_what_sample_returns(engine, policy, prompts):
    """Same fields, other draws, and the log-probs of training."""
    policy.temperature = 0.7
    names = {"prompt_index": [7, 3, 11]}
    rows, own = (draw(policy, prompts, 6, **SETTINGS, **names) for draw in (engine.sample, sample))
    for row, like in zip(rows, own, strict=True):
        assert row.ids[: row.prompt_length] == like.ids[: like.prompt_length]
        fixed = ("prompt_length", "prompt_index", "completion_index", "text", "turns", "rewards", "description")
        assert [getattr(row, name) for name in fixed] == [getattr(like, name) for name in fixed]
        count = len(row.ids) - row.prompt_length
        assert row.action_mask == [0] * row.prompt_length + [1] * count
        assert row.sampler_log_probs[: row.prompt_length] == [0.0] * row.prompt_length
        assert len(row.sampler_log_probs) == len(row.ids)
        assert 1 <= count <= 12
        assert set(policy.end_of_turn_ids).isdisjoint(row.completion_ids[:-1])
        assert (row.completion_ids[-1] in policy.end_of_turn_ids) == (row.finish_reason == "stop")
        assert count == 12 or row.finish_reason == "stop"
    assert {row.finish_reason for row in rows} == {"stop", "length"}
    assert gap(policy, rows) < CLOSE
    policy.temperature = 1.0
    assert gap(policy, rows) > 0.01  # the log-probs include the temperature


def test_only_our_end_of_turn_ids_end_a_completion_and_nothing_is_penalised(stand_in, connect, policy):
    """Whatever the server's defaults are."""
    server = stand_in()
    connect(server.url).sample(policy, [[5, 6, 7]], 1, max_new_tokens=4, key=(0, 1))
    neutral = {"ignore_eos": True, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    neutral |= {"top_k": -1, "min_p": 0.0, "temperature": 1.0, "top_p": 1.0, "stop_token_ids": policy.end_of_turn_ids}
    assert neutral.items() <= {name: server.requests[-1][name] for name in neutral}.items()


def test_greedy_completions_are_our_own(engine, policy, prompts):
    rows = engine.sample(policy, prompts, 2, greedy=True, **SETTINGS)
    assert ids_of(rows) == ids_of(sample(policy, prompts, 2, greedy=True, **SETTINGS))
    assert [row.completion_index for row in rows] == [0, 1, 0, 1, 0, 1]
    assert gap(policy, rows) < CLOSE


def test_stop_texts_end_a_completion_as_ours(engine, policy, prompts):
    policy.temperature, policy.stop_texts = 1.5, ("an", "1", " s")
    rows = engine.sample(policy, prompts, 6, **SETTINGS | {"max_new_tokens": 24})
    for row in rows:
        ended = [n for n in range(1, 25) if any(stop in text_of(policy, row, n) for stop in policy.stop_texts)]
        at_end_of_turn = row.completion_ids[-1] in policy.end_of_turn_ids
        assert ended[:1] == [row.num_action_tokens] or at_end_of_turn or (ended, row.num_action_tokens) == ([], 24)
        assert (row.finish_reason == "stop") == (bool(ended) or at_end_of_turn)
    assert any(text_of(policy, row).endswith(policy.stop_texts) for row in rows)
    assert gap(policy, rows) < CLOSE
    greedy = [draw(policy, prompts, 1, greedy=True, **SETTINGS) for draw in (engine.sample, sample)]
    assert ids_of(greedy[0]) == ids_of(greedy[1])
    assert {row.finish_reason for row in greedy[0]} == {"stop"}


def text_of(policy: Policy, row: Trajectory, length: int | None = None) -> str:
    return policy.tokenizer.decode(row.completion_ids[:length], skip_special_tokens=True)


def test_parts_of_groups_are_those_of_the_whole(engine, policy, prompts):
    scale(policy, 0.5)  # closer to uniform: completions differ
    whole = engine.sample(policy, prompts, 3, **SETTINGS)
    assert len({tuple(row.ids) for row in whole}) > 6
    parts = [range(4), range(4, 5), range(5, 9), range(9, 9)]
    rows = [row for part in parts for row in engine.sample(policy, prompts, 3, rows=part, **SETTINGS)]
    assert ids_of(rows) == ids_of(whole)
    assert [(row.prompt_index, row.completion_index) for row in rows] == [(q, g) for q in range(3) for g in range(3)]


def test_log_probs_under_top_p_are_of_what_can_be_drawn(engine, policy, prompts):
    policy.temperature = 1.5
    rows = engine.sample(policy, prompts, 4, top_p=0.9, **SETTINGS)
    experience = collate(rows, policy.pad_id)
    higher = (experience.sampler_log_probs - token_log_probs(policy, experience, 64))[experience.action_mask.bool()]
    assert higher.min() > -CLOSE
    assert 0.01 < higher.max() < -math.log(0.9) + CLOSE


def test_a_prompt_without_room_is_refused_unsent(engine, policy):
    """The server would cut the budget, without an error."""
    room = engine.max_length - 12
    assert engine.sample(policy, [[5] * room], 1, **SETTINGS)[0].num_action_tokens <= 12
    engine.server.about, engine.push = "the engine", None  # must not be reached
    with pytest.raises(EngineError, match=f"^the engine takes sequences of up to {engine.max_length} tokens, not a "):
        engine.sample(policy, [[5, 6], [5] * (room + 1)], 1, **SETTINGS)


# Which weights --------------------------------------------------------------------------------------------------------


def step(policy: Policy) -> None:
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)
    sequences = torch.arange(5, 45)[None]
    policy(sequences, torch.ones(1, 39)).log_probs.mean().backward()
    optimizer.step()
    policy.zero_grad()


def assign(policy: Policy) -> None:
    """Twice, so that the weights may return to their old address."""
    for factor in (2.0, 0.6):
        for weight in policy.parameters():
            weight.data = weight.data * factor


def write_past_autograd(policy: Policy) -> None:
    for weight in policy.parameters():
        weight.data.mul_(1.2)  # torch does not count this as a write to `weight`


def write_one(policy: Policy) -> None:
    with torch.no_grad():
        policy.model.get_decoder().norm.weight.mul_(1.5)


def test_the_weights_in_use_are_those_of_the_policy(engine, policy, prompts):
    assert gap(policy, engine.sample(policy, prompts, 4, **SETTINGS)) < CLOSE
    for number, change in enumerate((step, assign, write_past_autograd, write_one)):
        old = copy.deepcopy(policy)
        change(policy)
        rows = engine.sample(policy, prompts[:1], 2, max_new_tokens=6, key=(0, number))
        assert gap(policy, rows) < CLOSE, change.__name__
        assert gap(old, rows) > 0.01, change.__name__


def test_weights_are_pushed_only_when_they_have_changed(stand_in, connect, policy, prompts):
    """Each push is a reload and an emptied cache."""
    server = stand_in()
    engine = connect(server.url)
    for pushes in (1, 2):
        engine.sample(policy, prompts, 2, **SETTINGS)
        assert engine.costs()["time/weights"] > 0
        policy.zero_grad()
        sample(policy, prompts, 1, **SETTINGS)
        gap(policy, engine.sample(policy, prompts, 2, greedy=True, **SETTINGS))
        assert engine.costs()["time/weights"] == 0
        assert engine.costs()["time/generation"] > 0
        assert [server.calls[path] for path in ("/collective_rpc", "/reset_prefix_cache")] == [pushes, pushes]
        assert server.calls["/v1/completions"] == 2 * pushes * len(prompts)
        step(policy)
    rollout = engine.begin(policy, prompts, 1, **SETTINGS)
    engine.sample(policy, prompts, 1, **SETTINGS)  # of an evaluation
    assert engine.costs()["time/weights"] == 0
    rollout.result()
    assert engine.costs()["time/weights"] > 0  # for its own weights


def test_a_long_prompt_is_not_remembered_under_old_weights(engine, policy):
    """vLLM keeps the keys and values of blocks of 128 tokens, and would reuse them."""
    prompt = [5 + (7 * n) % 1000 for n in range(330)]
    for _ in range(2):
        rows = engine.sample(policy, [prompt], 2, **SETTINGS)
        assert gap(policy, rows) < CLOSE
        scale(policy, 1.02)
        assert gap(policy, rows) > 0.001


def test_a_policy_with_a_head_of_its_own_is_pushed(engine, policy, prompts, tmp_path):
    """The bundled policy has tied embeddings. Each policy is pushed to a server whose model is tied."""
    export(policy, tmp_path / "untied")
    untied = load(tmp_path / "untied")
    with torch.no_grad():
        untied.model.lm_head.weight.mul_(1.2)
    assert untied.model.lm_head.weight is not untied.model.get_input_embeddings().weight
    rows = engine.sample(untied, prompts, 4, **SETTINGS)
    assert gap(untied, rows) < CLOSE
    assert gap(policy, rows) > 0.01
    assert gap(policy, engine.sample(policy, prompts, 4, **SETTINGS)) < CLOSE


def test_without_a_push_or_in_the_background_samples_are_of_the_weights_before(engine, policy, prompts):
    assert gap(policy, engine.sample(policy, prompts, 4, push=False, **SETTINGS)) < CLOSE  # it had none yet
    old, waiting = copy.deepcopy(policy), engine.begin(policy, prompts, 4, **SETTINGS)
    scale(policy)
    assert gap(old, engine.sample(policy, prompts, 4, push=False, **SETTINGS)) < CLOSE
    assert gap(policy, engine.sample(policy, prompts, 4, **SETTINGS)) < CLOSE
    assert gap(old, waiting.result()) < CLOSE


def test_new_weights_wait_for_samples_of_the_old_ones(stand_in, connect, policy, prompts, monkeypatch):
    """The server samples nothing until somebody waits for it, or gives it new weights."""
    server, are_sampled = stand_in(), []
    engine = connect(server.url)
    engine.push(policy)
    real_wait, real_load = harness.engines.engine.wait, engine.server.load

    def wait(futures: list) -> None:
        if futures:
            server.engine.lock.release()
        real_wait(futures)

    def load(folder) -> None:
        are_sampled.append(engine._newest.done())
        if not are_sampled[0]:
            server.engine.lock.release()
        real_load(folder)

    server.engine.lock.acquire()
    engine.begin(policy, prompts, 4, **SETTINGS)
    scale(policy)
    monkeypatch.setattr(harness.engines.engine, "wait", wait)
    monkeypatch.setattr(engine.server, "load", load)
    engine.sample(policy, prompts, 4, **SETTINGS)
    assert are_sampled == [True]


# Sleep ---------------------------------------------------------------------------------------------------------------


def test_after_sleep_even_unchanged_weights_are_pushed(engine_url, connect, policy, prompts):
    """It lasts from the result of a step to whatever is sampled next; an evaluation does not end in sleep."""
    engine = connect(engine_url, torch.float32, True)

    def is_asleep() -> bool:
        return httpx2.get(f"{engine_url}/is_sleeping", trust_env=False).json()["is_sleeping"]

    for push in (True, True, False):
        rows = engine.begin(policy, prompts, 4, push=push, **SETTINGS).result()
        assert is_asleep()
        assert engine.costs()["time/weights"] > 0
        assert gap(policy, rows) < CLOSE
    assert gap(policy, engine.sample(policy, prompts, 2, greedy=True, **SETTINGS)) < CLOSE
    assert engine.costs()["time/weights"] > 0
    assert not is_asleep()
    step(policy)
    assert gap(policy, engine.sample(policy, prompts, 2, **SETTINGS)) < CLOSE
    rows = engine.begin(policy, prompts, 2, **SETTINGS).result()
    assert engine.costs()["time/weights"] == 0
    assert gap(policy, rows) < CLOSE
    assert is_asleep()
    later = connect(engine_url)  # a run whose predecessor was interrupted
    assert gap(policy, later.sample(policy, prompts, 2, **SETTINGS)) < CLOSE
    assert not is_asleep()


def test_a_load_that_fails_leaves_the_engine_asleep_for_the_next_one(stand_in, connect, policy, prompts):
    server = stand_in(enable_sleep_mode=True)
    engine = connect(server.url, torch.float32, True)
    engine.begin(policy, prompts, 2, **SETTINGS).result()
    server.fault("failed_reload", 1, "/collective_rpc")
    with pytest.raises(EngineError, match="its weights can be incomplete until it has loaded others"):
        engine.sample(policy, prompts, 2, **SETTINGS)
    assert server.engine.asleep == {"kv_cache"}
    assert gap(policy, engine.sample(policy, prompts, 2, **SETTINGS)) < CLOSE


# Random numbers ------------------------------------------------------------------------------------------------------


def test_the_key_decides_whatever_else_is_sampled(engine, policy, prompts):
    scale(policy, 0.5)  # closer to uniform: completions differ

    def draw(key: tuple[int, int], chosen: list[int]) -> list[list[int]]:
        asked = [prompts[1] for _ in chosen]  # equal: differences come from the draws
        return ids_of(engine.sample(policy, asked, 2, max_new_tokens=8, key=key, prompt_index=chosen))

    first = draw((0, 1), [0, 1, 2, 3])
    assert draw((0, 1), [0, 1, 2, 3]) == first
    assert draw((0, 1), [3, 9, 1]) == [*first[6:], *draw((0, 1), [9]), *first[2:4]]
    others = [*draw((0, 2), [0, 1]), *draw((1, 1), [0, 1])]
    assert len({tuple(ids) for ids in first + others}) == len(first + others)


def test_seeds_of_different_prompts_are_far_apart():
    """Completion j of a prompt has the prompt's seed + j."""
    rows = begin_rows([[5]] * 1000, 2)
    seeds = [seed_of((0, number), row) for number in range(4) for row in rows]
    assert all(later == earlier + 1 for earlier, later in zip(seeds[::2], seeds[1::2], strict=True))
    ordered = sorted(seeds[::2])
    assert min(b - a for a, b in pairwise(ordered)) > 2**20
    assert 0 <= ordered[0] < ordered[-1] < 2**63 - 2**20
