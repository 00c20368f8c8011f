"""chat.py: a conversation with a policy."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from common.chat import decode, encode_prompt
from common.sampling import sample

from harness.base.config import RunConfig
from harness.models.loading import load_policy

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "What is 47 plus 29?"


@pytest.fixture
def talk(load_script, monkeypatch, capsys, tmp_path):
    chat = load_script("chat.py")

    def talk(*flags: str, says: str = QUESTION) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{says}\n"))
        chat.main([*flags, "--runs-dir", str(tmp_path)])
        return capsys.readouterr().out

    return talk


def test_an_answer_is_what_the_sampler_of_the_experiments_draws(talk):
    policy = load_policy(RunConfig())
    prompt = encode_prompt(policy.tokenizer, [{"role": "user", "content": QUESTION}])
    for seed in (0, 1, 5):
        [row] = sample(policy, [prompt], 1, max_new_tokens=96, key=(seed,))
        assert decode(policy.tokenizer, row.completion_ids) in talk("--seed", str(seed)).splitlines()


def test_an_answer_ends_at_a_stop_text(talk):
    said, ended = (talk("--greedy", *flags).partition(f"> {QUESTION}\n")[2] for flags in ((), ("--stop", "7")))
    assert said == "<answer>76</answer>\n"
    assert ended == "<answer>7\n"


@pytest.mark.parametrize(
    ("tool", "question", "found"),
    [
        (("--calculator",), "What is 477*29?", "  13833"),
        (
            ("--corpus", f"{ROOT}/data/qa_documents.jsonl"),
            "When was the ship Sastci built?",
            "  The ship Sastci was built",
        ),
    ],
    ids=["calculator", "search"],
)
def test_tools_answer_within_an_answer(talk, tool, question, found):
    """The bundled policy calls a tool now and then."""
    shown = (talk("--model", "tiny_tools", *tool, "--seed", str(seed), says=question) for seed in range(40))
    lines = next(text for text in shown if "<tool_call>" in text and found in text).splitlines()
    assert any(line.startswith(found) for line in lines)
    assert "<answer>" in lines[-1]


def test_why_shows_what_could_have_been_drawn(talk):
    shown = talk("--greedy", says=f"{QUESTION}\n/why 2\n/why \x1b99")
    assert [line for line in shown.splitlines() if line[0] == ">"] == [f"> {QUESTION}", "> /why 2", "> /why \ufffd99"]
    assert "'7' (drawn)" in shown
    assert "which of the" in shown


def test_a_full_context_is_said(talk):
    assert "no room is left in the model's context" in talk(says=QUESTION * 100)


def test_two_policies_answer_side_by_side(talk):
    shown = talk("--compare", "tiny_tools")
    assert "tiny_tools" in shown
    assert shown.count("<answer>") == 2


def test_it_starts_as_users_start_it():
    command = [sys.executable, str(ROOT / "chat.py"), "--show", "probabilities"]
    done = subprocess.run(command, input=f"{QUESTION}\n", capture_output=True, text=True, check=True)
    assert "<answer>" in done.stdout
