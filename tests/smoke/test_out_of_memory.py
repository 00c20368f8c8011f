"""When memory runs out, the run recognises the error and ends with one sentence, whose command resumes it."""

import dataclasses
import errno
import json
import shlex

import pytest
import torch
from run_files import read_lines

from common.errors import UserError
from common.policy import Policy

from harness.base.machine import is_out_of_memory, out_of_memory
from harness.cli.parse import parse_config

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
    with pytest.raises(UserError, match=r"^--group-size 4 differs from the run's 8: .* and other batch sizes; a new"):
        parse_config(base, (*words, "--group-size", "4"), "")


FLAGS = (
    *("--prompts-per-step", "2", "--group-size", "4", "--max-new-tokens", "6", "--eval-prompts", "1", "--steps", "1"),
    *("--micro-batch-size", "8", "--generation-batch-size", "8", "--device", "cpu", "--eval-every", "0"),
)


def test_a_run_without_memory_resumes_with_smaller_batches_and_ends_the_same(load_script, tmp_path, monkeypatch):
    """The test runs each command until memory suffices for half of the rows."""
    monkeypatch.chdir(tmp_path)
    script = load_script("experiment_base/train.py")
    script.main([*FLAGS, "--name", "free"])
    forward = Policy.forward

    def limited(policy, sequences, *arguments):
        if torch.is_grad_enabled() and len(sequences) > 4:
            raise ALLOCATOR
        return forward(policy, sequences, *arguments)

    monkeypatch.setattr(Policy, "forward", limited)
    flags, sentences = [*FLAGS, "--name", "limited"], []
    while len(sentences) < 3:
        try:
            script.main(flags)
            break
        except UserError as error:
            sentences.append(str(error))
            flags = shlex.split(sentences[-1].partition("resume with: ")[2])[2:]
    assert len(sentences) == 1
    helps = "--micro-batch-size 4, --tokens-per-micro-batch 1024, --generation-batch-size 4, --gradient-checkpointing"
    assert f"what helps: {helps}" in sentences[0]
    limited, free = (tmp_path / "runs" / "experiment_base" / name for name in ("limited", "free"))
    settings = json.loads((limited / "config.json").read_text())
    assert settings["micro_batch_size"] == settings["generation_batch_size"] == 4
    ways = [read_lines(path / "metrics.jsonl") for path in (limited, free)]
    assert [row["step"] for row in ways[0]] == [row["step"] for row in ways[1]] == [0, 1, 1]
    for name in ("loss/grad_norm", "reward/total", "completion/length"):
        assert ways[0][1][name] == pytest.approx(ways[1][1][name], rel=1e-4) != 0
