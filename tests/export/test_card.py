"""The model card holds hostile names and texts, and nothing that says where they came from."""

import dataclasses
import re

import pytest
import yaml

from exporting.answers import Questions
from exporting.card import Card, code, escape, fenced, public_command
from exporting.source import Source

HOSTILE = "x`\n---\nlicense: mit\n```\n# Big <script>alert(1)</script> | [a](b) \x1b[31m\u202e"


@pytest.fixture
def card(tmp_path):
    """A card whose every text is hostile."""
    settings = {"experiment": HOSTILE, "task": f"/home/ada/{HOSTILE}", "model": f"/home/ada/{HOSTILE}", "command": []}
    settings |= {"commit": HOSTILE, "versions": {HOSTILE: HOSTILE}, "machine": HOSTILE, "completion_prefix": HOSTILE}
    settings |= {"system_prompt": HOSTILE, "temperature": HOSTILE, "seed": HOSTILE}
    settings["command"] = [HOSTILE, "--model", HOSTILE, f"--system-prompt={HOSTILE}", "--task", "x"]
    source = Source(run=tmp_path, weights=tmp_path, step=None, settings=settings)
    return Card(
        source=source,
        title=HOSTILE,
        loads_as=HOSTILE,
        dtype="float32",
        quantize="none",
        merged=False,
        license=None,
        questions=Questions([[{"role": "user", "content": HOSTILE}]], [[1]], 8),
        answer=HOSTILE,
        equal=1,
        gguf_equal=None,
        prompts_equal=1,
        has_curve=False,
    )


def test_hostile_text_stays_text(card):
    text = card.text()
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front).keys() == {"library_name", "pipeline_tag", "tags"}
    assert "/home/ada" not in text
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    outside = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", body, flags=re.MULTILINE | re.DOTALL)
    outside = re.sub(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", "", outside)
    assert "<script>" not in outside
    assert "[a](b)" not in outside
    headings = re.findall(r"^#+ \w.*$", outside, re.MULTILINE)
    assert [line for line in headings if line.startswith("## ")] == [
        *("## How to use it", "## Training", "## Evaluation", "## Check of what was exported", "## Limits"),
    ]
    compile(re.search(r"^(`{3,})python\n(.*?)^\1$", text, re.MULTILINE | re.DOTALL)[2], "card", "exec")


def test_the_command_names_no_place_and_no_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {
        "experiment": "experiment_engine",
        "model": "/home/ada/models/llama",
        "data": "owner/rows:main",
        "eval_data": str(tmp_path / "secret/test.jsonl"),
        "engine_start": "env KEY=sk-1 /home/ada/python",
        "engine_url": "http://ada:pw@host",
        "runs_dir": "/home/ada/runs",
        "name": "ada's",
        "lr": 1e-05,
        "save_merged": True,
        "system_prompt": "Say `it`.",
        "at_most": ["num_terms=2"],
        "steps": 20,
    }
    words = [f"--{name.replace('_', '-')}" for name in settings if name not in ("experiment", "steps")]
    settings["command"] = ["/home/ada/main/train.py", *words, "sk-1"]
    assert public_command(settings) == (
        "python experiment_engine/train.py --model llama --data owner/rows:main --eval-data test.jsonl --lr 1e-05 "
        "--save-merged --system-prompt 'Say `it`.' --at-most num_terms=2"
    )


def test_a_base_of_the_hub_is_named_with_its_relation(card):
    settings = card.source.settings | {"model": "Qwen/Qwen2.5-0.5B-Instruct"}
    hub = dataclasses.replace(card, source=dataclasses.replace(card.source, settings=settings), quantize="4bit")
    fields = yaml.safe_load(hub.text().split("---\n")[1])
    assert fields["base_model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert fields["base_model_relation"] == "finetune"
    assert "Qwen/Qwen2.5-0.5B-Instruct has a licence of its own" in hub.text()


def test_text_in_code_and_fences_cannot_end_them():
    assert code("a``b") == "``` a``b ```"
    assert fenced("a\n````\nb", "sh") == "`````sh\na\n````\nb\n`````"
    assert escape("![x](y)\n<b>") == r"\!\[x\](y) &lt;b>"


def described(card, **changes):
    """The text of a card whose run had other settings."""
    return dataclasses.replace(
        card, source=dataclasses.replace(card.source, settings=card.source.settings | changes)
    ).text()


def test_the_method_and_what_it_learned_from_are_named(card):
    text = described(card, experiment="experiment_base", task="arithmetic", data="/home/ada/my_rows.jsonl")
    assert "a run of GRPO (reinforcement learning, arXiv 2402.03300) with the questions and the reward of the" in text
    assert "task `arithmetic`, on the data `my_rows.jsonl`" in text
    assert "a run of Dr. GRPO" in described(card, experiment="experiment_drgrpo")
    assert "a run of GRPO" in described(card, experiment="experiment_drgrpo", critic_type="grpo")
    supervised = described(card, experiment="experiment_sft", task=None)
    assert "a run of supervised fine-tuning on examples of answers" in supervised
    assert "- reinforcement-learning" not in supervised


def test_figures_with_tools_are_told_from_what_the_code_asks(card, monkeypatch):
    monkeypatch.setattr(Source, "figures", lambda self: ({}, {"greedy/accuracy": 0.5}, 4))
    said = ("These figures are of several turns with tools", "They are answers in one turn, without tools.")
    assert all(sentence in described(card, max_turns=3) for sentence in said)
    assert not any(sentence in described(card, max_turns=3, tool=False) for sentence in said)


def test_a_gguf_file_that_was_not_run_is_no_equal_answer(card):
    """What the command asks has the run's system turn, quoted."""
    turns = [{"role": "system", "content": "It's brief."}, {"role": "user", "content": HOSTILE}]
    questions = Questions([turns], [[1]], 8)
    text = dataclasses.replace(card, quantize="gguf", questions=questions).text()
    assert "That was before the conversion; the GGUF file itself was not run." in text
    assert """-sys 'It'"'"'s brief.' -st -p """ in text
    text = dataclasses.replace(card, quantize="gguf", questions=questions, gguf_equal=0).text()
    assert "0 of 1 greedy answers to held-out questions, by llama.cpp," in text
