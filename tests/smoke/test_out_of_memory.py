"""Automatic batch sizes under a real limit of memory: a run halves them, goes on, and ends as one without a limit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
TINY_POLICY = ROOT / "assets" / "tiny_policy"

# Runs the experiment with and without a limit, in one process, whose imports take longer than both: the first step of
# two with a limit, and the second one when it is resumed. The limit is one of address space: what the process has when
# training begins, and some room for its batches.
CHILD = """
import importlib.util
import json
import resource
import sys
from pathlib import Path

path, room, *words = sys.argv[1:]
spec = importlib.util.spec_from_file_location("train_file", path)
script = sys.modules["train_file"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
import common.plumbing.run

train = script.train

def limited(*arguments):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(room), resource.RLIM_INFINITY))
    try:
        train(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

script.train = limited
common.plumbing.run.draw_run = lambda _: None  # which imports much
sizes = ["--micro-batch-size", "auto", "--generation-batch-size", "auto"]
script.main([*words, *sizes, "--steps", "1", "--name", "limited"])
script.train = train
script.main(["--resume", "runs/experiment_base/limited", "--steps", "2"])
script.main([*words, "--steps", "2", "--name", "free"])
"""
# Rewards that differ between completions of any kind: without them there would be nothing to learn.
TASK = """
from common.tasks.arithmetic import *
del solution
def reward(row, text):
    return dict.fromkeys(REWARD_WEIGHTS, float(len(text) % 2))
"""
MIB = 2**20
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system has no /proc"),
]
FLAGS = (
    *("--prompts-per-step", "2", "--group-size", "32", "--max-new-tokens", "6", "--eval-prompts", "1"),
    *("--lr", "1e-4", "--seed", "5", "--device", "cpu", "--eval-every", "0", "--checkpoint-every", "1"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Few weights, and a vocabulary so large that the logits of a batch take nearly all memory."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "wide"
    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    settings = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings |= {"vocab_size": 100_000, "tie_word_embeddings": True, "initializer_range": 0.3}
    LlamaForCausalLM(LlamaConfig(**settings, eos_token_id=tokenizer.eos_token_id)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def run(place: Path, *words: str) -> str:
    script = str(ROOT / "experiment_base" / "train.py")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, script, *words], cwd=place, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def test_a_limited_run_halves_resumes_and_ends_the_same(model, tmp_path):
    (tmp_path / "task.py").write_text(TASK, encoding="utf-8")
    output = run(tmp_path, str(140 * MIB), *FLAGS, "--task", "task.py", "--model", str(model))
    assert "memory ran out with batches of completions" in output
    assert "memory ran out with micro-batches" in output
    limited, free = (tmp_path / "runs" / "experiment_base" / name for name in ("limited", "free"))
    metrics, expected = (
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] for path in (limited, free)
    )
    assert [row["step"] for row in metrics] == [row["step"] for row in expected] == [0, 1, 2, 2]
    for row, other in zip(metrics[1:3], expected[1:3], strict=True):
        assert row["loss/grad_norm"] == pytest.approx(other["loss/grad_norm"], rel=1e-4)
        assert other["loss/grad_norm"] > 0.01
    settings, unlimited = (json.loads((path / "config.json").read_text()) for path in (limited, free))
    assert settings["automatic"] == ["micro_batch_size", "generation_batch_size"]
    assert settings["micro_batch_size"] < 64
    assert settings["generation_batch_size"] < 64
    assert unlimited["automatic"] == []
    weights, expected = (load_file(path / "final" / "model.safetensors") for path in (limited, free))
    assert max((weights[name] - expected[name]).abs().max().item() for name in expected) <= 1e-5
