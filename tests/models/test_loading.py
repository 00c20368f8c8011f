"""Loading a policy: dropout is switched off, and models that this code would score wrongly are refused.

The model's context: oversized prompts are found before training, by row, and few are encoded to find them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from policies import fill_adapters, gap, scale
from policies import load as load_plain
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    ModernBertDecoderConfig,
)

from common.chat import encode_prompt
from common.errors import UserError
from common.policy import Policy
from common.sampling import sample

import harness.models.context
from harness.base.config import TINY_POLICY, PolicyConfig
from harness.data.rows import Row, placed
from harness.models.context import LONGEST, check_prompts, context_length
from harness.models.loading import load_policy, make_reference
from harness.task.task import check_context

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


@pytest.mark.parametrize("template", [None, "recipes/base_model.jinja"])
def test_a_base_model_whose_completions_would_never_end_is_told_of(save_checkpoint, tmp_path, capsys, template):
    """As Qwen2.5's: the template ends a turn with <|im_end|>, and the model with <|endoftext|>."""
    path = save_checkpoint("qwen2", tmp_path / "model")
    load_plain(path)
    assert "ends an answer with" not in capsys.readouterr().out
    for name, own in (("tokenizer_config.json", "<|endoftext|>"), ("generation_config.json", 256)):
        fields = json.loads((path / name).read_text())
        assert fields["eos_token" if isinstance(own, str) else "eos_token_id"] != own
        fields["eos_token" if isinstance(own, str) else "eos_token_id"] = own
        (path / name).write_text(json.dumps(fields))
    load_plain(path, chat_template=template and str(ROOT / template))
    said = capsys.readouterr().out
    sentence = "the chat template ends an answer with '<|im_end|>', but only <|endoftext|> ends a completion"
    assert (sentence in said, "recipes/base_model.jinja" in said) == (template is None, template is None)


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
    """Checkpointing runs in training mode and computes every layer twice; dropout would make the two passes differ."""
    policy = load(with_dropout(name), gradient_checkpointing=True)
    with torch.no_grad():
        expected = policy(IDS, MASK).log_probs
        assert not policy.model.training
    first, second = (policy(IDS, MASK).log_probs for _ in range(2))
    assert policy.model.training
    assert torch.equal(first, second)
    torch.testing.assert_close(first.detach(), expected, atol=1e-4, rtol=0)


TRANSFORMS = r"transforms its logits after the LM head, which .* yet$"
OTHER_STATE = r"keeps state other than keys and values, .* yet$"
REFUSED = {
    "soft-capped": (Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, initializer_range=1.0), TRANSFORMS),
    "scaled down": (GraniteConfig(**SMALL, logits_scaling=8.0, initializer_range=0.3), TRANSFORMS),
    "scaled": (CohereConfig(**SMALL, logit_scale=0.0625, initializer_range=0.3, pad_token_id=0), TRANSFORMS),
    "mamba": (MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=8), OTHER_STATE),
    "lfm 2": (Lfm2Config(**SMALL, num_key_value_heads=2, layer_types=["conv", "full_attention"]), OTHER_STATE),
    "another decoder": (ModernBertDecoderConfig(**SMALL), r"does not run as a decoder with an LM head, .* yet$"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_be_scored_wrongly_is_refused(load, name):
    config, reason = REFUSED[name]
    attention = "eager" if name in ("soft-capped", "mamba") else "sdpa"  # transformers refuses sdpa for them
    with pytest.raises(UserError, match=rf"^\w+For(Causal)?\w+ {reason}"):
        load(config, attn_implementation=attention)


def test_a_window_shorter_than_the_rows_is_not_refused(load):
    load(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=4, initializer_range=0.3), dtype="bfloat16")


def test_the_reference_is_a_frozen_copy(load):
    """It has the policy's log-probs, and keeps them when the policy changes."""
    policy = load(LlamaConfig(**SMALL, initializer_range=0.3))
    reference = make_reference(policy)
    assert not any(weight.requires_grad for weight in reference.parameters())
    assert all(weight.requires_grad for weight in policy.parameters())
    expected = policy(IDS, MASK).log_probs
    scale(policy)
    assert not torch.allclose(policy(IDS, MASK).log_probs, expected)
    assert torch.equal(reference(IDS, MASK).log_probs, expected)


# weights that were quantised before they were saved -----------------------------------------------------------------

NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory) -> dict[str, str]:
    """The bundled policy, saved with 4-bit weights (as by --load-in 4bit) and with 8-bit weights: the directories."""
    pytest.importorskip("bitsandbytes")
    places = {}
    for bits, settings in (("4bit", NF4), ("8bit", {})):
        places[bits] = str(tmp_path_factory.mktemp("quantised") / bits)
        quantization = BitsAndBytesConfig(**{f"load_in_{bits}": True}, **settings)
        options = {"quantization_config": quantization, "dtype": torch.float32, "device_map": {"": "cpu"}}
        AutoModelForCausalLM.from_pretrained(TINY_POLICY, **options).save_pretrained(places[bits])
        AutoTokenizer.from_pretrained(TINY_POLICY).save_pretrained(places[bits])
    return places


@pytest.mark.slow
def test_a_4_bit_checkpoint_is_trained_as_with_load_in(quantised):
    """Log-probs and gradients after a rollout, which repacked weights would change."""
    found = {}
    for model, load_in in (("tiny", "4bit"), (quantised["4bit"], None), (quantised["4bit"], "4bit")):
        policy = fill_adapters(load_plain(model, lora_rank=4, load_in=load_in))
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


@pytest.mark.parametrize(("bits", "settings", "sentence"), [
    ("4bit", {}, "(4bit) and cannot be trained: add an adapter, --lora-rank 16"),
    ("8bit", {}, "(8bit) and cannot be trained: add an adapter, --lora-rank 16"),
    ("4bit", {"lora_rank": 4, "save_merged": True}, "(4bit), and an adapter cannot be merged into them"),
    ("4bit", {"lora_rank": 4, "load_in": "4bit", "save_merged": True}, "omit --save-merged"),
    ("4bit", {"lora_rank": 4, "load_in": "8bit", "dtype": "bfloat16"}, "(4bit): omit --load-in 8bit"),
    ("8bit", {"lora_rank": 4, "load_in": "4bit"}, "(8bit): omit --load-in 4bit"),
    ("8bit", {"lora_rank": 4, "dtype": "float32"}, "(8bit) and compute in half precision: use --dtype bfloat16"),
])  # fmt: skip
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


# the context --------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
SHORT = (
    *("--steps", "2", "--prompts-per-step", "2", "--group-size", "2", "--eval-prompts", "2", "--name", "x"),
    *("--device", "cpu"),
)


def with_positions(number: int) -> GPT2Config:
    return GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=number)


def write_rows(path: Path, lengths: list[int]) -> str:
    rows = [{"question": "a" * length, "answer": "2"} for length in lengths]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_learned_positions_are_never_exceeded(tmp_path, monkeypatch, load_script, save_model):
    """GPT-2 fails with an IndexError one token beyond them."""
    monkeypatch.chdir(tmp_path)
    save_model(with_positions(64))
    data = write_rows(tmp_path / "d.jsonl", [3, 3, 3, 20])
    flags = (*SHORT, "--model", "./model", "--data", data, "--system-prompt", "")
    main = load_script("experiment_base/train.py").main
    room = 64 - len(encode_prompt(AutoTokenizer.from_pretrained(tmp_path / "model"), ask({"question": "a" * 20})))
    with pytest.raises(UserError, match=rf"d\.jsonl:4: its prompt of {64 - room} tokens .*context of 64 tokens"):
        main([*flags, "--max-new-tokens", str(room + 1)])
    main([*flags, "--max-new-tokens", str(room)])
    assert (tmp_path / "runs" / "experiment_base" / "x" / "summary.json").exists()


def make_policy(tokenizer, **settings) -> SimpleNamespace:
    """As much of a policy as the check needs."""
    return SimpleNamespace(tokenizer=tokenizer, model=SimpleNamespace(config=LlamaConfig(**settings)))


def placed_rows(questions: list[str]) -> list[Row]:
    return [placed({"question": text}, f"row {number}") for number, text in enumerate(questions, start=1)]


def ask(row: dict) -> list[dict]:
    return [{"role": "user", "content": row["question"]}]


def test_only_the_longest_prompts_are_encoded(monkeypatch):
    encoded = []

    def encode_and_count(*arguments):
        encoded.append(arguments)
        return encode_prompt(*arguments)

    monkeypatch.setattr(harness.models.context, "encode_prompt", encode_and_count)
    policy = make_policy(AutoTokenizer.from_pretrained(TINY_POLICY), max_position_embeddings=300)
    rows = placed_rows(["a" * 10] * 1000 + ["a" * 150] + ["a" * 10] * 1000)
    check_prompts(policy, rows, ask, max_new_tokens=100)
    assert len(encoded) == LONGEST
    with pytest.raises(UserError, match=r"^row 1001: its prompt of \d+ tokens and a completion of up to 290 exceed"):
        check_prompts(policy, rows, ask, max_new_tokens=290)


def test_tools_of_a_task_are_part_of_its_prompts():
    tokenizer, tools = AutoTokenizer.from_pretrained(TINY_POLICY), [{"name": "x" * 50}]
    tokenizer.chat_template = "{{ tools }}{{ messages[0].content }}"
    rows = placed_rows(["abc"])
    config = SimpleNamespace(system_prompt="", max_new_tokens=9)
    task = SimpleNamespace(eval_rows=rows, train_rows=[], messages=lambda row, system_prompt: ask(row), tools=tools)
    task.eval_sets = {}
    longest = len(encode_prompt(tokenizer, ask(rows[0]), tools))
    check_context(config, task, make_policy(tokenizer, max_position_embeddings=longest + 9))
    with pytest.raises(UserError, match=f"its prompt of {longest} tokens"):
        check_context(config, task, make_policy(tokenizer, max_position_embeddings=longest + 8))


STRETCHED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


ROPES = {  # of a model that was trained on 64 tokens, and the context that it then has here
    "linear": ({"factor": 4.0}, 64, 256),
    "yarn": ({"factor": 4.0, "original_max_position_embeddings": 64}, 256, 256),
    "llama3": (
        {"factor": 4.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        *(256, 256),
    ),
    "dynamic": ({"factor": 4.0}, 64, 64),
    "longrope": (
        {"original_max_position_embeddings": 64, "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
        *(256, 64),
    ),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=pytest.mark.slow) if x in ("linear", "llama3") else x for x in ROPES]
)
def test_sampling_and_training_agree_up_to_the_context(load, capsys, kind):
    """Beyond it, with the two kinds that turn all tokens by the longest row of a batch, they do not."""
    rope, positions, length = ROPES[kind]
    rope = rope | {"rope_type": kind, "rope_theta": 1e4}
    policy = load(LlamaConfig(**SMALL, initializer_range=0.3, max_position_embeddings=positions, rope_parameters=rope))
    assert context_length(policy) == length
    assert ("has a context of 64 tokens here: " in capsys.readouterr().out) == (length == 64)
    policy.end_of_turn_ids = []  # rows of full length

    def difference(length: int) -> float:
        rows = sample(policy, [[5, 6, 7] * 10, [8, 9]], 2, max_new_tokens=length - 30, key=(0,))
        return gap(policy, rows)

    assert difference(length) < 1e-4
    assert length == 256 or difference(length + 40) > 0.1


@pytest.mark.parametrize(("config", "length"), [
    (LlamaConfig(max_position_embeddings=64), 64),
    (LlamaConfig(max_position_embeddings=64, rope_parameters=STRETCHED), 256),
    (LlamaConfig(max_position_embeddings=256, rope_parameters=STRETCHED), 256),
    (GPT2Config(n_positions=77), 77),
    (BloomConfig(), float("inf")),  # its positions have no limit
])  # fmt: skip
def test_the_context_is_what_the_config_says(config, length):
    assert context_length(SimpleNamespace(model=SimpleNamespace(config=config))) == length


def test_sft_leaves_out_what_exceeds_the_context(tmp_path, monkeypatch, load_script, save_model, capsys):
    """Even if --max-length allows for it."""
    monkeypatch.chdir(tmp_path)
    save_model(with_positions(128))
    turns = [
        ({"role": "user", "content": "a" * n}, {"role": "assistant", "content": "b"}) for n in [3] * 20 + [200] * 2
    ]
    Path("d.jsonl").write_text("".join(json.dumps({"messages": pair}) + "\n" for pair in turns))
    flags = ("--model", "./model", "--data", "d.jsonl", "--max-length", "4096", "--name", "x", "--device", "cpu")
    load_script("imitation/sft/train.py").main([*flags, "--eval-prompts", "2"])
    assert "2 of 22 rows left out: too long" in capsys.readouterr().out
