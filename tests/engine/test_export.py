"""A policy as a Hugging Face folder: any program that reads it computes the same as the policy."""

import copy
import json
from pathlib import Path

import pytest
import torch
from policies import fill_adapters, load
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.policy import Policy

from harness.engines.engine import fingerprint
from harness.engines.folder import export, merged_weights

SEQUENCES = torch.randint(5, 1000, (3, 20), generator=torch.manual_seed(0))


def with_details() -> Policy:
    """An adapter with two ranks and scales, rsLoRA, a trained bias in one layer, and dropout that is off."""
    from peft import LoraConfig, get_peft_model

    policy = load()
    policy.model.config.attention_bias = True
    layer = policy.model.get_decoder().layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        projection = getattr(layer, name)
        projection.bias = torch.nn.Parameter(torch.randn(projection.out_features, generator=torch.manual_seed(2)))
    settings = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 9}, "use_rslora": True, "lora_dropout": 0.5}
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], bias="lora_only", **settings)
    policy.model = get_peft_model(policy.model, adapter).eval()
    return policy


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> torch.Tensor:
    return model(SEQUENCES).logits.float()


def read(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def everything(policy: Policy) -> tuple:
    """Everything that an export must leave unchanged."""
    model = policy.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    texts = json.dumps([base.config.to_dict(), base.generation_config.to_dict()], default=str)
    flags = (model.training, getattr(base, "hf_quantizer", None), type(base))
    names = [(name, weight.requires_grad, weight.data_ptr()) for name, weight in policy.named_parameters()]
    return texts, flags, names, fingerprint(policy)


CASES = {
    "tied": load,
    "adapter in bfloat16": lambda: fill_adapters(load(lora_rank=4, dtype="bfloat16")),
    "adapter on 4 bits": lambda: fill_adapters(load(lora_rank=4, load_in="4bit")),
}


@pytest.mark.parametrize("case", CASES)
def test_the_exported_model_is_the_policy(tmp_path, case):
    if "bits" in case:
        pytest.importorskip("bitsandbytes")
    policy = CASES[case]()
    weights, before, logits = copy.deepcopy(policy.state_dict()), everything(policy), logits_of(policy.model)
    export(policy, tmp_path / "engine")
    assert everything(policy) == before
    assert all(torch.equal(weight, weights[name]) for name, weight in policy.state_dict().items())
    model = read(tmp_path / "engine")
    torch.testing.assert_close(logits_of(model), logits, atol=0.3 if "bfloat16" in case else 1e-3, rtol=0)
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert not model.config.tie_word_embeddings
    assert head is not embeddings
    assert torch.equal(head, embeddings)  # the policy's are tied
    config = json.loads((tmp_path / "engine" / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    stored = load_file(tmp_path / "engine" / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.float32}
    assert not [name for name in stored if "lora" in name or "base_layer" in name]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "engine")
    assert tokenizer.chat_template == policy.tokenizer.chat_template
    assert tokenizer.encode("47 plus 29") == policy.tokenizer.encode("47 plus 29")


def test_an_adapter_with_details_is_merged_with_them(tmp_path):
    policy = fill_adapters(with_details())
    export(policy, tmp_path / "engine")
    stored = load_file(tmp_path / "engine" / "model.safetensors")
    merged = copy.deepcopy(policy.model).merge_and_unload()
    plain = {name: weight for name, weight in merged.state_dict().items() if name in stored}
    assert plain.keys() == stored.keys()
    assert sum(name.endswith(".bias") for name in stored) == 4
    for name, weight in stored.items():
        torch.testing.assert_close(weight, plain[name], atol=1e-6, rtol=0)
    torch.testing.assert_close(logits_of(merged), logits_of(policy.model), atol=1e-3, rtol=0)


def test_all_active_adapters_are_merged():
    """Two adapters on one layer: the engine gets both changes."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    policy = load()
    plain = policy.model.state_dict()["model.layers.0.self_attn.q_proj.weight"].clone()
    model = get_peft_model(policy.model, settings, adapter_name="one")
    model.add_adapter("two", settings)
    model.base_model.set_adapter(["one", "two"])
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    expected = plain + layer.get_delta_weight("one") + layer.get_delta_weight("two")
    merged = merged_weights(model.get_base_model(), torch.float32)["model.layers.0.self_attn.q_proj.weight"]
    assert torch.allclose(merged, expected)


def test_an_engine_in_bfloat16_gets_its_own_rounding_in_place_of_what_was_before(tmp_path):
    policy = load()
    export(policy, tmp_path / "engine")
    (tmp_path / "engine/of-before").touch()
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.mul_(2.0)
    export(policy, tmp_path / "engine", torch.bfloat16)
    assert not (tmp_path / "engine/of-before").exists()
    assert json.loads((tmp_path / "engine/config.json").read_text())["dtype"] == "bfloat16"
    own, stored = policy.model.state_dict(), load_file(tmp_path / "engine/model.safetensors")
    assert stored.keys() == own.keys()
    assert all(torch.equal(weight, own[name].bfloat16()) for name, weight in stored.items())
    assert all(weight.dtype == torch.float32 for weight in own.values())
