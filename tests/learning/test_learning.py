"""The bundled policy really learns, and a saved policy is as good as the run reports."""

import statistics
from pathlib import Path

import pytest
import torch
from run_files import json_of, read_lines, rows_of

from common.chat import encode_prompt
from common.evaluate import evaluate
from tasks import arithmetic as task

from harness.base.config import PolicyConfig
from harness.models.loading import load_policy

EVAL_PROMPTS = 16
OFF = ("--eval-every", "0", "--checkpoint-every", "0", "--device", "cpu", "--name", "short")


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory, load_script):
    """One short run of experiment_base."""
    directory = tmp_path_factory.mktemp("learning")
    flags = f"--steps 12 --prompts-per-step 4 --eval-prompts {EVAL_PROMPTS} --samples-every 0 --lr 2e-4".split()
    flags += ["--max-new-tokens", "64"]
    load_script("experiment_base/train.py").main([*flags, *OFF, "--runs-dir", str(directory)])
    return directory / "experiment_base" / "short"


def test_reward_and_reasoning_rise_beyond_noise(run_directory):
    rewards = [entry["reward/correct"] for entry in rows_of(run_directory) if "reward/correct" in entry]
    first, last = rewards[:5], rewards[-5:]
    noise = (statistics.variance(first) / 5 + statistics.variance(last) / 5) ** 0.5
    assert statistics.mean(last) - statistics.mean(first) > max(0.1, 3 * noise)
    summary = json_of(run_directory / "summary.json")
    for name in ("sampled/reasoned", "sampled/accuracy"):
        assert summary["after"][name] > summary["before"][name] + 0.1


def test_final_loads_in_transformers_with_the_same_accuracy(run_directory):
    """Greedy decoding by `generate` gives the accuracy that summary.json reports."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run_directory / "final", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run_directory / "final", padding_side="left")
    rows = read_lines(task.EVAL_DATA)[:EVAL_PROMPTS]
    prompts = [{"input_ids": encode_prompt(tokenizer, task.messages(row))} for row in rows]
    batch = tokenizer.pad(prompts, return_tensors="pt")
    output = model.generate(**batch, max_new_tokens=64, do_sample=False)
    texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    correct = [task.reward(row, text)["correct"] for row, text in zip(rows, texts, strict=True)]
    assert statistics.mean(correct) == json_of(run_directory / "summary.json")["accuracy_after"]


@pytest.mark.slow
def test_the_bundled_policy_can_reason_and_mostly_does_not():
    """Before any training: a forced thought leads to the right answer, but the policy seldom starts one."""
    policy, rows = load_policy(PolicyConfig(device="cpu")), read_lines(task.EVAL_DATA)[:256]
    forced = evaluate(policy, rows, task, max_new_tokens=96, prefix="<think>").metrics
    assert forced["greedy/accuracy"] >= 0.96
    own = evaluate(policy, rows, task, max_new_tokens=96, num_samples=4).metrics
    assert 0.2 <= own["greedy/accuracy"] <= 0.45
    assert 0.2 <= own["sampled/accuracy"] <= 0.45
    assert 0.15 <= own["sampled/reasoned"] <= 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "steps", "share_right"),
    [("experiment_multiturn_tool_calling", 14, 0.7), ("experiment_multiturn_qa", 10, 0.3)],
)
def test_the_policy_learns_to_call_its_tool(tmp_path, load_script, experiment, steps, share_right):
    """Before, it calls now and then, and is often right then; afterwards it calls because that pays."""
    sizes = f"--steps {steps} --prompts-per-step 6 --samples-every 0 --eval-prompts 16 --lr 1e-4".split()
    load_script(f"{experiment}/train.py").main([*sizes, *OFF, "--runs-dir", str(tmp_path)])
    summary = json_of(tmp_path / Path(experiment).name / "short" / "summary.json")
    before, after = summary["before"], summary["after"]
    assert before["greedy/accuracy"] <= 0.1
    assert 0.05 <= before["sampled/called"] <= 0.3
    assert before["sampled/accuracy_called"] >= share_right
    assert after["sampled/called"] >= before["sampled/called"] + 0.3
    assert after["sampled/accuracy"] >= before["sampled/accuracy"] + 0.3
