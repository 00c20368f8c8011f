"""The same train.py on other architectures, tokenizers and chat templates, freshly made."""

import json

import pytest

from common.tasks import arithmetic

WAYS = {  # of training: the flags, and how much sampling and training log-probs may differ
    "float32, eager": (("--dtype", "float32", "--attn-implementation", "eager"), 1e-4),
    "bfloat16": (("--dtype", "bfloat16"), 0.1),
    "bfloat16, adapter": (("--dtype", "bfloat16", "--lora-rank", "4"), 0.1),
    "bfloat16, checkpointing": (("--dtype", "bfloat16", "--gradient-checkpointing"), 0.1),
    "float32, adapter, checkpointing": (("--dtype", "float32", "--lora-rank", "4", "--gradient-checkpointing"), 1e-4),
}


def reward_of_any_text(row: dict, text: str) -> dict[str, float]:
    """A random policy never answers; this reward depends on the length of its text, so that it can be learned."""
    return {"correct": float(len(text) % 2), "format": 0.0}


@pytest.mark.parametrize("model", ["llama", "qwen2"])
@pytest.mark.parametrize("way", WAYS)
def test_experiment_base_trains_it_unchanged(tmp_path, monkeypatch, load_script, save_checkpoint, model, way):
    flags, max_difference = WAYS[way]
    script = load_script("experiment_base/train.py")
    monkeypatch.setattr(arithmetic, "reward", reward_of_any_text)
    monkeypatch.delattr(arithmetic, "solution", raising=False)  # which this reward would not pay
    monkeypatch.chdir(tmp_path)
    save_checkpoint(model, tmp_path / "model")
    script.main(
        [
            *("--model", "./model", "--steps", "2", "--prompts-per-step", "2", "--group-size", "4", "--lr", "1e-3"),
            *("--max-new-tokens", "12", "--eval-prompts", "4", "--minibatch-size", "4", "--name", "other", *flags),
        ]
    )
    directory = tmp_path / "runs" / "experiment_base" / "other"
    first, second = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()][1:3]
    assert first["policy/first_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert first["loss/kl"] == pytest.approx(0.0, abs=1e-4)
    assert first["policy/sampling_log_prob_difference"] < max_difference
    assert first["loss/grad_norm"] > 0
    assert second["step"] == 2
    assert second["loss/kl"] > first["loss/kl"]  # what was learned is in the weights that are trained on
    weights = "adapter_model.safetensors" if "--lora-rank" in flags else "model.safetensors"
    assert (directory / "final" / weights).exists()
