"""experiment_multiturn_tool_calling as users run it: its own flags, its files and output."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest
from run_files import rows_of

from harness.base.terminal import POLICY, REWARD, TOOL

SCRIPT = "experiment_multiturn_tool_calling/train.py"
SMALL = (
    *("--steps", "1", "--prompts-per-step", "2", "--group-size", "8", "--eval-prompts", "1", "--eval-every", "0"),
    *("--checkpoint-every", "0", "--device", "cpu", "--name", "x"),
)
A_TOOL = '''
import time

def search(query: str) -> str:
    """Search for a text.

    Args:
        query: what to look for
    """
    time.sleep(100 if query else 0)
'''


@pytest.fixture(autouse=True)
def without_curves(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def train(load_script) -> ModuleType:
    return load_script(SCRIPT)


def run(train: ModuleType, *flags: str) -> tuple[Path, str]:
    """The directory of a small run, and its output."""
    output = io.StringIO()
    with redirect_stdout(output):
        train.main([*SMALL, *flags])
    return Path("runs/experiment_multiturn_tool_calling/x"), output.getvalue()


def test_a_run_keeps_complete_conversations(train):
    """All turns are there as text and as ids; the mask, too: golden/test_golden.py."""
    directory, output = run(train, "--prompts-per-step", "4")
    policy = train.load_policy(train.Config(device="cpu", dtype="float32", attn_implementation="sdpa"))
    samples = rows_of(directory, "samples")
    assert {tuple(role for role, _ in row["turns"]) for row in samples} >= {
        ("assistant",),
        ("assistant", "tool", "assistant"),
    }
    for row in samples:
        assert row["text"] == "\n".join(text for role, text in row["turns"] if role == "assistant")
        for role, text in row["turns"]:
            shown = policy.tokenizer.decode(row["ids"][row["prompt_length"] :])
            assert (f"<tool_response>{text}</tool_response>" if role == "tool" else text) in shown
    called = [row for row in samples if row["rewards"]["calls"]]
    metrics = rows_of(directory, "metrics")[1]
    assert metrics["completion/turns"] > 1
    assert metrics["completion/called"] > 0 < metrics["reward/executed_calls"]
    assert any(row["rewards"]["correct"] for row in called)
    printed = output.partition("step 1: ")[2].splitlines()[1:5]
    for line, beginning in zip(printed, (POLICY, TOOL, POLICY, REWARD), strict=True):
        assert line.startswith(f"{beginning} ")


def test_without_the_tool_no_call_is_executed(train):
    directory, _ = run(train, "--no-tool")
    samples = rows_of(directory, "samples")
    tokenizer = train.load_policy(train.Config(device="cpu", dtype="float32", attn_implementation="sdpa")).tokenizer
    assert not any("Tools" in tokenizer.decode(row["ids"][: row["prompt_length"]]) for row in samples)
    metrics = rows_of(directory, "metrics")[1]
    assert metrics["reward/executed_calls"] == 0
    outcomes = ("unknown", "malformed", "unanswered")
    assert sum(metrics[f"completion/{name}_calls"] for name in outcomes) == pytest.approx(metrics["reward/calls"])


def test_in_the_last_turn_calls_are_not_executed_but_have_their_price(train):
    directory, _ = run(train, "--max-turns", "1", "--reward-weight", "calls=-0.25")
    metrics, rows = rows_of(directory, "metrics")[1], rows_of(directory, "samples")
    assert metrics["completion/turns"] == 1
    assert metrics["completion/unanswered_calls"] > 0
    assert metrics["reward/executed_calls"] == 0
    assert all(len(row["turns"]) == 1 for row in rows)
    assert metrics["reward/calls"] > 0
    assert metrics["reward/total"] == pytest.approx(metrics["reward/correct"] - 0.25 * metrics["reward/calls"])
    assert all(row["return"] == row["rewards"]["correct"] - 0.25 * row["rewards"]["calls"] for row in rows)


def test_a_users_tool_is_offered_and_has_a_time_limit(train):
    """The bundled policy knows the name `search`; this tool never answers."""
    Path("my_tools.py").write_text(A_TOOL)
    question = {"question": "Where was Bamor born?", "answer": "1", "kind": "search"}
    Path("rows.jsonl").write_text(f"{json.dumps(question)}\n" * 4)
    Path("held_out.jsonl").write_text(json.dumps(question | {"question": "Where was Tolan born?"}))
    flags = ("--data", "rows.jsonl", "--eval-data", "held_out.jsonl", "--max-turns", "2", "--tool-seconds", "0.05")
    directory, output = run(train, *flags, "--tools", "my_tools.py")
    assert "my_tools.py: the policy may call search\n" in output
    answers = [text for row in rows_of(directory, "samples") for role, text in row["turns"] if role == "tool"]
    assert "error: search gave no answer within 0.05 s" in answers
    assert rows_of(directory, "metrics")[1]["completion/failed_calls"] > 0
    assert json.loads((directory / "config.json").read_text())["sources"]["tools"]["source"].endswith("my_tools.py")
