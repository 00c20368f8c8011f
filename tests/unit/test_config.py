"""The command line: defaults are resolved from the model, and impossible settings are refused before a run begins."""

import shutil

import pytest

from common.errors import UserError

from common.plumbing.config import RESOLVED, TINY_POLICY, RunConfig
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
