"""SGLang's interface, against a server that answers in the forms of its sources: there was no real one."""

import pytest
from policies import gap, scale

from common.errors import EngineError
from common.sampling import begin_rows
from common.trajectory import Trajectory

from harness.base.config import TINY_POLICY
from harness.engines.sglang import SGLang

PROMPTS = [list(range(40, 60)), [7, 8, 9]]
SETTINGS = {"max_new_tokens": 12, "key": (3, 1)}
KNOWN = {"max_new_tokens", "temperature", "top_p", "stop_token_ids", "stop", "ignore_eos", "top_k", "min_p"}
KNOWN |= {"min_new_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "sampling_seed"}
UPDATE, GENERATE = "/update_weights_from_disk", "/generate"


@pytest.fixture(scope="module")
def only_server(api_server):
    """The stand-in for vLLM with other routes; `settings` are those of /server_info."""

    class Server(api_server.StandIn):
        def answer(self, method: str, path: str, body: dict) -> dict:
            self.calls[path] += 1
            if path == "/server_info":
                length = self.engine.max_model_len - 6
                return {"version": "0.5.23", "dtype": "float32", "max_req_input_len": length} | self.settings
            if path == UPDATE:
                self.engine.reload(body["model_path"])
                return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
            if path != GENERATE:
                raise api_server.RefusedRequest(404, "Not Found")
            answer = self.generate(body["input_ids"], body["sampling_params"])
            self.damage(answer)
            return answer

        def generate(self, prompt: list[int], settings: dict) -> dict:
            if unknown := settings.keys() - KNOWN:
                raise api_server.RefusedRequest(400, f"unknown field `{min(unknown)}`")
            (row,) = begin_rows([prompt], 1)
            row.prompt_index = settings["sampling_seed"]
            ends = {self.engine.tokenizer.eos_token_id, *self.own_ends, *settings["stop_token_ids"]}
            ends = () if settings.get("ignore_eos") else tuple(sorted(ends))
            budget = min(settings["max_new_tokens"], self.engine.max_model_len - len(prompt) - 2)  # cut silently
            common = (settings["temperature"], 1.0, ends, budget, tuple(settings.get("stop", ())))
            self.engine.run(api_server.Job([row], common))
            return self.form(row)

        def form(self, row: Trajectory) -> dict:
            ids, log_probs = row.completion_ids, row.sampler_log_probs[row.prompt_length :]
            ended = {"type": "stop", "matched": ids[-1] if ids[-1] in (2, *self.own_ends) else "a stop text"}
            reason = ended if row.finish_reason == "stop" else {"type": "length", "length": len(ids)}
            drawn = [[value, token, None] for value, token in zip(log_probs, ids, strict=True)]
            about = {"finish_reason": reason, "prompt_tokens": row.prompt_length, "output_token_logprobs": drawn}
            return {"text": "", "output_ids": ids, "meta_info": about}

    server = Server(TINY_POLICY, max_model_len=512)
    yield server.start()
    server.stop()


@pytest.fixture
def server(only_server):
    only_server.settings = {"enable_deterministic_inference": True}
    only_server.own_ends, only_server.damage = (), lambda answer: None
    only_server.calls.clear()
    return only_server


@pytest.fixture
def engine(server, connect):
    """The server is asked what it is."""
    engine = connect(server.url)
    assert isinstance(engine.server, SGLang)
    return engine


def test_samples_are_of_the_weights_of_the_policy(server, engine, policy):
    policy.temperature = 1.5
    rows = engine.sample(policy, PROMPTS, 6, **SETTINGS)
    assert gap(policy, rows) < 1e-4
    scale(policy)
    new = engine.sample(policy, PROMPTS, 6, **SETTINGS)
    assert gap(policy, new) < 1e-4 < 0.01 < gap(policy, rows)
    assert server.calls[UPDATE] == 2
    policy.stop_texts = ("an", "1", " s")
    new += engine.sample(policy, PROMPTS, 6, **SETTINGS)
    assert gap(policy, new) < 1e-4
    assert {row.finish_reason for row in new} == {"stop", "length"}
    greedy = engine.sample(policy, PROMPTS, 2, greedy=True, **SETTINGS)
    assert [row.ids for row in greedy[::2]] == [row.ids for row in greedy[1::2]]


def test_every_completion_has_its_own_seed(server, engine, policy):
    scale(policy, 0.5)  # closer to uniform: completions differ
    rows, again = (engine.sample(policy, PROMPTS, 4, **SETTINGS) for _ in range(2))
    assert [row.ids for row in rows] == [row.ids for row in again]
    assert len({tuple(row.completion_ids) for row in rows}) == 8
    part = engine.sample(policy, PROMPTS, 4, rows=range(2, 5), **SETTINGS)
    assert [row.ids for row in part] == [row.ids for row in rows[2:5]]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"enable_deterministic_inference": False}, "start it with --enable-deterministic-inference"),
        ({"dtype": "bfloat16"}, "start it with --dtype float32, or give another --engine-dtype"),
        ({"dtype": "auto"}, "start it with --dtype float32"),
        ({"max_req_input_len": None}, "other settings than are known here"),
    ],
)
def test_a_server_that_cannot_serve_here_is_refused(server, connect, settings, sentence):
    server.settings |= settings
    with pytest.raises(EngineError, match=sentence):
        connect(server.url)


def test_a_budget_that_would_be_cut_is_refused(engine, policy):
    fitting = [5] * (engine.max_length - 12)
    rows = engine.sample(policy, [fitting], 4, **SETTINGS)
    assert max(row.num_action_tokens for row in rows) <= 12
    with pytest.raises(EngineError, match="a longer --context-length"):
        engine.sample(policy, [[5, *fitting]], 4, **SETTINGS)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda answer, about: answer["output_ids"].append(5), "log-probs of other tokens"),
        (lambda answer, about: about.pop("output_token_logprobs"), "without ids, log-probs or a reason to finish"),
        (lambda answer, about: about["output_token_logprobs"][0].__setitem__(0, None), "without ids, log-probs"),
        (lambda answer, about: about.update(finish_reason=None), "or a reason to finish"),
        (lambda answer, about: about.update(prompt_tokens=2), "of another prompt"),
        (lambda answer, about: about.update(finish_reason={"type": "abort", "message": "x"}), "has broken off"),
        (lambda answer, about: about.update(finish_reason={"type": "stop", "matched": "NaN"}), "does not agree"),
    ],
)
def test_wrong_answers_are_refused(server, engine, policy, damage, sentence):
    server.damage = lambda answer: damage(answer, answer["meta_info"])
    with pytest.raises(EngineError, match=sentence):
        engine.sample(policy, PROMPTS[1:], 1, max_new_tokens=2, key=(3, 1))


def test_a_turn_that_ends_otherwise_is_refused(server, engine, policy):
    server.own_ends = range(5, 1024)
    with pytest.raises(EngineError, match=r"policy's turns end with \[2\]: start it with the policy's own folder"):
        engine.sample(policy, PROMPTS, 1, **SETTINGS)


def test_the_next_load_repairs_a_failed_one(server, engine, policy):
    server.fault("status_500", 1, UPDATE)
    with pytest.raises(EngineError, match="can be incomplete until it has loaded others"):
        engine.sample(policy, PROMPTS, 1, **SETTINGS)
    assert not server.calls[GENERATE]
    assert gap(policy, engine.sample(policy, PROMPTS, 1, **SETTINGS)) < 1e-4


@pytest.mark.slow
def test_a_run_samples_with_it(server, load_script, tmp_path):
    flags = ("--prompts-per-step", "2", "--group-size", "4", "--eval-prompts", "1", "--max-new-tokens", "12")
    flags += ("--steps", "2", "--device", "cpu", "--lr", "1e-4", "--runs-dir", str(tmp_path), "--temperature", "0.8")
    train = load_script("scale/engine/train.py")
    train.main([*flags, "--engine-url", server.url])  # it ends if the log-probs are not those of the policy
    assert server.calls[UPDATE] == 3
    with pytest.raises(EngineError, match="cannot sleep: start vLLM"):
        train.main([*flags, "--engine-url", server.url, "--engine-sleep"])
