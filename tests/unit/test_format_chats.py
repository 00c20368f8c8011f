"""One file with thoughts in four forms, byte for byte, and which rows are left out."""

import json
from pathlib import Path

import pytest
from run_files import ROOT, read_lines, write_rows

from common.errors import UserError

from harness.data.thoughts import answer_of, read_format

USER = {"role": "user", "content": "What is 2+2?"}
BYTES = {
    "think": "<think>\n2+2=4\n</think>\n\nIt is 4.",
    "think-response": "<think> 2+2=4 </think>\n<response> It is 4. </response>",
    "answer": "It is 4.",
    "response": "<response> It is 4. </response>",
}
each_form = pytest.mark.parametrize("form", BYTES)


@pytest.fixture
def form_of(load_script, tmp_path, monkeypatch):
    """Run the program: form_of(rows, form) returns the rows it writes."""
    monkeypatch.chdir(tmp_path)

    def run(rows: list[dict], form: str) -> list[dict]:
        write_rows("thoughts.jsonl", rows)
        load_script("imitation/sft/format_chats.py").main(
            ["--data", "thoughts.jsonl", "--form", form, "--output", "out/chats.jsonl"]
        )
        return read_lines(Path("out/chats.jsonl"))

    return run


def said(content: str, **more: object) -> dict:
    return {"messages": [USER, {"role": "assistant", "content": content} | more]}


@each_form
@pytest.mark.parametrize("row", [
    said("It is 4.", reasoning_content="2+2=4"),
    said("It is 4.", thinking="2+2=4\n", reasoning_content="2+2=4"),
    said("<think>2+2=4</think>It is 4."),
    said("2+2=4\n</think>\nIt is 4.\n"),  # the template has opened the thought
    said("<reasoning>\n2+2=4\n</reasoning>\nIt is 4."),
    {"instruction": "What is 2+2?", "output": "<think>2+2=4</think> <response>It is 4.</response>"},
    *map(said, (BYTES["think"], BYTES["think-response"])),
], ids=["beside", "two names", "inside", "opened", "reasoning", "alpaca", "think", "think-response"])  # fmt: skip
def test_the_bytes_of_every_form(form_of, row, form):
    assert form_of([row], form) == [said(BYTES[form])]


@each_form
def test_the_readme_shows_these_bytes(form):
    page = (ROOT / "imitation" / "sft" / "README.md").read_text("utf-8")
    assert f"\n| `{form}` | `{json.dumps(BYTES[form])[1:-1]}` |" in page


@each_form
def test_all_forms_have_the_rows_with_one_thought_for_each_answer(form_of, form, capsys):
    good = said("It is 4.", thinking="2+2=4")
    rows = [
        good, said("It is 4."), said("It is 4.", thinking=" "), said("<think>2+2=4"), said("<think></think>It is 4."),
        said("<think>a</think>b<think>c</think>d"), said("<think>a</think>b", thinking="c"),
        said("<think>a</think>b</response>c"), said("<think>2+2=4</think>"), {"messages": [USER]},
    ]  # fmt: skip
    assert form_of([*rows, good], form) == [said(BYTES[form])] * 2
    reasons = "no thought 4, several thoughts or stray tags 3, no answer 2"
    assert capsys.readouterr().out == f"out/chats.jsonl: 2 of 11 rows; left out: {reasons}\n"


def test_several_turns_keep_their_weights_and_tools(form_of):
    thought = {"role": "assistant", "content": "<think>2+2=4</think>It is 4."}
    read = {"role": "assistant", "content": "It is 4.", "weight": 0}
    kept, formatted = {"messages": [USER, read, USER, thought]}, thought | {"content": BYTES["think"]}
    rows = [kept | {"tools": [{"name": "f"}]}, {"messages": [USER, thought | {"weight": 0}, USER, thought]}]
    rows += [{"messages": [USER, thought, USER, read | {"weight": 1}]}, {"messages": [USER, thought, USER, read]}]
    assert form_of(rows, "think") == [
        {"messages": [USER, read, USER, formatted], "tools": [{"name": "f"}]},
        {"messages": [USER, formatted | {"weight": 0}, USER, formatted]},
    ]


def test_nothing_is_written_over_the_thoughts(form_of, load_script):
    with pytest.raises(UserError, match=r"no row is left to write; left out: no thought 1$"):
        form_of([said("It is 4.")], "think")
    assert not Path("out").exists()
    form_of([said(BYTES["think"])], "answer")
    Path("link.jsonl").symlink_to("thoughts.jsonl")
    with pytest.raises(UserError, match="is --data, whose thoughts would be lost"):
        load_script("imitation/sft/format_chats.py").main(["--data", "thoughts.jsonl", "--output", "link.jsonl"])
    assert read_lines(Path("thoughts.jsonl")) == [said(BYTES["think"])]


def test_the_tags_of_the_readme_hide_the_form_response_from_a_judge(tmp_path):
    page = (ROOT / "imitation" / "sft" / "README.md").read_text("utf-8")
    (tags,) = [line for line in page.split("`") if line.startswith('{"answer_begins"')]
    (tmp_path / "tags.json").write_text(tags)
    assert answer_of(BYTES["response"], read_format(str(tmp_path / "tags.json"))) == "It is 4."
