"""SGLang's interface, against a server that answers in the forms of its sources: no real one was at hand."""

from pathlib import Path

import pytest
import torch

from common.engines.http import EngineError
from common.engines.sglang import SGLang
from common.engines.vllm import VLLM
from common.policy import Policy
from common.sampling import begin_rows, continue_rows

from common.plumbing.engine import server_command
from common.plumbing.pretrained import read_model, read_tokenizer

pytestmark = pytest.mark.slow

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
def engine(server, tmp_path):
    engine = SGLang(server.url, tmp_path / "engine")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def policy() -> Policy:
    tokenizer = read_tokenizer(str(POLICY), local_files_only=True)
    return Policy(read_model(str(POLICY), torch.float32, local_files_only=True), tokenizer, [2], 0, temperature=1.5)


def log_probs_of(policy: Policy, row) -> list[float]:
    with torch.no_grad():
        logits = policy.model(torch.tensor([row.ids])).logits[0, row.prompt_length - 1 : -1] / policy.temperature
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(row.completion_ids)[:, None])[:, 0].tolist()


def test_samples_have_the_log_probs_of_new_weights(server, engine, policy):
    rows = engine.sample(policy, PROMPTS, 4, **ASKED)
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.mul_(1.1)
    new = [row for top_p in (1.0, 0.8) for row in engine.sample(policy, PROMPTS, 4, top_p=top_p, **ASKED)]
    assert server.calls["/update_weights_from_disk"] == 2
    for row in new:
        assert row.sampler_log_probs[row.prompt_length :] == pytest.approx(log_probs_of(policy, row), abs=1e-4)
    assert [row.completion_ids for row in new[:8]] != [row.completion_ids for row in rows]
    assert {row.finish_reason for row in rows + new} == {"stop", "length"}


def test_every_completion_has_its_own_seed(server, engine, policy):
    rows, again = (engine.sample(policy, PROMPTS, 4, **ASKED) for _ in range(2))
    assert [row.ids for row in rows] == [row.ids for row in again]
    assert len({tuple(row.completion_ids) for row in rows}) == 8
    part = engine.sample(policy, PROMPTS, 4, rows=range(2, 5), **ASKED)
    assert [row.ids for row in part] == [row.ids for row in rows[2:5]]
    other = engine.sample(policy, PROMPTS, 4, max_new_tokens=12, key=(3, 2))
    assert not {tuple(row.ids) for row in rows} & {tuple(row.ids) for row in other}
    greedy, narrow = (engine.sample(policy, PROMPTS, 2, **ASKED, **how) for how in ({"greedy": True}, {"top_p": 0.001}))
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


def test_a_server_that_cannot_serve_here_is_refused(server, tmp_path):
    for server.settings, sentence in REFUSED.values():
        with pytest.raises(EngineError, match=sentence):
            SGLang(server.url, tmp_path / "engine")


def test_a_budget_that_would_be_cut_is_refused(engine, policy):
    fitting = [5] * (engine.max_length - 12)
    rows = engine.sample(policy, [fitting], 8, **ASKED)
    assert max(len(row.completion_ids) for row in rows) == 12
    with pytest.raises(EngineError, match="longer --context-length"):
        engine.sample(policy, [[5, *fitting]], 8, **ASKED)


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


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_are_refused(server, engine, policy, name):
    server.spoil, sentence = WRONG[name]
    with pytest.raises(EngineError, match=sentence):
        engine.sample(policy, PROMPTS[1:], 2, max_new_tokens=2, key=(3, 1))


def test_a_turn_that_ends_otherwise_is_refused(server, engine, policy):
    server.own_ends = range(5, 1024)
    with pytest.raises(EngineError, match=r"policy's turns end with \[2\]: start it with the policy's own folder"):
        engine.sample(policy, PROMPTS, 1, **ASKED)


def test_a_failed_load_is_repeated_with_the_next_samples(server, engine, policy, monkeypatch):
    monkeypatch.setattr("common.engines.engine.time.sleep", lambda seconds: None)
    server.fault("status_500", 2, "/update_weights_from_disk")
    with pytest.raises(EngineError, match="may be mixed until it has loaded others"):
        engine.sample(policy, PROMPTS[1:], 1, **ASKED)
    assert not server.requests
    assert engine.sample(policy, PROMPTS[1:], 1, **ASKED)


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
