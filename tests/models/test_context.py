"""The model's context: prompts that do not fit are found before training, by row, and few are encoded for it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, BloomConfig, GenerationConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig
from transformers import PreTrainedTokenizerFast as FastTokenizer

from common.chat import encode_prompt
from common.errors import UserError

import common.plumbing.context
from common.plumbing.context import check_context, check_prompts, context_length
from common.plumbing.task import Row

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    *("--steps", "2", "--prompts-per-step", "2", "--group-size", "2", "--eval-prompts", "2", "--name", "x"),
    *("--device", "cpu"),
)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def save_gpt2(save_checkpoint) -> Callable[..., Path]:
    """Write a GPT-2, which has learned positions, with the byte-level tokenizer of the small Llama."""

    def save(path: Path, num_positions: int) -> Path:
        tokenizer = AutoTokenizer.from_pretrained(save_checkpoint("llama", path))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": num_positions}
            model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes))
        model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
        model.save_pretrained(path)
        return path

    return save


def write_rows(path: Path, lengths: list[int]) -> str:
    rows = [{"question": "a" * length, "answer": "2"} for length in lengths]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ["--data", "--eval-data"])
@pytest.mark.parametrize("experiment", ["experiment_base", "experiment_drgrpo"])
def test_a_question_beyond_the_context_is_refused_at_the_start(tmp_path, monkeypatch, load_script, experiment, name):
    """It is named, whether it would be trained on or only asked, and no run is left behind."""
    monkeypatch.chdir(tmp_path)
    data = write_rows(tmp_path / "d.jsonl", [5, 5, 30_000, 5, 5, 5])
    main = load_script(f"{experiment}/train.py").main
    with pytest.raises(
        UserError, match=r"d\.jsonl:3: its prompt of \d{4,} tokens and a completion of up to 96 ex"
    ) as caught:
        main([*SMALL, name, data, "--eval-prompts", "3"])
    assert "the model's context of 1024 tokens: leave out long questions with --max-question-length" in str(
        caught.value
    )
    assert not list(tmp_path.glob("runs/*/*"))
    if experiment == "experiment_base":
        limit = ("--max-question-length", "100", "--max-new-tokens", "4")
        main([*SMALL, name, data, *limit, "--steps", "1", "--eval-prompts", "2"])


def test_learned_positions_are_never_exceeded(tmp_path, monkeypatch, load_script, save_gpt2):
    """GPT-2 fails with an IndexError one token beyond them."""
    monkeypatch.chdir(tmp_path)
    save_gpt2(tmp_path / "model", num_positions=64)
    data = write_rows(tmp_path / "d.jsonl", [3, 3, 3, 20])
    flags = (*SMALL, "--model", "./model", "--data", data, "--system-prompt", "")
    main = load_script("experiment_base/train.py").main
    room = 64 - num_prompt_tokens(tmp_path / "model", "a" * 20)
    with pytest.raises(UserError, match=rf"d\.jsonl:4: its prompt of {64 - room} tokens .*context of 64 tokens"):
        main([*flags, "--max-new-tokens", str(room + 1)])
    main([*flags, "--max-new-tokens", str(room)])
    assert (tmp_path / "runs" / "experiment_base" / "x" / "summary.json").exists()


def num_prompt_tokens(model: Path, question: str) -> int:
    return len(encode_prompt(AutoTokenizer.from_pretrained(model), [{"role": "user", "content": question}]))


def make_policy(tokenizer, **settings) -> SimpleNamespace:
    """What the check needs of a policy."""
    return SimpleNamespace(tokenizer=tokenizer, model=SimpleNamespace(config=LlamaConfig(**settings)))


def placed(rows: list[str]) -> list[Row]:
    found = [Row({"question": question}) for question in rows]
    for number, row in enumerate(found, start=1):
        row.place = f"row {number}"
    return found


def ask(row: dict) -> list[dict]:
    return [{"role": "user", "content": row["question"]}]


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """The lengths of all prompts that the check has encoded."""
    lengths = []

    def encode_and_note(tokenizer, messages, tools):
        ids = encode_prompt(tokenizer, messages, tools)
        lengths.append(len(ids))
        return ids

    monkeypatch.setattr(common.plumbing.context, "encode_prompt", encode_and_note)
    return lengths


def test_only_prompts_that_could_be_too_long_are_encoded(tmp_path, save_checkpoint, encoded):
    tokenizer = AutoTokenizer.from_pretrained(save_checkpoint("llama", tmp_path / "model"))
    policy = make_policy(tokenizer, max_position_embeddings=300)
    rows = placed(["a" * 10] * 1000 + ["a" * 150] + ["a" * 10] * 1000)
    check_prompts(policy, rows, ask, max_new_tokens=100)
    assert len(encoded) <= 2  # what the template adds, and the long one
    with pytest.raises(UserError, match=r"^row 1001: its prompt of \d+ tokens and a completion of up to 140 exceed"):
        check_prompts(policy, rows, ask, max_new_tokens=140)
    assert len(encoded) <= 4


def test_tools_of_a_task_are_part_of_its_prompts():
    tokenizer, tools = byte_fallback(), [{"name": "x" * 50}]
    tokenizer.chat_template = "{{ tools }}" + TEMPLATE
    rows = placed(["abc"])
    config = SimpleNamespace(system_prompt="", max_new_tokens=9)
    task = SimpleNamespace(eval_rows=rows, train_rows=[], messages=lambda row, system_prompt: ask(row), tools=tools)
    longest = len(encode_prompt(tokenizer, ask(rows[0]), tools))
    check_context(config, task, make_policy(tokenizer, max_position_embeddings=longest + 9))
    with pytest.raises(UserError, match=f"its prompt of {longest} tokens"):
        check_context(config, task, make_policy(tokenizer, max_position_embeddings=longest + 8))


def byte_fallback() -> FastTokenizer:
    """Like SentencePiece: a space in front of every piece, and several bytes for a letter that it does not know."""
    vocab = {name: i for i, name in enumerate(["<unk>", "▁", *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("▁")])
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return FastTokenizer(tokenizer_object=tokenizer, chat_template=TEMPLATE)


def unknown_words() -> FastTokenizer:
    """One token for a word, unknown or not."""
    tokenizer = Tokenizer(models.WordLevel(vocab={"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return FastTokenizer(tokenizer_object=tokenizer, chat_template=TEMPLATE)


def repeating() -> FastTokenizer:
    """The template writes a question three times, with a sentence about it."""
    tokenizer = byte_fallback()
    tokenizer.chat_template = TEMPLATE.replace("{{ m.content }}", "{{ m.content * 2 }} Once more: {{ m.content }}")
    return tokenizer


@pytest.mark.parametrize("make_tokenizer", [byte_fallback, unknown_words, repeating])
@pytest.mark.parametrize("question", ["abc", "² " * 7, "\ufdfa" * 5, "é" * 20, "a b c d e f", "", "日本" * 9])
def test_no_prompt_that_is_too_long_is_missed(make_tokenizer, question):
    """A prompt with one token more than there is room for is refused, and one that fits is not."""
    tokenizer = make_tokenizer()
    rows = placed(["abc", question])
    longest = max(len(encode_prompt(tokenizer, ask(row))) for row in rows)
    policy = make_policy(tokenizer, max_position_embeddings=longest + 9)
    check_prompts(policy, rows, ask, max_new_tokens=9)
    with pytest.raises(UserError, match=rf"its prompt of {longest} tokens and a completion of up to 10 exceed"):
        check_prompts(policy, rows, ask, max_new_tokens=10)


STRETCHED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (LlamaConfig(max_position_embeddings=64), 64),
        (LlamaConfig(max_position_embeddings=64, rope_parameters=STRETCHED), 256),
        (LlamaConfig(max_position_embeddings=256, rope_parameters=STRETCHED), 256),
        (GPT2Config(n_positions=77), 77),
        (BloomConfig(), float("inf")),  # it has no positions that could end
    ],
)
def test_the_context_is_what_the_config_says(config, length):
    assert context_length(SimpleNamespace(model=SimpleNamespace(config=config))) == length


def test_sft_leaves_out_what_exceeds_the_context(tmp_path, monkeypatch, load_script, save_gpt2, capsys):
    """Even if --max-length allows for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "experiment_sft")
    save_gpt2(tmp_path / "model", num_positions=128)
    turns = [
        ({"role": "user", "content": "a" * n}, {"role": "assistant", "content": "b"}) for n in [3] * 20 + [200] * 2
    ]
    Path("d.jsonl").write_text("".join(json.dumps({"messages": pair}) + "\n" for pair in turns))
    flags = ("--model", "./model", "--data", "d.jsonl", "--max-length", "4096", "--name", "x", "--device", "cpu")
    load_script("experiment_sft/train.py").main([*flags, "--eval-prompts", "2"])
    assert "2 of 22 rows left out: too long" in capsys.readouterr().out


def test_an_examination_beyond_the_context_is_refused(tmp_path, monkeypatch, load_script, save_gpt2):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "experiment_sft")
    save_gpt2(tmp_path / "model", num_positions=100)
    flags = ("--model", "./model", "--num-copying", "40", "--num-reasoning", "0", "--num-answering", "0")
    with pytest.raises(UserError, match=r"math_tasks_heldout\.jsonl:\d+: its prompt of \d+ tokens .*context of 100 "):
        load_script("experiment_sft/train.py").main([*flags, "--name", "x", "--device", "cpu"])
    assert not list(tmp_path.glob("runs/*/*"))
