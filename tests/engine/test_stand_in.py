"""The stand-in for vLLM answers like vLLM. With VLLM_URL the first tests ask a real server."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.sampling import _nucleus

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


def test_a_seed_decides_whatever_else_is_sampled(engine_url):
    rows = [choice["token_ids"] for choice in complete(engine_url, n=3, temperature=2.0)]
    assert len({tuple(row) for row in rows}) > 1
    with ThreadPoolExecutor(8) as pool:
        seeds = [5, 6, 7, 1000, 2**62, 0, 6, 7]
        again = list(pool.map(lambda seed: complete(engine_url, seed=seed, temperature=2.0)[0]["token_ids"], seeds))
    assert again[:3] == rows
    assert again[6:] == rows[1:]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.5, 0.8), (0.0, 1.0)])
def test_log_probs_are_those_of_the_sampled_distribution(engine_url, temperature, top_p):
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    for choice in complete(engine_url, n=4 if temperature else 1, temperature=temperature, top_p=top_p):
        ids = choice["token_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1] / (temperature or 1.0)
        probs = logits.softmax(dim=-1)
        kept = probs * _nucleus(probs, top_p)
        expected = (kept / kept.sum(dim=-1, keepdim=True)).log().gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)
        assert temperature or ids == logits.argmax(dim=-1).tolist()
        assert choice["prompt_token_ids"] == PROMPT
        assert choice["finish_reason"] == ("stop" if ids[-1] == 2 else "length")
        assert 2 not in ids[:-1]


def test_a_budget_beyond_the_context_is_cut_silently(engine_url):
    (choice,) = complete(engine_url, prompt=[5] * 500, max_tokens=96, stop_token_ids=[])
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (12, "length")


def test_wrong_requests_are_refused(engine_url):
    wrong = ({"prompt": [5] * 600}, {"prompt": [5, 5000]}, {"temperature": 2.5}, {"n": 2, "temperature": 0})
    for fields in (*wrong, {"seed": 2**63}, {"model": "other"}):
        assert ask(engine_url, **ASKED | fields)[0] == (404 if "model" in fields else 400), fields


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
