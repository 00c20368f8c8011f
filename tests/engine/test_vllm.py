"""vLLM samples from the policy as it is now. With VLLM_URL from a real server of assets/tiny_policy, else a stand-in.

VLLM_URL=http://127.0.0.1:8000 python -m pytest -n 0 tests/engine/test_vllm.py

SGLang's interface, against a server that answers in the forms of its sources: no real one was at hand.
"""

import copy
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import common.engines.engine
from common.chat import encode_prompt
from common.engines.engine import Engine, seed_of
from common.engines.export import export
from common.engines.http import EngineError
from common.engines.sglang import SGLang
from common.engines.vllm import VLLM
from common.experience import collate
from common.logprobs import token_log_probs
from common.policy import Policy
from common.sampling import begin_rows, continue_rows, sample
from common.trajectory import Trajectory

from common.plumbing.config import RunConfig
from common.plumbing.engine import server_command
from common.plumbing.loading import load_policy
from common.plumbing.pretrained import read_model, read_tokenizer

CLOSE = 1e-4  # nats between two computations in float32
QUESTIONS = ("What is 47 plus 29?", "What is 3 plus 4?", "What is 47 plus 29 plus 113 minus 25?")
SETTINGS = {"max_new_tokens": 12, "key": (0, 1)}


@pytest.fixture(scope="module")
def prompts(loaded) -> list[list[int]]:
    """Of 18, 16 and 27 tokens."""
    return [encode_prompt(loaded.tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]


def gap(policy: Policy, rows: list[Trajectory]) -> float:
    """The largest difference of the recorded log-probs from those that training computes, in nats."""
    experience = collate(rows, policy.pad_id)
    return (token_log_probs(policy, experience, 64) - experience.sampler_log_probs).abs().max().item()


def ids_of(rows: list[Trajectory]) -> list[list[int]]:
    return [row.ids for row in rows]


@torch.no_grad()
def scale(policy: Policy, factor: float = 1.2) -> None:
    for weight in policy.parameters():
        weight.mul_(factor)


# What it returns -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_an_engine_returns_what_sample_returns(engine, policy, prompts, temperature):
    """The same fields for other draws, with the log-probs of training."""
    policy.temperature = temperature
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
    policy.temperature = 1.5 * temperature
    assert gap(policy, rows) > 0.01  # the temperature is in the log-probs


def test_greedy_completions_are_our_own(engine, policy, prompts):
    rows = engine.sample(policy, prompts, 2, greedy=True, **SETTINGS)
    assert ids_of(rows) == ids_of(sample(policy, prompts, 2, greedy=True, **SETTINGS))
    assert [row.completion_index for row in rows] == [0, 1, 0, 1, 0, 1]
    assert gap(policy, rows) < CLOSE


def test_parts_of_groups_are_those_of_the_whole(engine, policy, prompts):
    scale(policy, 0.5)  # nearer to uniform: completions differ
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
    engine.client.about = "the engine"
    engine.push = engine.complete = None  # not reached
    with pytest.raises(EngineError, match=f"^the engine takes sequences of up to {engine.max_length} tokens, not a "):
        engine.sample(policy, [[5, 6], [5] * (room + 1)], 1, **SETTINGS)


# Whose weights -------------------------------------------------------------------------------------------------------


def step(policy: Policy) -> None:
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)
    sequences = torch.arange(5, 45)[None]
    policy(sequences, torch.ones(1, 39)).log_probs.mean().backward()
    optimizer.step()
    policy.zero_grad()


def load(policy: Policy) -> None:
    policy.load_state_dict({name: weight * 1.2 for name, weight in policy.state_dict().items()})


def assign(policy: Policy) -> None:
    """Twice, which can put the weights where they were."""
    for factor in (2.0, 0.6):
        for weight in policy.parameters():
            weight.data = weight.data * factor


def write_past_autograd(policy: Policy) -> None:
    for weight in policy.parameters():
        weight.data.mul_(1.2)  # which torch does not count as a write into `weight`


def write_one(policy: Policy) -> None:
    with torch.no_grad():
        policy.model.get_decoder().norm.weight.mul_(1.5)


def test_the_weights_in_use_are_those_of_the_policy(engine, policy, prompts):
    assert gap(policy, engine.sample(policy, prompts, 4, **SETTINGS)) < CLOSE
    for number, change in enumerate((step, load, assign, write_past_autograd, write_one)):
        old = copy.deepcopy(policy)
        change(policy)
        rows = engine.sample(policy, prompts, 4, max_new_tokens=12, key=(0, number))
        assert gap(policy, rows) < CLOSE, change.__name__
        assert gap(old, rows) > 0.01, change.__name__


def written(engine: Engine) -> tuple[int, int]:
    status = (engine.folder / "model.safetensors").stat()
    return status.st_ino, status.st_mtime_ns


def test_weights_are_pushed_only_when_they_have_changed(engine, policy, prompts):
    engine.sample(policy, prompts, 1, **SETTINGS)
    before = written(engine)
    assert engine.costs()["time/weights"] > 0
    sample(policy, prompts, 1, **SETTINGS)
    engine.sample(policy, prompts, 2, greedy=True, **SETTINGS)
    gap(policy, engine.sample(policy, prompts, 2, **SETTINGS))
    policy.zero_grad()
    assert written(engine) == before
    costs = engine.costs()
    assert costs["time/weights"] == 0
    assert costs["time/generation"] > 0
    step(policy)
    engine.sample(policy, prompts, 1, **SETTINGS)
    assert written(engine) != before
    assert engine.costs()["time/weights"] > 0


def test_seconds_of_other_samples_are_not_those_of_a_step(engine, policy, prompts):
    """An evaluation after a step pushes weights and samples, also between the start of a rollout and its result."""
    engine.sample(policy, prompts, 1, **SETTINGS)
    step(policy)
    rollout = engine.begin(policy, prompts, 1, **SETTINGS)
    engine.sample(policy, prompts, 1, **SETTINGS)
    assert engine.costs()["time/weights"] == 0
    rollout.result()
    assert engine.costs()["time/weights"] > 0
    step(policy)
    engine.sample(policy, prompts, 1, **SETTINGS)
    engine.begin(policy, prompts, 1, **SETTINGS).result()
    assert engine.costs()["time/weights"] == 0


def test_each_push_is_a_reload_and_an_emptied_cache(stand_in, connect, policy, prompts):
    server = stand_in()
    engine = connect(server.url)
    for pushes in (1, 2):
        for _ in range(2):
            engine.sample(policy, prompts, 2, **SETTINGS)
        assert [server.calls[path] for path in ("/collective_rpc", "/reset_prefix_cache")] == [pushes, pushes]
        assert server.calls["/v1/completions"] == 2 * pushes * len(prompts)
        scale(policy)


def test_a_long_prompt_is_not_remembered_under_old_weights(engine, policy):
    """vLLM keeps the keys and values of blocks of 128 tokens, and would reuse them."""
    prompt = [5 + (7 * n) % 1000 for n in range(330)]
    for _ in range(3):
        rows = engine.sample(policy, [prompt], 4, **SETTINGS)
        assert gap(policy, rows) < CLOSE
        scale(policy, 1.02)
        assert gap(policy, rows) > 0.001


def test_a_policy_with_a_head_of_its_own_is_pushed(engine, policy, prompts, tmp_path):
    """The bundled one has tied embeddings. Each is given to a server of a model that is tied."""
    export(policy, tmp_path / "untied")
    untied = load_policy(RunConfig(model=str(tmp_path / "untied"), device="cpu"))
    with torch.no_grad():
        untied.model.lm_head.weight.mul_(1.2)
    assert untied.model.lm_head.weight is not untied.model.get_input_embeddings().weight
    rows = engine.sample(untied, prompts, 4, **SETTINGS)
    assert gap(untied, rows) < CLOSE
    assert gap(policy, rows) > 0.01
    assert gap(policy, engine.sample(policy, prompts, 4, **SETTINGS)) < CLOSE


def test_two_policies_take_turns(engine, policy, prompts):
    other = copy.deepcopy(policy)
    scale(other)
    for current, absent in ((policy, other), (other, policy), (policy, other)):
        rows = engine.sample(current, prompts, 4, **SETTINGS)
        assert gap(current, rows) < CLOSE
        assert gap(absent, rows) > 0.01


def test_without_a_push_the_engine_keeps_its_weights(engine, policy, prompts):
    rows = engine.sample(policy, prompts, 4, push=False, **SETTINGS)
    assert gap(policy, rows) < CLOSE  # it had none of this policy yet
    old = copy.deepcopy(policy)
    scale(policy)
    assert gap(old, engine.sample(policy, prompts, 4, push=False, **SETTINGS)) < CLOSE
    assert gap(policy, engine.sample(policy, prompts, 4, **SETTINGS)) < CLOSE


def test_samples_in_the_background_are_of_the_weights_before(engine, policy, prompts):
    waiting = engine.begin(policy, prompts, 4, **SETTINGS)
    old = copy.deepcopy(policy)
    scale(policy)
    assert gap(policy, engine.sample(policy, prompts, 4, **SETTINGS)) < CLOSE
    assert gap(old, waiting.result()) < CLOSE


def test_new_weights_wait_for_samples_of_the_old_ones(stand_in, connect, policy, prompts, monkeypatch):
    """The server samples nothing until it is waited for, or gets new weights."""
    server, are_sampled = stand_in(), []
    engine = connect(server.url)
    engine.push(policy)
    real_wait, real_load = common.engines.engine.wait, engine.load

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
    monkeypatch.setattr(common.engines.engine, "wait", wait)
    monkeypatch.setattr(engine, "load", load)
    engine.sample(policy, prompts, 4, **SETTINGS)
    assert are_sampled == [True]


# Random numbers ------------------------------------------------------------------------------------------------------


def test_the_key_decides_whatever_else_is_sampled(engine, policy, prompts):
    scale(policy, 0.5)  # nearer to uniform: completions differ

    def draw(key: tuple[int, int], chosen: list[int]) -> list[list[int]]:
        asked = [prompts[1] for _ in chosen]  # equal: what differs is drawn
        return ids_of(engine.sample(policy, asked, 2, max_new_tokens=8, key=key, prompt_index=chosen))

    first = draw((0, 1), [0, 1, 2, 3])
    assert draw((0, 1), [0, 1, 2, 3]) == first
    assert draw((0, 1), [3, 9, 1]) == [*first[6:], *draw((0, 1), [9]), *first[2:4]]
    others = [*draw((0, 2), [0, 1]), *draw((1, 1), [0, 1])]
    assert len({tuple(ids) for ids in first + others}) == len(first + others)


def test_seeds_of_different_prompts_are_far_apart():
    """Completion j of a prompt has its seed + j."""
    rows = begin_rows([[5]] * 1000, 2)
    seeds = [seed_of((0, number), row) for number in range(4) for row in rows]
    assert all(later == earlier + 1 for earlier, later in zip(seeds[::2], seeds[1::2], strict=True))
    ordered = sorted(seeds[::2])
    assert min(b - a for a, b in pairwise(ordered)) > 2**20
    assert 0 <= ordered[0] < ordered[-1] < 2**63 - 2**20


# SGLang --------------------------------------------------------------------------------------------------------------

POLICY = Path(__file__).resolve().parents[2] / "assets" / "tiny_policy"
PROMPTS = [list(range(40, 60)), [7, 8, 9]]
ASKED = {"max_new_tokens": 12, "key": (3, 1)}
KNOWN = {"max_new_tokens", "temperature", "top_p", "stop_token_ids", "ignore_eos", "top_k", "min_p", "min_new_tokens"}
KNOWN |= {"repetition_penalty", "presence_penalty", "frequency_penalty", "sampling_seed"}


@pytest.fixture(scope="module")
def only_server(api_server):
    """It is the stand-in for vLLM with other answers; `settings` are those of /server_info."""

    class Server(api_server.StandIn):
        def answer(self, method: str, path: str, body: dict | None) -> dict | list | None:
            self.calls[path] += 1
            if path == "/server_info" and self.settings is not None:
                length = self.max_model_len - 6
                return {"version": "0.5.23", "dtype": "float32", "max_req_input_len": length} | self.settings
            if path == "/update_weights_from_disk":
                self.engine.reload(body["model_path"])
                return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
            if path != "/generate":
                raise api_server.RefusedRequest(404, "Not Found")
            self.requests.append(body)
            settings = body["sampling_params"]
            if unknown := {name for completion in settings for name in completion} - KNOWN:
                raise api_server.RefusedRequest(400, f"unknown field `{min(unknown)}`")
            seeds = [completion.pop("sampling_seed") for completion in settings]
            assert all(completion == settings[0] for completion in settings)
            answers = self.generate(body["input_ids"], seeds, **settings[0])
            self.spoil(answers)
            return answers

        def generate(self, prompts: list[list[int]], seeds: list[int], **settings) -> list[dict]:
            policy, greedy = self.engine.policy, settings["temperature"] < 1e-6
            rows = begin_rows(prompts, 1)
            for row, seed in zip(rows, seeds, strict=True):
                row.prompt_index = seed
            with self.engine.lock:
                policy.temperature = 1.0 if greedy else settings["temperature"]
                own = [policy.tokenizer.eos_token_id, *self.own_ends]
                policy.end_of_turn_ids = [-1] if settings["ignore_eos"] else [*own, *settings["stop_token_ids"]]
                budget = min(settings["max_new_tokens"], self.max_model_len - len(prompts[0]) - 2)  # cut silently
                continue_rows(policy, rows, max_new_tokens=budget, key=(), top_p=settings["top_p"], greedy=greedy)
            return [self.form(row) for row in rows]

        def form(self, row) -> dict:
            ids, log_probs = row.completion_ids, row.sampler_log_probs[row.prompt_length :]
            ended = {"type": "stop", "matched": ids[-1]}
            reason = ended if row.finish_reason == "stop" else {"type": "length", "length": len(ids)}
            drawn = [[value, token, None] for value, token in zip(log_probs, ids, strict=True)]
            about = {"finish_reason": reason, "prompt_tokens": row.prompt_length, "output_token_logprobs": drawn}
            return {"text": "", "output_ids": ids, "meta_info": about}

    server = Server(POLICY, max_model_len=64)
    yield server.start()
    server.stop()


@pytest.fixture
def server(only_server):
    only_server.settings = {"enable_deterministic_inference": True}
    only_server.own_ends, only_server.spoil = (), lambda answers: None
    only_server.calls.clear()
    only_server.requests.clear()
    return only_server


@pytest.fixture
def sglang(server, tmp_path):
    sglang = SGLang(server.url, tmp_path / "engine")
    yield sglang
    sglang.close()


@pytest.fixture(scope="module")
def tuned() -> Policy:
    tokenizer = read_tokenizer(str(POLICY), local_files_only=True)
    return Policy(read_model(str(POLICY), torch.float32, local_files_only=True), tokenizer, [2], 0, temperature=1.5)


def log_probs_of(policy: Policy, row) -> list[float]:
    with torch.no_grad():
        logits = policy.model(torch.tensor([row.ids])).logits[0, row.prompt_length - 1 : -1] / policy.temperature
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(row.completion_ids)[:, None])[:, 0].tolist()


@pytest.mark.slow
def test_samples_have_the_log_probs_of_new_weights(server, sglang, tuned):
    rows = sglang.sample(tuned, PROMPTS, 4, **ASKED)
    with torch.no_grad():
        tuned.model.get_input_embeddings().weight.mul_(1.1)
    new = [row for top_p in (1.0, 0.8) for row in sglang.sample(tuned, PROMPTS, 4, top_p=top_p, **ASKED)]
    assert server.calls["/update_weights_from_disk"] == 2
    for row in new:
        assert row.sampler_log_probs[row.prompt_length :] == pytest.approx(log_probs_of(tuned, row), abs=1e-4)
    assert [row.completion_ids for row in new[:8]] != [row.completion_ids for row in rows]
    assert {row.finish_reason for row in rows + new} == {"stop", "length"}


@pytest.mark.slow
def test_every_completion_has_its_own_seed(server, sglang, tuned):
    rows, again = (sglang.sample(tuned, PROMPTS, 4, **ASKED) for _ in range(2))
    assert [row.ids for row in rows] == [row.ids for row in again]
    assert len({tuple(row.completion_ids) for row in rows}) == 8
    part = sglang.sample(tuned, PROMPTS, 4, rows=range(2, 5), **ASKED)
    assert [row.ids for row in part] == [row.ids for row in rows[2:5]]
    other = sglang.sample(tuned, PROMPTS, 4, max_new_tokens=12, key=(3, 2))
    assert not {tuple(row.ids) for row in rows} & {tuple(row.ids) for row in other}
    greedy, narrow = (sglang.sample(tuned, PROMPTS, 2, **ASKED, **how) for how in ({"greedy": True}, {"top_p": 0.001}))
    assert [row.ids for row in greedy] == [row.ids for row in narrow]
    assert greedy[0].ids == greedy[1].ids


REFUSED = {
    "no seeds": ({"enable_deterministic_inference": False}, "start it with --enable-deterministic-inference"),
    "older": ({}, "start it with --enable-deterministic-inference"),
    "dtype": ({"enable_deterministic_inference": True, "dtype": "bfloat16"}, "start it with --dtype float32"),
    "automatic": ({"enable_deterministic_inference": True, "dtype": "auto"}, "start it with --dtype float32"),
    "no length": ({"max_req_input_len": None}, "other settings to /server_info than are known"),
    "another": (None, "is not SGLang's"),
}


@pytest.mark.slow
def test_a_server_that_cannot_serve_here_is_refused(server, tmp_path):
    for server.settings, sentence in REFUSED.values():
        with pytest.raises(EngineError, match=sentence):
            SGLang(server.url, tmp_path / "engine")


@pytest.mark.slow
def test_a_budget_that_would_be_cut_is_refused(sglang, tuned):
    fitting = [5] * (sglang.max_length - 12)
    rows = sglang.sample(tuned, [fitting], 8, **ASKED)
    assert max(len(row.completion_ids) for row in rows) == 12
    with pytest.raises(EngineError, match="longer --context-length"):
        sglang.sample(tuned, [[5, *fitting]], 8, **ASKED)


def second(change):
    """A fault in the second completion of every answer."""
    return lambda answers: change(answers[1], answers[1]["meta_info"])


WRONG = {
    "ids of others": (second(lambda answer, about: answer["output_ids"].append(5)), "log-probs of other tokens"),
    "no log-probs": (second(lambda answer, about: about.pop("output_token_logprobs")), "without ids, log-probs"),
    "log-prob null": (second(lambda _, about: about["output_token_logprobs"][0].__setitem__(0, None)), "not finite"),
    "no reason": (second(lambda answer, about: about.update(finish_reason=None)), "or a reason to finish"),
    "prompt": (second(lambda answer, about: about.update(prompt_tokens=2)), "of another prompt"),
    "abort": (second(lambda _, about: about.update(finish_reason={"type": "abort", "message": "x"})), "broken off"),
    "NaN": (second(lambda _, about: about.update(finish_reason={"type": "stop", "matched": "NaN"})), "with 'NaN'"),
    "fewer": (lambda answers: answers.pop(), "1 completions instead of 2"),
    "no object": (lambda answers: answers.insert(0, 5), "without ids"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_are_refused(server, sglang, tuned, name):
    server.spoil, sentence = WRONG[name]
    with pytest.raises(EngineError, match=sentence):
        sglang.sample(tuned, PROMPTS[1:], 2, max_new_tokens=2, key=(3, 1))


@pytest.mark.slow
def test_a_turn_that_ends_otherwise_is_refused(server, sglang, tuned):
    server.own_ends = range(5, 1024)
    with pytest.raises(EngineError, match=r"policy's turns end with \[2\]: start it with the policy's own folder"):
        sglang.sample(tuned, PROMPTS, 1, **ASKED)


@pytest.mark.slow
def test_a_failed_load_is_repeated_with_the_next_samples(server, sglang, tuned, monkeypatch):
    monkeypatch.setattr("common.engines.engine.time.sleep", lambda seconds: None)
    server.fault("status_500", 2, "/update_weights_from_disk")
    with pytest.raises(EngineError, match="may be mixed until it has loaded others"):
        sglang.sample(tuned, PROMPTS[1:], 1, **ASKED)
    assert not server.requests
    assert sglang.sample(tuned, PROMPTS[1:], 1, **ASKED)


@pytest.mark.slow
def test_the_command_that_starts_a_server(tmp_path):
    flags = SGLang.server_flags(tmp_path, 8000, 512, torch.float32, "cuda:0")
    command = server_command("env X=1 /opt/python --mem-fraction-static 0.9", flags)
    assert command[:5] == ["env", "X=1", "/opt/python", "-m", "sglang.launch_server"]
    assert command[-2:] == ["--mem-fraction-static", "0.9"]
    assert {"--enable-deterministic-inference", "float32", "triton", "518"} < set(command)
    assert "triton" not in SGLang.server_flags(tmp_path, 8000, 512, torch.bfloat16, "cuda")
    with pytest.raises(EngineError, match="or --engine vllm"):
        SGLang.server_flags(tmp_path, 8000, 512, torch.float32, "cpu")
    assert "--no-enable-chunked-prefill" in VLLM.server_flags(tmp_path, 8000, 512, torch.float32, "cpu")
    assert "--gpu-memory-utilization" in VLLM.server_flags(tmp_path, 8000, 512, torch.float32, "cuda")
