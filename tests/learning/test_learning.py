"""The bundled policy really learns, and what a run saves is what it reports."""

import json
import statistics

import pytest
import torch

from common.chat import encode_prompt
from common.evaluate import evaluate
from tasks import arithmetic as task

from harness.base.config import PolicyConfig
from harness.models.loading import load_policy

EVAL_PROMPTS = 32


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory, load_script):
    """One short run of experiment_base."""
    directory = tmp_path_factory.mktemp("learning")
    flags = ("--steps", "20", "--prompts-per-step", "6", "--lr", "1e-4", "--eval-prompts", str(EVAL_PROMPTS))
    off = ("--eval-every", "0", "--checkpoint-every", "0", "--device", "cpu")
    load_script("experiment_base/train.py").main([*flags, *off, "--runs-dir", str(directory), "--name", "short"])
    return directory / "experiment_base" / "short"


def test_the_reward_rises_beyond_noise(run_directory):
    metrics = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    rewards = [entry["reward/correct"] for entry in metrics if "reward/correct" in entry]
    first, last = rewards[:6], rewards[-6:]
    noise = (statistics.variance(first) / 6 + statistics.variance(last) / 6) ** 0.5
    assert statistics.mean(last) - statistics.mean(first) > max(0.1, 3 * noise)


def test_the_policy_learns_to_reason_before_it_answers(run_directory):
    """The share of reasoned answers rises, and with it accuracy."""
    summary = json.loads((run_directory / "summary.json").read_text())
    assert summary["after"]["sampled/reasoned"] > summary["before"]["sampled/reasoned"] + 0.1
    assert summary["after"]["sampled/accuracy"] > summary["before"]["sampled/accuracy"] + 0.1


def test_final_loads_in_transformers_with_the_same_accuracy(run_directory):
    """Greedy decoding by `generate` gives the accuracy that summary.json reports."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run_directory / "final", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run_directory / "final", padding_side="left")
    rows = [json.loads(line) for line in task.EVAL_DATA.read_text().splitlines()][:EVAL_PROMPTS]
    prompts = [{"input_ids": encode_prompt(tokenizer, task.messages(row))} for row in rows]
    batch = tokenizer.pad(prompts, return_tensors="pt")
    output = model.generate(**batch, max_new_tokens=96, do_sample=False)
    texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    correct = [task.reward(row, text)["correct"] for row, text in zip(rows, texts, strict=True)]
    summary = json.loads((run_directory / "summary.json").read_text())
    assert statistics.mean(correct) == summary["accuracy_after"]


@pytest.mark.slow
def test_the_bundled_policy_can_reason_and_mostly_does_not():
    """Before any training: a forced thought leads to the right answer, but the policy seldom starts one."""
    policy = load_policy(PolicyConfig(device="cpu"))
    rows = [json.loads(line) for line in task.EVAL_DATA.read_text().splitlines()][:256]
    forced = evaluate(policy, rows, task, max_new_tokens=96, prefix="<think>").metrics
    assert forced["greedy/accuracy"] >= 0.96
    own = evaluate(policy, rows, task, max_new_tokens=96, num_samples=4).metrics
    assert 0.2 <= own["greedy/accuracy"] <= 0.45
    assert 0.2 <= own["sampled/accuracy"] <= 0.45
    assert 0.15 <= own["sampled/reasoned"] <= 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "flags", "share_right"),
    [
        ("experiment_multiturn_tool_calling", ("--steps", "14", "--prompts-per-step", "6"), 0.7),
        ("experiment_multiturn_qa", ("--steps", "10", "--prompts-per-step", "6"), 0.3),
    ],
    ids=["calculator", "search"],
)
def test_the_policy_learns_to_call_its_tool(tmp_path, load_script, experiment, flags, share_right):
    """Before, it calls now and then, which is often right; afterwards it calls because that pays."""
    off = ("--eval-every", "0", "--checkpoint-every", "0", "--samples-every", "0", "--eval-prompts", "16")
    train = load_script(f"{experiment}/train.py")
    train.main([*flags, "--lr", "1e-4", *off, "--runs-dir", str(tmp_path), "--name", "short"])
    (path,) = tmp_path.glob("*/short/summary.json")
    summary = json.loads(path.read_text())
    before, after = summary["before"], summary["after"]
    assert before["greedy/accuracy"] <= 0.1
    assert 0.05 <= before["sampled/called"] <= 0.3
    assert before["sampled/accuracy_called"] >= share_right
    assert after["sampled/called"] >= before["sampled/called"] + 0.3
    assert after["sampled/accuracy"] >= before["sampled/accuracy"] + 0.3
