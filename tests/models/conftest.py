"""Shared by the tests of models: small checkpoints of other architectures, tokenizers and chat templates."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

LLAMA_3_TEMPLATE = (
    "{{ '<|begin|>' }}{% for m in messages %}{{ '<|header|>' + m.role + '\n' + m.content + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant\n' }}{% endif %}"
)
QWEN_2_TEMPLATE = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(specials: list[str | AddedToken], **settings) -> PreTrainedTokenizerFast:
    """A tokenizer without merges: one token per byte, followed by the given special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(name, special=True) if isinstance(name, str) else name for name in specials])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def save_llama(path: Path, **settings) -> None:
    """Like Llama 3: several end-of-turn ids, no pad token, untied head."""
    tokenizer = byte_tokenizer(
        ["<|begin|>", "<|header|>", "<|eot|>", "<|end|>"], eos_token="<|eot|>", chat_template=LLAMA_3_TEMPLATE
    )
    fixed = {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "tie_word_embeddings": False}
    model = LlamaForCausalLM(LlamaConfig(**fixed, **(SMALL | settings)))
    ends = tokenizer.convert_tokens_to_ids(["<|eot|>", "<|end|>"])
    model.generation_config = GenerationConfig(
        eos_token_id=ends, bos_token_id=tokenizer.convert_tokens_to_ids("<|begin|>")
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def save_qwen2(path: Path, **settings) -> None:
    """Like Qwen2: biases in attention, tied head, a system turn that the template adds, separate pad and end tokens."""
    tokenizer = byte_tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=QWEN_2_TEMPLATE,
    )
    fixed = {"vocab_size": len(tokenizer), "num_key_value_heads": 4, "tie_word_embeddings": True}
    model = Qwen2ForCausalLM(Qwen2Config(**fixed, **(SMALL | settings)))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


@pytest.fixture(scope="session")
def make_byte_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return byte_tokenizer


@pytest.fixture(scope="session")
def save_checkpoint() -> Callable[..., Path]:
    """Write a random "llama" or "qwen2" to a directory; settings such as `initializer_range` change its config."""
    savers = {"llama": save_llama, "qwen2": save_qwen2}

    def save(name: str, path: Path, **settings) -> Path:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            savers[name](path, **settings)
        return path

    return save
