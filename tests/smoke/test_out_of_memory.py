"""Where memory runs out: the error is known, and the run ends with one sentence, whose command resumes it."""

import dataclasses
import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.errors import UserError

from harness.cli.parse import parse_config
from harness.run.machine import is_out_of_memory, out_of_memory

ROOT = Path(__file__).resolve().parents[2]
TINY_POLICY = ROOT / "assets" / "tiny_policy"
ALLOCATOR = RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ALLOCATOR, True),
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("could not create a primitive descriptor for the matmul primitive."), False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_of_memory_are_told_from_others(error, expected):
    assert is_out_of_memory(error) is expected


def test_the_sentence_says_what_helps_and_how_to_resume(load_script):
    config = load_script("experiment_base/train.py").Config(micro_batch_size=8)
    assert str(out_of_memory(config, MemoryError(), "python x --resume y")) == (
        "memory ran out (MemoryError); what helps: --micro-batch-size 4, --generation-batch-size 64, "
        "--gradient-checkpointing, --lora-rank 16, a smaller model; resume with: python x --resume y "
        "--micro-batch-size 4 --generation-batch-size 64"
    )
    config = dataclasses.replace(config, micro_batch_size=1, generation_batch_size=1, lora_rank=2)
    assert str(out_of_memory(config, ALLOCATOR, None)).endswith("what helps: --gradient-checkpointing, a smaller model")


def test_a_resumed_run_may_have_other_batch_sizes_and_no_other_settings(load_script, tmp_path):
    base = load_script("experiment_base/train.py").Config
    stored = {"experiment": "experiment_base", "threads": 1, "device": "cpu", "group_size": 8, "micro_batch_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(stored | {"generation_batch_size": 64}), encoding="utf-8")
    words = ("--resume", str(tmp_path), "--micro-batch-size", "2")
    config = parse_config(base, words, "")
    assert (config.micro_batch_size, config.generation_batch_size) == (2, 64)
    with pytest.raises(UserError, match=r"^--group-size 4 differs from the run's 8: .*, and batch sizes changed$"):
        parse_config(base, (*words, "--group-size", "4"), "")


# Runs the experiment with and without a limit, in forks of one process, whose imports take longer than all of them. The
# limit is one of address space: what the process has when training begins, and some room for its batches. Each time
# that memory runs out, the command of the sentence is run next.
CHILD = """
import importlib.util
import os
import resource
import shlex
import sys
from pathlib import Path

path, room, *words = sys.argv[1:]
sys.argv = [path]
spec = importlib.util.spec_from_file_location("train_file", path)
script = sys.modules["train_file"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
import viewer
from common.errors import UserError

train = script.train

def limited(*arguments):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(room), resource.RLIM_INFINITY))
    train(*arguments)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def run(flags):
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    try:
        script.main(flags)
        os._exit(0)
    except UserError as error:
        with open("sentences", "a") as file:
            print(error, file=file)
        os._exit(2)

viewer.draw_run = lambda _: None  # which imports much
assert run([*words, "--name", "free"]) == 0
script.train = limited
flags = [*words, "--name", "limited"]
while run(flags):
    flags = shlex.split(Path("sentences").read_text().splitlines()[-1].partition("resume with: ")[2])[2:]
"""
# Rewards that differ between completions of any kind: without them there would be nothing to learn.
TASK = """
from tasks.arithmetic import *
del solution
def reward(row, text):
    return dict.fromkeys(REWARD_WEIGHTS, float(len(text) % 2))
"""
MIB = 2**20
FLAGS = (
    *("--prompts-per-step", "16", "--group-size", "4", "--max-new-tokens", "6", "--eval-prompts", "1"),
    *("--micro-batch-size", "64", "--generation-batch-size", "64", "--steps", "1", "--lr", "1e-4", "--seed", "5"),
    *("--device", "cpu", "--eval-every", "0", "--checkpoint-every", "1"),
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


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system has no /proc")
def test_a_run_without_memory_resumes_with_smaller_batches_and_ends_the_same(model, tmp_path):
    (tmp_path / "task.py").write_text(TASK, encoding="utf-8")
    words = [str(ROOT / "experiment_base" / "train.py"), str(140 * MIB), *FLAGS, "--task", "task.py"]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *words, "--model", str(model)],
        **{"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 600},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sentences = (tmp_path / "sentences").read_text().splitlines()
    assert "what helps: --micro-batch-size 32, --generation-batch-size 32, --gradient-checkpointing" in sentences[0]
    limited, free = (tmp_path / "runs" / "experiment_base" / name for name in ("limited", "free"))
    metrics, expected = (
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] for path in (limited, free)
    )
    assert [row["step"] for row in metrics] == [row["step"] for row in expected] == [0, 1, 1]
    assert metrics[1]["loss/grad_norm"] == pytest.approx(expected[1]["loss/grad_norm"], rel=1e-4)
    assert expected[1]["loss/grad_norm"] > 0.01
    settings = json.loads((limited / "config.json").read_text())
    assert settings["micro_batch_size"] == settings["generation_batch_size"] == 64 / 2 ** len(sentences)
    weights, expected = (load_file(path / "final" / "model.safetensors") for path in (limited, free))
    assert max((weights[name] - expected[name]).abs().max().item() for name in expected) <= 1e-5
