"""Reward models: scores equal those of transformers for any padding, and whatever cannot be one is refused."""

import functools
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from common.errors import UserError
from common.given_answers import encode_chat, encode_conversation
from common.loss import bradley_terry_loss
from common.reward_model import RewardModel, score_rows

from harness.base.config import TINY_POLICY, PolicyConfig
from harness.models.loading import load_policy
from harness.models.reward_loading import load_reward_model, new_reward_model
from harness.task.answer_judge import PREFERENCE, Judge, load_judges

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS = {
    "llama": (LlamaConfig, LlamaForSequenceClassification, {"num_key_value_heads": 2}),
    "qwen2": (Qwen2Config, Qwen2ForSequenceClassification, {"num_key_value_heads": 4}),
    "bert": (BertConfig, BertForSequenceClassification, {}),
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
QUESTION = [{"role": "user", "content": "What is 20 plus 38?"}]
load = functools.partial(load_reward_model, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def save_judge(save_checkpoint, tmp_path_factory):
    """A random reward model with the tokenizer and the template of a small checkpoint: its directory."""

    def save(kind: str = "qwen2", tokenizer: str = "qwen2", num_labels: int = 1, **settings):
        path = save_checkpoint(tokenizer, tmp_path_factory.mktemp("judge"))
        (path / "model.safetensors").unlink()
        config, model, fixed = KINDS[kind]
        vocabulary = len(AutoTokenizer.from_pretrained(path))
        torch.manual_seed(0)
        sizes = SIZES | fixed | {"vocab_size": vocabulary, "initializer_range": 0.3, "num_labels": num_labels}
        model(config(**sizes | settings)).save_pretrained(path)
        return path

    return save


def rows_of(model: RewardModel) -> list[list[int]]:
    """Rows of several lengths, one of which ends with the id that pads."""
    rows = [list(range(5, 5 + length)) for length in (3, 9, 4, 17)]
    return [*rows, [*rows[1], model.pad_id]]


@pytest.mark.parametrize("kind", KINDS)
def test_scores_equal_those_of_transformers_whatever_the_batch(save_judge, kind):
    path = save_judge(kind)
    model, other = load(str(path)), AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    rows = rows_of(model)
    with torch.no_grad():
        expected = [other(torch.tensor([row])).logits.item() for row in rows[:-1]]
    scores = score_rows(model, rows, 8)
    assert scores[:-1] == pytest.approx(expected, abs=1e-5)
    assert score_rows(model, rows, 1) == pytest.approx(scores, abs=1e-5)
    for order in itertools.permutations(range(4)):
        assert score_rows(model, [rows[i] for i in order], 4) == pytest.approx([scores[i] for i in order], abs=1e-5)
    if kind != "bert":
        width = max(map(len, rows))
        ids = torch.tensor([row + [model.pad_id] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        other_ids = torch.where(mask.bool(), ids, 7)  # what pads does not matter
        with torch.no_grad():
            assert torch.allclose(model(ids, mask), torch.tensor(scores), atol=1e-5)
            assert torch.allclose(model(other_ids, mask), torch.tensor(scores), atol=1e-5)
        assert scores[-1] != pytest.approx(scores[1], abs=1e-3)  # the last id counts, although it equals the pad id


def test_a_new_one_begins_with_the_layers_of_its_model_and_is_what_any_library_loads(tmp_path):
    config = PolicyConfig(device="cpu", dtype="float32", attn_implementation="sdpa", seed=3)
    model, same, another = (new_reward_model(PolicyConfig(**vars(config) | {"seed": s})) for s in (3, 3, 4))
    own = AutoModelForSequenceClassification.from_pretrained(TINY_POLICY, num_labels=1, dtype=torch.float32)
    for name, weight in own.model.state_dict().items():
        assert torch.equal(weight, model.model.model.state_dict()[name])
    assert torch.equal(model.model.score.weight, same.model.score.weight)
    assert not torch.equal(model.model.score.weight, another.model.score.weight)
    model.model.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert saved.config.num_labels == 1
    rows = rows_of(model)[:2]
    ids = torch.tensor([rows[0] + [model.pad_id] * 6, rows[1]])
    with torch.no_grad():
        assert saved(ids).logits[:, 0].tolist() == pytest.approx(score_rows(model, rows, 2), abs=1e-5)


def test_a_reward_model_is_trained_further_and_is_no_policy(save_judge):
    path = save_judge()
    config = PolicyConfig(model=str(path), device="cpu", dtype="float32", attn_implementation="sdpa")
    weight = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).score.weight
    assert torch.equal(new_reward_model(config).model.score.weight, weight)
    with pytest.raises(UserError, match="is a reward model and writes nothing: --reward-model takes it"):
        load_policy(config)


def test_a_conversation_is_rendered_for_the_judge_as_in_its_training():
    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    messages = [*QUESTION, {"role": "assistant", "content": "<think>20+38=58</think><answer>58</answer>"}]
    ids, _ = encode_chat(tokenizer, messages, [tokenizer.eos_token_id])
    assert encode_conversation(tokenizer, messages) == ids
    assert tokenizer.apply_chat_template(messages, return_dict=False) == ids


def judged(config, texts: list[str]) -> list[float]:
    (judge,) = load_judges(config)
    return [score[PREFERENCE] for score in judge.score([QUESTION] * len(texts), texts)]


@pytest.mark.parametrize("tokenizer", ["llama", "qwen2"])
def test_a_judge_with_its_own_tokenizer_and_template_sees_only_the_answer(save_judge, tokenizer):
    """The bundled policy's texts, in the words of another tokenizer; a Llama has no pad token."""
    path = save_judge("llama" if tokenizer == "llama" else "qwen2", tokenizer)
    names = {"reward_model": str(path), "reward_model_url": None, "answer_begins": "</think>", "strict": True}
    config = SimpleNamespace(device="cpu", generation_batch_size=4, no_answer_penalty=7.0, **names)
    texts = ["<think>20+38=58</think>It is 58.", "<think>no idea</think>It is 58.", "It is 58.", "<think>20+38"]
    scores = judged(config, texts)
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    assert scores[2:] == [-7.0, -7.0]
    own = AutoTokenizer.from_pretrained(path)
    ids = own.apply_chat_template([*QUESTION, {"role": "assistant", "content": "It is 58."}], return_dict=False)
    plain = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        assert scores[0] == pytest.approx(plain(torch.tensor([ids])).logits.item(), abs=1e-5)
    config.strict = False
    assert judged(config, texts)[2:] == [pytest.approx(scores[0], abs=1e-6), -7.0]


def test_a_score_that_is_no_number_ends_the_run():
    with pytest.raises(UserError, match="not a finite number"):
        Judge(lambda _: [{PREFERENCE: float("nan")}], {PREFERENCE: 1.0}, {PREFERENCE: 0.0}).score([QUESTION], ["58"])


def test_a_reward_model_that_cannot_judge_is_refused(save_judge):
    """test_refusals.py: what is no reward model."""
    damaged, plain = save_judge(), save_judge()
    weights = AutoModelForSequenceClassification.from_pretrained(damaged)
    weights.score.weight.data[0, 0] = float("nan")
    weights.save_pretrained(damaged)
    with pytest.raises(UserError, match=r"hold NaN or infinite numbers: score\.weight"):
        load(str(damaged))
    (plain / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="has no chat template"):
        load(str(plain))


@pytest.mark.parametrize("settings", [{"max_position_embeddings": 64}, {"rope_parameters": LONGROPE}])
def test_a_conversation_that_is_too_long_for_the_judge_is_refused(save_judge, settings):
    path = save_judge(**settings)
    config = SimpleNamespace(device="cpu", generation_batch_size=4, no_answer_penalty=0.0, reward_model=str(path))
    vars(config).update(reward_model_url=None, answer_begins=None, strict=False)
    with pytest.raises(UserError, match=r"answer has [3-9]\d\d tokens for the reward model, which reads 64 at most"):
        judged(config, ["58 " * 100, "58"])


def test_the_loss_equals_a_slow_loop():
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = (torch.randn(7, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
    loss = bradley_terry_loss(chosen - rejected).mean()
    loss.backward()
    slow = [math.log1p(math.exp(r - c)) for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True)]
    assert loss.item() == pytest.approx(sum(slow) / 7, abs=1e-9)
    for index in range(7):  # by hand: d loss / d chosen = -sigmoid(rejected - chosen) / pairs
        slope = -1 / (1 + (chosen[index] - rejected[index]).exp()) / 7
        assert chosen.grad[index] == pytest.approx(slope.item(), abs=1e-9)
        assert rejected.grad[index] == pytest.approx(-slope.item(), abs=1e-9)
