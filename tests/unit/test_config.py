"""The command line: defaults are resolved from the model, and impossible settings are refused before a run begins."""

import dataclasses
import shutil

import pytest
import torch

from common.errors import UserError
from common.sampling import _draw

from common.plumbing.config import RESOLVED, TINY_POLICY, RunConfig
from common.plumbing.flags import read_comments
from common.plumbing.machine import peak_memory_bytes
from common.plumbing.parse import parse_config


def parse(load_script, *argv: str) -> RunConfig:
    return parse_config(load_script("experiment_base/train.py").Config, argv, description="")


def test_defaults_are_resolved_from_the_model(load_script, tmp_path):
    """The bundled policy and a copy of it have the same defaults; other models have their own."""
    shutil.copytree(TINY_POLICY, tmp_path / "copy")
    for model in ("tiny", str(TINY_POLICY), str(tmp_path / "copy")):
        config = parse(load_script, "--model", model)
        assert {name: getattr(config, name) for name in RESOLVED["tiny"]} == RESOLVED["tiny"]
    config = parse(load_script, "--model", "owner/name")
    assert {name: getattr(config, name) for name in RESOLVED["full"]} == RESOLVED["full"]


def test_explicit_settings_are_not_overridden(load_script):
    config = parse(load_script, "--lr", "0.5", "--system-prompt", "Be brief.", "--device", "cpu")
    assert (config.lr, config.system_prompt, config.device) == (0.5, "Be brief.", "cpu")
    assert config.max_new_tokens == RESOLVED["tiny"]["max_new_tokens"]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (("--device", "toaster"), "--device must be cpu, cuda"),
        (("--device", "cuda:99"), "this machine has"),
        (("--device", "xpu:99"), r"this machine has \d+ device\(s\) of the kind xpu"),
        (("--device", "cpu:1"), r"this machine has 1 device\(s\) of the kind cpu"),
        (("--device", "meta"), "--device must be cpu, cuda, .* not meta$"),
        (("--device", "vulkan"), "--device must be cpu, cuda, .* not vulkan$"),
        (("--name", "a/b"), "cannot be the name of a directory"),
        (("--name", ""), "cannot be the name of a directory"),
        (("--name", ".."), "cannot be the name of a directory"),
        (("--model", "new"), "for experiment_sft only"),
        (("--model", "gpt2"), "a hub id is owner/name"),
        (("--attn-implementation", "flash_attention_2"), "add --dtype bfloat16"),
        (("--seed", "-1"), "--seed must be 0 to "),
        (("--threads", "0"), "--threads must be 1 to "),
    ],
)
def test_impossible_settings_are_refused(load_script, argv, sentence):
    with pytest.raises(UserError, match=sentence):
        parse(load_script, *argv)


class OtherMachine:
    """Pretend that PyTorch finds certain accelerators: all that can be tried without one."""

    def __init__(self, monkeypatch, *kinds: str):
        first = torch.device(kinds[0]) if kinds else None
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in kinds)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: "cuda" in kinds)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: first)
        for kind in ("cuda", "mps", "xpu"):
            monkeypatch.setattr(torch.get_device_module(kind), "device_count", lambda kind=kind: 2 * (kind in kinds))


@pytest.mark.parametrize(
    ("kinds", "device", "dtype"),
    [
        ((), "cpu", "float32"),
        (("mps",), "mps", "float32"),
        (("xpu",), "xpu", "float32"),
        (("cuda",), "cuda", "bfloat16"),
        (("xpu", "cuda"), "cuda", "bfloat16"),
    ],
)
def test_auto_takes_cuda_else_another_accelerator_else_the_cpu(load_script, monkeypatch, kinds, device, dtype):
    """With bfloat16 as the default on CUDA alone."""
    OtherMachine(monkeypatch, *kinds)
    config = parse(load_script, "--model", "owner/name")
    assert (config.device, config.dtype) == (device, dtype)


def test_an_accelerator_that_is_there_is_taken(load_script, monkeypatch):
    OtherMachine(monkeypatch, "mps")
    assert parse(load_script, "--device", "mps").device == "mps"
    assert parse(load_script, "--device", "mps:1").device == "mps:1"
    for name in ("mps:2", "xpu", "cuda"):
        with pytest.raises(UserError, match=rf"^--device {name}: this machine has \d device"):
            parse(load_script, "--device", name)


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu"])
def test_memory_and_autocast_work_for_every_kind_of_device(make_policy, device):
    """Memory is that of the process where the device does not tell, and autocast knows the device."""
    assert peak_memory_bytes(device) > 10**7
    policy = make_policy(compute_dtype=torch.bfloat16)
    with torch.autocast(device, policy.compute_dtype):
        assert torch.is_autocast_enabled(device)


def test_statistics_and_draws_need_no_float64_of_a_device():
    """Apple's GPUs have none: a draw computes in the type of its random numbers."""
    logits = torch.tensor([[0.25, 0.5, 0.25]]).log().expand(3, 3)
    for dtype in (torch.float32, torch.float64):
        assert _draw(logits, 1.0, 1.0, torch.tensor([0.2, 0.3, 0.9], dtype=dtype))[0].tolist() == [0, 1, 2]


def test_every_field_has_a_comment_that_help_shows(load_script):
    """In the line of the field, or above it."""
    comments = read_comments(load_script("experiment_base/train.py").Config)
    assert comments["temperature"].startswith("logits are divided by it, in sampling and in training alike")
    assert comments["lr"].startswith("learning rate of AdamW; None: 5e-5 for the bundled policy, else 1e-6")
    assert comments["dtype"].startswith("arithmetic, and the dtype of frozen weights; trained weights are float32,")
    assert not [field.name for field in dataclasses.fields(RunConfig) if not comments.get(field.name)]
