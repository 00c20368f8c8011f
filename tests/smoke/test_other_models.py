"""The same train.py on other architectures, tokenizers and chat templates, freshly made."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
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


def byte_tokenizer(specials: list[str], **settings) -> PreTrainedTokenizerFast:
    """A tokenizer without merges: one token a byte, and the given special tokens behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def save_llama(path: Path) -> None:
    """Like Llama 3: several end-of-turn ids, no pad token, untied head."""
    tokenizer = byte_tokenizer(
        ["<|begin|>", "<|header|>", "<|eot|>", "<|end|>"], eos_token="<|eot|>", chat_template=LLAMA_3_TEMPLATE
    )
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, tie_word_embeddings=False, **SMALL)
    )
    ends = tokenizer.convert_tokens_to_ids(["<|eot|>", "<|end|>"])
    model.generation_config = GenerationConfig(
        eos_token_id=ends, bos_token_id=tokenizer.convert_tokens_to_ids("<|begin|>")
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def save_qwen(path: Path) -> None:
    """Like Qwen2: biases in attention, tied head, a system turn that the template adds, pad and end apart."""
    tokenizer = byte_tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=QWEN_2_TEMPLATE,
    )
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=4, tie_word_embeddings=True, **SMALL)
    )
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


@pytest.mark.parametrize("save", [save_llama, save_qwen])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experiment_base_trains_it_unchanged(tmp_path, monkeypatch, load_script, save, dtype):
    torch.manual_seed(0)
    save(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    load_script("experiment_base/train.py").main(
        [
            *("--model", "./model", "--steps", "2", "--prompts-per-step", "2", "--group-size", "4", "--dtype", dtype),
            *("--max-new-tokens", "12", "--eval-prompts", "4", "--minibatch-size", "4", "--name", "other"),
            *("--format-weight", "0.5", "--attn-implementation", "eager" if dtype == "float32" else "sdpa"),
        ]
    )
    directory = tmp_path / "runs" / "experiment_base" / "other"
    first, second = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()][1:3]
    assert first["policy/first_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert first["loss/kl"] == pytest.approx(0.0, abs=1e-4)
    assert first["policy/sampler_gap"] < (1e-4 if dtype == "float32" else 0.1)
    assert second["step"] == 2
    assert (directory / "final" / "model.safetensors").exists()
