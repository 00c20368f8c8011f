"""Loading a policy: dropout is switched off, and models that this code would score wrongly are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
)

from common.errors import UserError
from common.policy import Policy

from common.plumbing.config import PolicyConfig
from common.plumbing.loading import load_policy, make_reference

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.randint(4, 200, (3, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(3, 11, dtype=torch.long)


@pytest.fixture
def save_model(save_checkpoint, tmp_path) -> Callable[..., str]:
    """Write a fresh model of the given config to a directory, with the tokenizer of "llama"."""

    def save(config) -> str:
        place = save_checkpoint("llama", tmp_path / "model")
        tokenizer = AutoTokenizer.from_pretrained(place)
        config.vocab_size = len(tokenizer)
        config.bos_token_id = config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
        with torch.random.fork_rng():
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(place)
        return str(place)

    return save


@pytest.fixture
def load(save_model) -> Callable[..., Policy]:
    """Load a policy with a fresh model of the given config."""
    return lambda config, **settings: load_policy(PolicyConfig(model=save_model(config), device="cpu", **settings))


def with_dropout(name: str):
    """GPT-2 has modules for its dropout; Llama's attention has a number."""
    if name == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4}
        return GPT2Config(**sizes, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5, initializer_range=0.3)
    return LlamaConfig(**SMALL, attention_dropout=0.5, initializer_range=0.3)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_dropout_of_the_config_is_switched_off(load, name, attention):
    policy = load(with_dropout(name), attn_implementation=attention)
    expected = policy(IDS, MASK).log_probs
    policy.train()
    first, second = (policy.model(IDS).logits for _ in range(2))
    assert torch.equal(first, second)
    scored = first[:, :-1].log_softmax(dim=-1).gather(-1, IDS[:, 1:, None])[..., 0]
    torch.testing.assert_close(scored, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_checkpointing_trains_without_the_dropout_of_the_config(load, name):
    """It is in training mode, and computes every layer twice, which dropout would make two different layers."""
    policy = load(with_dropout(name), gradient_checkpointing=True)
    with torch.no_grad():
        expected = policy(IDS, MASK).log_probs
        assert not policy.model.training
    first, second = (policy(IDS, MASK).log_probs for _ in range(2))
    assert policy.model.training
    assert torch.equal(first, second)
    torch.testing.assert_close(first.detach(), expected, atol=1e-4, rtol=0)


def test_these_configs_would_drop_without_it():
    """Otherwise the tests above could not fail."""
    for name in ("gpt2", "llama"):
        model = AutoModelForCausalLM.from_config(with_dropout(name)).train()
        assert not torch.equal(model(IDS).logits, model(IDS).logits)


TRANSFORMED = {  # what these models do to their logits after the LM head
    "soft-capped": Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, initializer_range=1.0),
    "scaled down": GraniteConfig(**SMALL, logits_scaling=8.0, initializer_range=0.3),
    "scaled": CohereConfig(**SMALL, logit_scale=0.0625, initializer_range=0.3, pad_token_id=0),
}


@pytest.mark.parametrize("way", TRANSFORMED)
def test_a_model_that_transforms_its_logits_is_refused(load, way):
    """Gemma 2 is one, whose attention transformers does not compute with sdpa."""
    attention = "eager" if way == "soft-capped" else "sdpa"
    with pytest.raises(UserError, match=r"^\w+ForCausalLM transforms its logits after the LM head, which .* yet$"):
        load(TRANSFORMED[way], attn_implementation=attention)


@pytest.mark.parametrize("flags", [(), ("--attn-implementation", "eager")])
def test_a_run_of_gemma_2_is_refused(save_model, load_script, tmp_path, monkeypatch, flags):
    """No run is left behind."""
    save_model(TRANSFORMED["soft-capped"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="Gemma2ForCausalLM"):
        load_script("experiment_base/train.py").main(["--model", "./model", "--device", "cpu", *flags])
    assert not list(Path("runs/experiment_base").iterdir())


def test_a_plain_model_is_not_refused(load):
    assert isinstance(load(LlamaConfig(**SMALL, initializer_range=1.0)), Policy)


def test_the_reference_is_a_frozen_copy(load):
    """It has the policy's log-probs, and keeps them when the policy changes."""
    policy = load(LlamaConfig(**SMALL, initializer_range=0.3))
    reference = make_reference(policy)
    assert not any(weight.requires_grad for weight in reference.parameters())
    assert all(weight.requires_grad for weight in policy.parameters())
    expected = policy(IDS, MASK).log_probs
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.5)
    assert not torch.allclose(policy(IDS, MASK).log_probs, expected)
    assert torch.equal(reference(IDS, MASK).log_probs, expected)
