"""The stand-in for vLLM answers like vLLM. With VLLM_URL the first tests ask a real server."""

import shutil
from pathlib import Path

import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file

POLICY = Path(__file__).resolve().parents[2] / "data" / "policies" / "tiny_policy"
PROMPT = list(range(40, 60))
ASKED = {"prompt": PROMPT, "max_tokens": 12, "logprobs": 0, "return_token_ids": True, "ignore_eos": True, "seed": 5}
ASKED |= {"stop_token_ids": [2], "temperature": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def ask(url: str, path: str = "/v1/completions", **fields) -> tuple[int, dict]:
    """The status and the answer."""
    answer = httpx2.post(url + path, json=fields, timeout=60, trust_env=False)
    return answer.status_code, answer.json()


def complete(url: str, **fields) -> list[dict]:
    status, answer = ask(url, **ASKED | fields)
    assert status == 200, answer
    return answer["choices"]


def test_a_budget_beyond_the_context_is_cut_silently(engine_url):
    (choice,) = complete(engine_url, prompt=[5] * 500, max_tokens=96, stop_token_ids=[])
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (12, "length")


@pytest.fixture
def reload(tmp_path):
    """Make a server load the tiny policy with an untied head, after `change(weights)`; returns the status."""

    def reload(server, change) -> int:
        folder = tmp_path / "new"
        shutil.copytree(POLICY, folder, dirs_exist_ok=True)
        weights = {name: weight.float() for name, weight in load_file(POLICY / "model.safetensors").items()}
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        change(weights)
        save_file(weights, folder / "model.safetensors")
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        return ask(server.url, "/collective_rpc", **body)[0]

    return reload


@pytest.mark.slow
def test_new_weights_are_used_and_absent_ones_kept(stand_in, reload):
    server = stand_in()

    def log_probs() -> list[float]:
        return complete(server.url, temperature=0)[0]["logprobs"]["token_logprobs"]

    old, uniform = log_probs(), pytest.approx([-torch.tensor(1024.0).log().item()] * 12)
    assert reload(server, lambda weights: weights["lm_head.weight"].zero_()) == 200
    assert log_probs() == uniform
    assert reload(server, lambda weights: weights.pop("lm_head.weight")) == 200
    assert log_probs() == uniform
    assert reload(server, lambda weights: None) == 200
    assert log_probs() == pytest.approx(old, abs=1e-5)


@pytest.mark.slow
def test_a_failed_reload_leaves_no_weights(stand_in, reload):
    server = stand_in()
    for name in ("model.norm.weight", "unknown"):  # of another shape, or unknown
        assert reload(server, lambda weights, name=name: weights.update({name: torch.ones(3)})) == 500
        assert reload(server, lambda weights: None) == 200
        assert complete(server.url)
    assert reload(server, lambda weights: weights.update(unknown=torch.ones(3))) == 500
    assert ask(server.url, **ASKED)[0] == 500
    server.closed.wait()
    with pytest.raises(httpx2.ConnectError):
        ask(server.url, **ASKED)
