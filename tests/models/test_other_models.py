"""The same train.py on other architectures, tokenizers and chat templates, freshly made; a task that prepares."""

import json

import pytest

from tasks import arithmetic

from harness.base.files import read_lines

WAYS = {  # of training: the model, the flags, and how much sampling and training log-probs may differ
    "bfloat16, adapter": ("llama", ("--dtype", "bfloat16", "--lora-rank", "4"), 0.1),
    "float32, checkpointing": ("qwen2", ("--dtype", "float32", "--lora-rank", "4", "--gradient-checkpointing"), 1e-4),
}


def reward_of_any_text(row: dict, text: str) -> dict[str, float]:
    """A random policy never answers; this reward depends on the length of its text, so that it can be learned."""
    return {"correct": float(len(text) % 2), "format": 0.0}


@pytest.mark.parametrize("way", ["bfloat16, adapter", pytest.param("float32, checkpointing", marks=pytest.mark.slow)])
def test_experiment_base_trains_it_unchanged(tmp_path, monkeypatch, load_script, save_checkpoint, way):
    model, flags, max_difference = WAYS[way]
    script = load_script("experiment_base/train.py")
    monkeypatch.setattr(arithmetic, "reward", reward_of_any_text)
    monkeypatch.delattr(arithmetic, "solution", raising=False)  # this reward would not pay for it
    monkeypatch.chdir(tmp_path)
    save_checkpoint(model, tmp_path / "model")
    small = "--model ./model --steps 2 --prompts-per-step 2 --group-size 4 --lr 1e-3 --max-new-tokens 12 --name other"
    script.main([*small.split(), "--eval-prompts", "1", "--minibatch-size", "4", *flags])
    directory = tmp_path / "runs" / "experiment_base" / "other"
    first, second = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()][1:3]
    assert first["policy/first_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert first["loss/kl"] == pytest.approx(0.0, abs=1e-4)
    assert first["policy/sampling_log_prob_difference"] < max_difference
    assert first["loss/grad_norm"] > 0
    assert second["step"] == 2
    assert second["loss/kl"] > first["loss/kl"]  # training continues from the first run's progress
    weights = "adapter_model.safetensors" if "--lora-rank" in flags else "model.safetensors"
    assert (directory / "final" / weights).exists()


SHORT = (
    *("--steps", "2", "--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "8", "--eval-prompts", "2"),
    *("--device", "cpu", "--checkpoint-every", "0", "--name", "x"),
)


PREPARED = """
REWARD_WEIGHTS = {"correct": 1.0}
prepared = []
def messages(row, system_prompt):
    return [{"role": "user", "content": row["question"]}]
def prepare(rows, texts):
    prepared.append([(row["question"], text) for row, text in zip(rows, texts, strict=True)])
def reward(row, text):
    if text:  # an empty one is tried before any model is loaded
        prepared[-1].remove((row["question"], text))
    return {"correct": float(len(text) % 2)}
"""


@pytest.mark.slow
def test_a_task_is_told_of_every_completion_it_rewards(load_script, tmp_path):
    """In training and in evaluations, each with its own row, before the first of them is rewarded."""
    (tmp_path / "task.py").write_text(PREPARED)
    rows = [json.dumps({"question": f"What is {number}+{number}?", "answer": "?"}) for number in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    files = ("--task", str(tmp_path / "task.py"), "--data", str(tmp_path / "rows.jsonl"))
    train = load_script("experiment_base/train.py")
    train.main([*files, *SHORT, "--steps", "1", "--runs-dir", str(tmp_path)])
    assert {entry["step"] for entry in read_lines(tmp_path / "experiment_base" / "x" / "metrics.jsonl")} == {0, 1}
