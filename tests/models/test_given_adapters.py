"""--model names a LoRA adapter: it is trained further, or merged under a new one; adapters beyond LoRA are refused."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from policies import load, log_probs_of, plain_log_probs, random_rows, read_plain
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from common.errors import UserError

from harness.base.config import RESOLVED, TINY_POLICY, RunConfig
from harness.cli.parse import parse_config
from harness.models.loading import make_reference
from harness.run.settings import check_sources, describe_sources

pytestmark = [pytest.mark.slow, pytest.mark.all_questions]

FLAGS = (
    *("--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "12", "--eval-prompts", "6"),
    *("--eval-every", "0", "--checkpoint-every", "1", "--device", "cpu", "--lr", "1e-2"),
)
WAYS = {"further": (), "on top": ("--lora-rank", "2")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def train(load_script, runs) -> Callable[..., Path]:
    """Make or resume a run of experiment_base, and return its directory."""

    def run(name: str, *flags: str) -> Path:
        load_script("experiment_base/train.py").main([*FLAGS, "--runs-dir", str(runs), "--name", name, *flags])
        return runs / "experiment_base" / name

    return run


@pytest.fixture(scope="module")
def first(train) -> Path:
    """The directory of a run of two steps with a new adapter of rank 4."""
    return train("first", "--lora-rank", "4", "--steps", "2")


@pytest.fixture(scope="module")
def second(train, first) -> dict[str, Path]:
    """Runs of three steps that begin with the first run's adapter, one for each way."""
    return {way: train(way, "--model", str(first / "final"), "--steps", "3", *WAYS[way]) for way in WAYS}


def read_with_peft(adapter: Path) -> torch.nn.Module:
    """Like a user who has only the adapter: its settings name the base."""
    base = adapter_settings(adapter)["base_model_name_or_path"]
    assert os.path.isabs(base)
    return PeftModel.from_pretrained(read_plain(base), adapter)


def adapter_settings(adapter: Path) -> dict:
    return json.loads((adapter / "adapter_config.json").read_text())


def read_lines(path: Path) -> list[dict]:
    """The lines of a JSONL file without values that depend on the clock or the machine."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in rows]


def evaluations(directory: Path) -> tuple[dict, dict]:
    """The greedy metrics before and after."""
    summary = json.loads((directory / "summary.json").read_text())
    sides = [{k: v for k, v in summary[side].items() if k.startswith("greedy/")} for side in ("before", "after")]
    return sides[0], sides[1]


# Both ways -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_run_begins_where_the_run_of_its_adapter_ended(first, second, way):
    """The KL to the initial policy is also 0 in the first step, and not later."""
    assert evaluations(first)[0] != evaluations(first)[1]
    assert evaluations(second[way])[0] == evaluations(first)[1]
    _, *steps, _ = read_lines(second[way] / "metrics.jsonl")
    assert abs(steps[0]["loss/kl"]) < 1e-6
    assert steps[2]["loss/kl"] > 1e-4
    expected = log_probs_of(load(first / "final"))
    assert (expected - log_probs_of(load("tiny"))).abs().max() > 0.1
    torch.testing.assert_close(log_probs_of(load(first / "final", lora_rank=2)), expected, atol=1e-4, rtol=0)


def test_a_merged_base_is_the_first_policy_bit_for_bit(first, second):
    """base/ holds the weights that the run computed with."""
    base = load(second["on top"] / "base").model.state_dict()
    weights = load(first / "final", lora_rank=2).model.get_base_model().state_dict()
    for name, weight in base.items():
        assert torch.equal(weights.get(name.replace(".weight", ".base_layer.weight"), weights.get(name)), weight), name


def test_a_run_is_not_resumed_over_another_base(first, tmp_path):
    """The base that the adapter names is one of the inputs that a run records."""
    adapter, base = (Path(shutil.copytree(x, tmp_path / x.name)) for x in (first / "final", TINY_POLICY))
    named = adapter_settings(adapter) | {"base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(named))
    before = describe_sources(RunConfig(model=str(adapter)), None)
    assert before.keys() == {"model", "base"}
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    now = describe_sources(RunConfig(model=str(adapter)), None)
    with pytest.raises(UserError, match=f"^the base of --model {base} has changed since run began"):
        check_sources(Path("run"), before, now, has_failed=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_third_run_continues_the_second(train, second, way, capsys):
    """Its adapter is on a base that a run may have written; --save-merged merges it into that base."""
    directory = train(f"third, {way}", "--model", str(second[way] / "final"), "--steps", "1", "--save-merged")
    base = adapter_settings(second[way] / "final")["base_model_name_or_path"]
    rank = adapter_settings(second[way] / "final")["r"]
    assert f"final is a LoRA adapter of rank {rank} for {base}: it is trained further\n" in capsys.readouterr().out
    assert evaluations(directory)[0] == evaluations(second[way])[1]
    merged = plain_log_probs(read_plain(directory / "final_merged"))
    torch.testing.assert_close(merged, plain_log_probs(read_with_peft(directory / "final")), atol=1e-4, rtol=0)
    assert (merged - plain_log_probs(read_plain(TINY_POLICY))).abs().max() > 0.1


def test_an_adapter_saved_in_bfloat16_is_trained_in_float32(first, tmp_path):
    """As make_policy.py saves it with --save-dtype bfloat16; here the base is held in bfloat16, too."""
    adapter = shutil.copytree(first / "final", tmp_path / "adapter")
    change_weights(lambda weights: {name: weight.bfloat16() for name, weight in weights.items()})(adapter)
    policy = load(adapter, dtype="bfloat16")
    assert {(weight.requires_grad, weight.dtype) for weight in policy.parameters()} == {
        (True, torch.float32),
        (False, torch.bfloat16),
    }
    assert torch.equal(log_probs_of(make_reference(policy)), log_probs_of(policy))


# Settings ------------------------------------------------------------------------------------------------------------


def test_an_adapter_has_the_defaults_of_its_base(load_script, save_checkpoint, first, tmp_path):
    """Except for ten times the learning rate, with and without --lora-rank."""
    save_checkpoint("llama", tmp_path / "model")
    other = shutil.copytree(first / "final", tmp_path / "other")
    change_settings(other, base_model_name_or_path=str(tmp_path / "model"))
    config_class = load_script("experiment_base/train.py").Config
    for kind, model in (("tiny", first / "final"), ("full", other)):
        for flags in WAYS.values():
            config = parse_config(config_class, ("--model", str(model), *flags), description="")
            assert config.lr == pytest.approx(10 * RESOLVED[kind]["lr"])
            assert config.max_new_tokens == RESOLVED[kind]["max_new_tokens"]
            assert bool(config.system_prompt) == (kind == "full")


def test_a_relative_model_is_saved_as_an_absolute_base(tmp_path, monkeypatch, train):
    """The adapter is found from every directory."""
    shutil.copytree(TINY_POLICY, tmp_path / "model")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    directory = train("relative", "--model", "../model", "--lora-rank", "2", "--steps", "1")
    expected = str((tmp_path / "model").resolve())
    assert adapter_settings(directory / "final")["base_model_name_or_path"] == expected


def test_the_tokenizer_is_that_of_the_adapter_or_of_its_base(first, tmp_path):
    adapter = shutil.copytree(first / "final", tmp_path / "adapter")
    (adapter / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert load(adapter).tokenizer.chat_template == "{{ messages[0].content }}!"
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        (adapter / name).unlink()
    assert load(adapter).tokenizer.chat_template == AutoTokenizer.from_pretrained(TINY_POLICY).chat_template


# Adapters from elsewhere ----------------------------------------------------------------------------------------------


def change_settings(adapter: Path, **changes) -> None:
    (adapter / "adapter_config.json").write_text(json.dumps(adapter_settings(adapter) | changes))


def change_weights(change: Callable[[dict], dict]) -> Callable[[Path], None]:
    def damage(adapter: Path) -> None:
        path = adapter / "adapter_model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return damage


def settings(**changes) -> Callable[[Path], None]:
    return lambda adapter: change_settings(adapter, **changes)


def without(name: str) -> Callable[[dict], dict]:
    return lambda weights: {key: weight for key, weight in weights.items() if name not in key}


@pytest.fixture
def adapter_of_peft(tmp_path) -> Callable[..., Path]:
    """Make an adapter of the bundled policy with random A and B by peft itself, with any settings."""

    def make(**settings) -> Path:
        torch.manual_seed(0)
        fixed = {"task_type": "CAUSAL_LM", "init_lora_weights": False}
        model = get_peft_model(read_plain(TINY_POLICY), LoraConfig(**fixed | settings))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    weight.mul_(0.5)
        model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        return tmp_path / "adapter"

    return make


@pytest.mark.parametrize("settings", [
    {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.5},
    {"target_modules": r".*layers\.[01]\.mlp\.\w+_proj", "use_rslora": True, "lora_alpha": 3},
    {"target_modules": ["q_proj", "o_proj"], "rank_pattern": {"o_proj": 3}, "alpha_pattern": {"q_proj": 5}},
    {"target_modules": ["up_proj"], "layers_to_transform": [1, 3], "layers_pattern": "layers"},
], ids=["dropout", "rslora", "patterns", "layers"])  # fmt: skip
def test_plain_adapters_of_others_are_computed_as_peft_does(adapter_of_peft, settings):
    """Without their dropout, even in training mode; merged, they compute the same."""
    adapter = adapter_of_peft(**settings)
    expected = plain_log_probs(read_with_peft(adapter))
    policy = load(adapter, gradient_checkpointing=True)
    torch.testing.assert_close(log_probs_of(policy), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(policy(*random_rows(1024)).log_probs.detach(), expected, atol=1e-4, rtol=0)
    assert policy.model.training
    torch.testing.assert_close(log_probs_of(load(adapter, lora_rank=2)), expected, atol=1e-4, rtol=0)
    assert (expected - plain_log_probs(read_plain(TINY_POLICY))).abs().max() > 0.01


@pytest.mark.parametrize("end", ["embed_tokens", "lm_head"])
def test_an_adapter_of_tied_embeddings_is_refused(adapter_of_peft, end):
    """Merging it would change both ends."""
    with pytest.raises(UserError, match="adapts one of the embeddings and the LM head, which share their weights"):
        load(adapter_of_peft(target_modules=[end, "q_proj"]))


def test_a_hub_repository_with_an_adapter_is_refused(tmp_path, first, monkeypatch):
    """transformers would load its base, with the adapter in a form that is neither trained nor saved."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0" * 40
    repository = tmp_path / "models--owner--name"
    shutil.copytree(first / "final", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    with pytest.raises(UserError, match=r"owner/name is an adapter: download it .*, and give its directory"):
        load("owner/name")


def test_every_setting_of_peft_is_known_or_off_by_default():
    """Otherwise a default adapter of peft could be refused, or a new feature ignored."""
    from harness.models import adapters

    unknown = {
        field.name: field.default
        for field in dataclasses.fields(LoraConfig)
        if field.name not in (*adapters.KEPT, *adapters.IGNORED, *adapters.ALLOWED)
    }
    assert {name for name, default in unknown.items() if default not in (None, False)} - {"loftq_config"} == set()
