"""The stand-in for vLLM answers as vLLM does. With VLLM_URL the first tests ask a real server."""

import json
import os
import shutil
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.sampling import _nucleus

POLICY = Path(__file__).resolve().parents[2] / "assets" / "tiny_policy"
PROMPT = list(range(40, 60))
ASKED = {"prompt": PROMPT, "max_tokens": 12, "logprobs": 0, "return_token_ids": True, "ignore_eos": True, "seed": 5}
ASKED |= {"stop_token_ids": [2], "temperature": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
WRONG = {
    "model": {"model": "other"},
    "too long": {"prompt": [5] * 600},
    "no room": {"prompt": [5] * 512},
    "outside": {"prompt": [5, 5000]},
    "temperature": {"temperature": 2.5},
    "greedy": {"n": 2, "temperature": 0},
    "seed": {"seed": 2**63},
}


def ask(url: str, path: str = "/v1/completions", body: dict | None = None) -> tuple[int, dict]:
    """The status and the answer."""
    content, headers = None if body is None else json.dumps(body).encode(), {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, content, headers), timeout=60) as answer:
            return answer.status, json.loads(answer.read() or "null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def complete(url: str, **fields) -> list[dict]:
    status, answer = ask(url, body=ASKED | fields)
    assert status == 200, answer
    return answer["choices"]


def form(answer: object) -> object:
    """Names and types, without values."""
    if isinstance(answer, dict):
        return {name: form(value) for name, value in answer.items() if name not in ("permission", "top_logprobs")}
    return [form(answer[0])] if isinstance(answer, list) and answer else type(answer).__name__


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)


def test_a_seed_decides_whatever_else_is_sampled(engine_url):
    rows = [choice["token_ids"] for choice in complete(engine_url, n=3, temperature=2.0)]
    assert len({tuple(row) for row in rows}) > 1
    with ThreadPoolExecutor(8) as pool:
        seeds = [5, 6, 7, 1000, 2**62, 0, 6, 7]
        again = list(pool.map(lambda seed: complete(engine_url, seed=seed, temperature=2.0)[0]["token_ids"], seeds))
    assert again[:3] == rows
    assert again[6:] == rows[1:]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.5, 0.8), (0.0, 1.0)])
def test_log_probs_are_those_of_the_sampled_distribution(engine_url, model, temperature, top_p):
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
    for name, fields in WRONG.items():
        status, answer = ask(engine_url, body=ASKED | fields)
        assert status == (404 if name == "model" else 400), name
        assert answer["error"]["code"] == status, name
    assert ask(engine_url, body=ASKED | {"temprature": 3})[0] == 200  # an unknown field is ignored


@pytest.mark.skipif("VLLM_URL" not in os.environ, reason="needs the address of a vLLM server in VLLM_URL")
def test_the_stand_in_answers_in_the_forms_of_vllm(engine_url, stand_in):
    urls = (engine_url, stand_in().url)
    for path in ("/health", "/version", "/v1/models", "/nothing", "/v1/completions"):
        real, own = (ask(url, path) for url in urls)
        assert (real[0], form(real[1])) == (own[0], form(own[1])), path
    settings = [ask(url, "/server_info?config_format=json")[1]["vllm_config"] for url in urls]
    real, own = ([config["scheduler_config"]["enable_chunked_prefill"], config["device_config"]] for config in settings)
    assert real == own
    real, own = (config["model_config"] for config in settings)
    names = ("dtype", "max_model_len", "logprobs_mode", "generation_config", "served_model_name")
    assert {name: real[name] for name in names} == {name: own[name] for name in names}
    for fields in ({"n": 2}, {"logprobs": None}, {"return_token_ids": False}, {"temperature": 0, "ignore_eos": False}):
        real, own = (ask(url, body=ASKED | {"model": "policy"} | fields) for url in urls)
        assert (real[0], form(real[1])) == (own[0], form(own[1])), fields
    for name, fields in WRONG.items():
        real, own = (ask(url, body=ASKED | fields) for url in urls)
        assert (real[0], real[1]["error"].keys()) == (own[0], own[1]["error"].keys()), name
        if name != "seed":  # about which the real server says more
            assert real[1] == own[1], name
    for path, body in (("/reset_prefix_cache", {}), ("/collective_rpc", {"method": "no"}), ("/collective_rpc", {})):
        real, own = (ask(url, path, body) for url in urls)
        assert real == own


def checkpoint(folder: Path, change) -> str:
    """The tiny policy with a head of its own, after `change(weights)`."""
    shutil.copytree(POLICY, folder)
    weights = {name: weight.float() for name, weight in load_file(POLICY / "model.safetensors").items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def reload(url: str, folder: str) -> int:
    return ask(url, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})[0]


def test_new_weights_are_used_and_absent_ones_kept(stand_in, tmp_path):
    server = stand_in()
    first, all_zero = complete(server.url, temperature=0)[0], pytest.approx([-torch.tensor(1024.0).log().item()] * 12)
    old = first["logprobs"]["token_logprobs"]
    zero = checkpoint(tmp_path / "zero", lambda weights: weights["lm_head.weight"].zero_())
    assert reload(server.url, zero) == 200
    assert complete(server.url, temperature=0)[0]["logprobs"]["token_logprobs"] == all_zero
    assert reload(server.url, checkpoint(tmp_path / "tied", lambda weights: weights.pop("lm_head.weight"))) == 200
    assert complete(server.url, temperature=0)[0]["logprobs"]["token_logprobs"] == all_zero
    assert reload(server.url, checkpoint(tmp_path / "good", lambda weights: None)) == 200
    assert complete(server.url, temperature=0)[0]["logprobs"]["token_logprobs"] == pytest.approx(old, abs=1e-5)
    assert ask(server.url, "/stand_in")[1]["calls"]["/collective_rpc"] == 3


def test_a_failed_reload_leaves_no_weights(stand_in, tmp_path):
    server = stand_in()
    good = checkpoint(tmp_path / "good", lambda weights: None)
    unknown = checkpoint(tmp_path / "unknown", lambda weights: weights.update(more=torch.ones(3)))
    shape = checkpoint(tmp_path / "shape", lambda weights: weights.update({"model.norm.weight": torch.ones(3)}))
    for bad in ("/nowhere", str(tmp_path), unknown, shape):
        assert (reload(server.url, bad), reload(server.url, good)) == (500, 200)
        assert complete(server.url)
    assert reload(server.url, unknown) == ask(server.url, body=ASKED)[0] == 500
    server.closed.wait()
    with pytest.raises(urllib.error.URLError, match="refused"):
        ask(server.url, body=ASKED)
