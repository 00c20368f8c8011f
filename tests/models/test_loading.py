"""Loading a policy: dropout is switched off, and models that this code would score wrongly are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BambaConfig,
    BitsAndBytesConfig,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    ModernBertDecoderConfig,
)

from common.errors import UserError
from common.policy import Policy
from common.sampling import sample

from common.plumbing.config import TINY_POLICY, PolicyConfig
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


MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
KEEPS_STATE = {  # other than keys and values: alone, and beside those of other layers
    "mamba": MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=8),
    "mamba 2": Mamba2Config(hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=4, head_dim=16, n_groups=1),
    "bamba": BambaConfig(**SMALL, num_key_value_heads=2, attn_layer_indices=[1], pad_token_id=0, **MAMBA),
    "lfm 2": Lfm2Config(**SMALL, num_key_value_heads=2, layer_types=["conv", "full_attention"]),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", KEEPS_STATE)
def test_a_model_that_keeps_other_state_is_refused(load, way, dtype):
    """transformers refuses sdpa where there is no attention."""
    attention = "eager" if way.startswith("mamba") else "sdpa"
    with pytest.raises(
        UserError, match=r"^\w+ForCausalLM keeps state other than keys and values of attention, .* yet$"
    ):
        load(KEEPS_STATE[way], dtype=dtype, attn_implementation=attention)


def test_a_run_of_a_hybrid_is_refused(save_model, load_script, tmp_path, monkeypatch):
    """No run is left behind, and the adapter does not hide the model's name."""
    save_model(KEEPS_STATE["lfm 2"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^Lfm2ForCausalLM keeps state"):
        load_script("experiment_base/train.py").main(["--model", "./model", "--device", "cpu", "--lora-rank", "2"])
    assert not list(Path("runs/experiment_base").iterdir())


def test_a_model_with_another_decoder_is_refused(load):
    """ModernBERT's takes no cache, and what it names its decoder is a part of its head."""
    with pytest.raises(
        UserError, match=r"^ModernBertDecoderForCausalLM does not run as a decoder with an LM head, .* yet$"
    ):
        load(ModernBertDecoderConfig(**SMALL))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_window_shorter_than_the_rows_is_not_refused(load, dtype):
    assert isinstance(
        load(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=4, initializer_range=0.3), dtype=dtype),
        Policy,
    )


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


# weights that were quantised before they were saved -----------------------------------------------------------------

NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory) -> dict[str, str]:
    """The bundled policy, saved with weights of 4 bits (as by --load-in 4bit) and of 8 bits: their directories."""
    pytest.importorskip("bitsandbytes")
    places = {}
    for bits, settings in (("4bit", NF4), ("8bit", {})):
        places[bits] = str(tmp_path_factory.mktemp("quantised") / bits)
        quantization = BitsAndBytesConfig(**{f"load_in_{bits}": True}, **settings)
        options = {"quantization_config": quantization, "dtype": torch.float32, "device_map": {"": "cpu"}}
        AutoModelForCausalLM.from_pretrained(TINY_POLICY, **options).save_pretrained(places[bits])
        AutoTokenizer.from_pretrained(TINY_POLICY).save_pretrained(places[bits])
    return places


def test_a_4_bit_checkpoint_is_trained_as_with_load_in(quantised):
    """Log-probs and gradients after a rollout, which repacked weights would change."""
    found = {}
    for model, load_in in (("tiny", "4bit"), (quantised["4bit"], None), (quantised["4bit"], "4bit")):
        policy = load_policy(PolicyConfig(model=model, device="cpu", dtype="float32", lora_rank=4, load_in=load_in))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, weight in policy.named_parameters():
                if "lora_B" in name:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
        sample(policy, [[5, 6, 7]], 2, max_new_tokens=2, key=(0,))
        log_probs = policy(IDS, MASK).log_probs
        log_probs.sum().backward()
        gradients = [weight.grad.flatten() for weight in policy.parameters() if weight.requires_grad]
        found[model, load_in] = log_probs.detach(), torch.cat(gradients)
    expected, *others = found.values()
    assert expected[1].abs().max() > 0
    for log_probs, gradients in others:
        torch.testing.assert_close(log_probs, expected[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(gradients, expected[1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("bits", "settings", "sentence"),
    [
        ("4bit", {}, "(4bit) and cannot be trained: add an adapter, --lora-rank 16"),
        ("8bit", {}, "(8bit) and cannot be trained: add an adapter, --lora-rank 16"),
        ("4bit", {"lora_rank": 4, "save_merged": True}, "(4bit), and an adapter cannot be merged into them"),
        ("4bit", {"lora_rank": 4, "load_in": "4bit", "save_merged": True}, "omit --save-merged"),
        ("4bit", {"lora_rank": 4, "load_in": "8bit", "dtype": "bfloat16"}, "(4bit): omit --load-in 8bit"),
        ("8bit", {"lora_rank": 4, "load_in": "4bit"}, "(8bit): omit --load-in 4bit"),
        ("8bit", {"lora_rank": 4, "dtype": "float32"}, "(8bit) and compute in half precision: use --dtype bfloat16"),
    ],
)
def test_what_quantised_weights_cannot_do_is_refused(quantised, bits, settings, sentence):
    with pytest.raises(UserError) as refusal:
        load_policy(PolicyConfig(model=quantised[bits], device="cpu", **settings))
    assert sentence in str(refusal.value)


def test_no_adapter_is_merged_into_quantised_weights(quantised, tmp_path):
    first = load_policy(PolicyConfig(model=quantised["4bit"], device="cpu", lora_rank=2))
    first.model.save_pretrained(tmp_path)
    assert isinstance(load_policy(PolicyConfig(model=str(tmp_path), device="cpu")), Policy)
    with pytest.raises(UserError, match=r"an adapter cannot be merged into them: omit --lora-rank$"):
        load_policy(PolicyConfig(model=str(tmp_path), device="cpu", lora_rank=2))
