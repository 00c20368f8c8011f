"""Preference pairs: the schemas that are read, the rows that are left out or refused, and the figures of a judge."""

import json
import math
import random
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from common.errors import UserError
from common.preferences import preference_metrics

from harness.task.pairs import load_pairs, read_pairs

ROW = {"prompt": "What is 1 + 2?", "chosen": "<answer>3</answer>", "rejected": "<answer>4</answer>"}


@pytest.fixture
def load(tmp_path, tokenizer):
    """The pairs of some rows, the first of which is also the held-out one."""
    judge = SimpleNamespace(tokenizer=tokenizer, end_of_turn_ids=[tokenizer.eos_token_id])

    def load(*rows: dict, context: int = 1024, **settings):
        judge.model = SimpleNamespace(config=LlamaConfig(max_position_embeddings=context))
        for name, some in (("pairs", rows), ("held_out", (ROW,))):
            text = "".join(json.dumps(row) + "\n" for row in some)
            (tmp_path / f"{name}.jsonl").write_text(text)
        fixed = {"data": str(tmp_path / "pairs.jsonl"), "eval_data": str(tmp_path / "held_out.jsonl")}
        fixed |= {"eval_prompts": 1, "max_pairs": None, "max_length": 64, "answer_begins": None, "pairs_per_step": 1}
        config = SimpleNamespace(seed=0, **fixed | settings)
        return load_pairs(config, judge, read_pairs(config))[0]

    return load


def text_of(tokenizer, row) -> tuple[str, str]:
    """The complete text of a row, and the part of it that is learned."""
    learned = [token for token, is_action in zip(row.ids, row.action_mask, strict=True) if is_action]
    return tokenizer.decode(row.ids), tokenizer.decode(learned)


def test_text_and_messages_give_the_same_rows(load, tokenizer):
    """The schema of ultrafeedback_binarized: the prompt as text, the answers as conversations that begin with it."""
    question = {"role": "user", "content": ROW["prompt"]}
    answers = {name: [{"role": "assistant", "content": ROW[name]}] for name in ("chosen", "rejected")}
    (plain,) = load(ROW)
    for other in (
        ROW | {"prompt": [question]},
        ROW | answers,
        ROW | {"prompt": [question]} | answers,
        ROW | {name: [question, *answer] for name, answer in answers.items()},
    ):
        assert load(other) == [plain]
    assert [row.completion_index for row in plain.rows] == [0, 1]
    text, learned = text_of(tokenizer, plain.chosen)
    assert (ROW["prompt"] in text, learned) == (True, f"{ROW['chosen']}<|im_end|>")


def test_only_the_last_turn_of_a_conversation_is_learned(load, tokenizer):
    before = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi!"}]
    (pair,) = load(ROW | {"prompt": [*before, {"role": "user", "content": ROW["prompt"]}]})
    for row, answer in zip(pair.rows, (ROW["chosen"], ROW["rejected"]), strict=True):
        text, learned = text_of(tokenizer, row)
        assert "Hi!" in text
        assert learned == f"{answer}<|im_end|>"


def test_pairs_that_teach_nothing_are_left_out_and_counted(load, capsys):
    long = "<answer>" + "1 " * 100 + "</answer>"
    rows = [ROW | {"rejected": " "}, ROW | {"rejected": ROW["chosen"]}, ROW | {"score_chosen": 1, "score_rejected": 1}]
    pairs = load(ROW, *rows, ROW | {"chosen": long}, ROW | {"chosen": ""}, ROW | {"score_chosen": 2})
    assert len(pairs) == 2
    assert len(load(ROW, ROW | {"chosen": long}, max_length=1024, context=64)) == 1
    said = capsys.readouterr().out
    for sentence in ("2 of 7 pairs left out: an empty answer (the first: ", "1 of 7 pairs left out: two equal answers",
                     "pairs.jsonl:4", "a tie", "more than --max-length 64 tokens (the first: ",
                     "1 of 2 pairs left out: more than the model's context of 64 tokens (the first: "):  # fmt: skip
        assert sentence in said


def test_one_empty_answer_of_hh_refuses_no_file(load, capsys):
    load(ROW, {"chosen": text_of_hh("?", "3"), "rejected": text_of_hh("?", "")})
    assert "1 of 2 pairs left out: an empty answer (the first: " in capsys.readouterr().out


def turns(*texts: str) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def text_of_hh(*texts: str) -> str:
    return "".join(f"\n\n{('Human', 'Assistant')[i % 2]}: {text}" for i, text in enumerate(texts))


SAID = ("Hello.", "Hi!", ROW["prompt"])


@pytest.mark.parametrize(("row", "history"), [
    ({"chosen": turns(*SAID, "3"), "rejected": turns(*SAID, "4")}, SAID),
    ({"chosen": text_of_hh(*SAID, "3"), "rejected": text_of_hh(*SAID, "4")}, SAID),
    ({"prompt": SAID[0], "chosen": turns(*SAID, "3"), "rejected": turns(*SAID, "4")}, SAID),  # its first question
    ({"prompt": turns(*SAID[:1]), "chosen": turns(*SAID, "3")[1:], "rejected": turns(*SAID, "4")[1:]}, SAID),  # goes on
    ({"prompt": turns(*SAID), "chosen": "3", "rejected": turns(*SAID, "4")}, SAID),
    ({"chosen": turns(*SAID, "3"), "rejected": turns("Hello?", *SAID[1:], "4")}, None),
    ({"chosen": text_of_hh(*SAID, "3"), "rejected": text_of_hh("Hello.", "Ho!", SAID[2], "4")}, None),
    ({"chosen": turns(*SAID, "3"), "rejected": turns(SAID[2], "4")}, None),
    ({"prompt": "Who?", "chosen": turns(*SAID, "3"), "rejected": turns(*SAID, "4")}, None),
    ({"prompt": turns("Who?"), "chosen": turns(*SAID, "3"), "rejected": "4"}, None),
])  # fmt: skip
def test_pairs_with_different_histories_are_left_out_and_counted(load, tokenizer, capsys, row, history):
    found = load(ROW, row)
    if history is None:
        assert len(found) == 1
        assert "1 of 2 pairs left out: the answers have different histories (the first: " in capsys.readouterr().out
        return
    messages = [{"role": turn["role"], "content": turn["content"]} for turn in turns(*history)]
    for trajectory, answer in zip(found[1].rows, "34", strict=True):
        wanted = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": answer}], tokenize=False)
        assert text_of(tokenizer, trajectory) == (wanted, f"{answer}<|im_end|>")


def test_a_hidden_thought_is_not_in_the_rows_but_decides_on_the_style(load, tokenizer):
    thought = {"chosen": "<think>1+2=3</think><answer>3</answer>"}
    (shown,), (hidden,) = (load(ROW | thought, answer_begins=tag) for tag in (None, "</think>"))
    assert "1+2=3" in text_of(tokenizer, shown.chosen)[1]
    assert text_of(tokenizer, hidden.chosen)[1] == "<answer>3</answer><|im_end|>"
    assert (shown.same_style, hidden.same_style, load(ROW)[0].same_style) == (False, False, True)
    named = {"style_chosen": "short", "style_rejected": "short"}
    assert load(ROW | thought | named)[0].same_style


KEEPS_LAST_THOUGHT = """\
{%- for m in messages %}{%- set kept = m.content if loop.last else m.content.split('</think>')[-1] %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}{{- kept + '<|im_end|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


def test_the_template_may_drop_earlier_thoughts(load, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", KEEPS_LAST_THOUGHT)
    thought = "<think>1+1=2</think><answer>2</answer>"
    before = [{"role": "user", "content": "Add 1 and 1."}, {"role": "assistant", "content": thought}]
    answers = {"chosen": thought.replace("2<", "3<"), "rejected": "<think>?</think>4"}
    (pair,) = load(ROW | {"prompt": [*before, {"role": "user", "content": "And 1?"}]} | answers)
    for row, answer in zip(pair.rows, answers.values(), strict=True):
        text, learned = text_of(tokenizer, row)
        assert (text.count("1+1=2"), learned) == (answer.count("1+1=2"), answer + "<|im_end|>")


@pytest.mark.parametrize("name", ["reasoning_content", "thinking"])
def test_a_thought_beside_the_answer_is_rendered_or_refused(load, tokenizer, name, monkeypatch):
    """It makes two pairs of equal contents different, and decides on the style; a judge of answers does not see it."""
    turn = {"role": "assistant", "content": "3"}
    row = ROW | {"chosen": [turn | {name: "1+2=3"}], "rejected": [turn]}
    with pytest.raises(UserError, match=rf"pairs.jsonl:1: the chat template leaves out the {name} of .*<think>"):
        load(row)
    (hidden,) = load(row | {"rejected": "4"}, answer_begins="</think>")
    assert text_of(tokenizer, hidden.chosen)[1] == "3<|im_end|>"
    monkeypatch.setattr(tokenizer, "chat_template", KEEPS_LAST_THOUGHT)
    (pair,) = load(row)
    assert [text_of(tokenizer, some)[1] for some in pair.rows] == ["<think>1+2=3</think>3<|im_end|>", "3<|im_end|>"]
    assert not pair.same_style


def test_calls_and_tools_of_pairs_are_read(load, tokenizer):
    tool = {"name": "add", "parameters": {"properties": {"a": {}, "b": {}}}}
    call = {"function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    row = {"chosen": [{"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [tool]}
    (pair,) = load(ROW | row)
    text, learned = text_of(tokenizer, pair.chosen)
    assert "Tools: add(a, b)" in text
    assert learned == '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>'


def test_the_figures_of_a_judge_equal_slow_loops():
    rng = random.Random(0)
    scores = [(rng.gauss(0.5, 2), rng.gauss(0, 2)) for _ in range(200)] + [(1.0, 1.0)]
    lengths = [(rng.randint(5, 40), rng.randint(5, 40)) for _ in scores]
    same = [rng.random() < 0.3 for _ in scores]
    found = preference_metrics(scores, lengths, same)
    right = [1 if a > b else 0.5 if a == b else 0 for a, b in scores]
    assert found["accuracy"] == pytest.approx(sum(right) / len(right))
    assert found["accuracy_same_style"] == pytest.approx(
        sum(r for r, s in zip(right, same, strict=True) if s) / sum(same)
    )
    near = [abs(a - b) / max(a, b) <= 0.1 for a, b in lengths]
    assert found["accuracy_same_length"] == pytest.approx(
        sum(r for r, n in zip(right, near, strict=True) if n) / sum(near)
    )
    error = 0.0
    for low in range(10):
        inside = [(p, r) for (a, b), r in zip(scores, right, strict=True)
                  if low / 10 <= (p := 1 / (1 + math.exp(-abs(a - b)))) < (low + 1) / 10]  # fmt: skip
        if inside:
            gap = sum(p for p, _ in inside) / len(inside) - sum(r for _, r in inside) / len(inside)
            error += len(inside) / len(scores) * abs(gap)
    assert found["calibration_error"] == pytest.approx(error)
    flat, sizes = ([x for pair in pairs for x in pair] for pairs in (scores, lengths))
    import numpy as np

    assert found["length_correlation"] == pytest.approx(np.corrcoef(flat, sizes)[0, 1])


def test_large_margins_do_not_overflow():
    assert preference_metrics([(1e4, -1e4)], [(3, 9)], [True])["calibration_error"] == 0.0
