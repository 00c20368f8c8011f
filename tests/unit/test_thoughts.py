"""What a judge is shown of a completion: closed, unclosed, repeated, nested and empty thoughts, in three formats."""

import json
from pathlib import Path

import pytest

from common.errors import UserError
from common.given_answers import encode_chat
from common.trajectory import Trajectory

from harness.base.config import RunConfig
from harness.cli.parse import with_absolute_paths
from harness.data.thoughts import LONGCOT, ThoughtFormat, answer_of, check_is_shown, read_format, write_longcot

TAGGED = ThoughtFormat(answer_begins="<response>", answer_ends="</response>")
RESPONSE = ThoughtFormat("<think>", "<response>", answer_ends="</response>")  # as longcot_config.json writes it

CASES = [  # the text; the answer, and the answer when only the strict form is accepted
    ("<think>a</think>b", "b", "b"),
    ("a</think>b", "b", "b"),  # the template has opened the thought
    (" <think>a</think>\n b \n", "b", "b"),
    ("<think></think>b", "b", "b"),
    ("<think>a", None, None),
    ("<think>a</think>", None, None),
    ("<think>a</think> \n", None, None),
    ("", None, None),
    ("b", "b", None),  # no thought
    ("<think>a</think>b<think>c</think>d", "d", None),
    ("<think>a</think>b<think>c", "b", None),
    ("<think>a<think>b</think>c</think>d", "d", None),
    ("x<think>a</think>b", "b", None),
    ("b<think>a", "b", None),
]
TAGGED_CASES = [
    ("<think>a</think><response>b</response>", "b", "b"),
    ("a</think> <response> b </response>\n", "b", "b"),
    ("<think></think><response>b</response>", "b", "b"),
    ("<think>a</think><response></response>", None, None),
    ("<think>a</think><response> ", None, None),
    ("<think>a<response>b</response>", None, None),
    ("<response>b</response>", "b", None),
    ("<think>a</think>b", "b", None),
    ("<think>a</think><response>b", "b", None),
    ("<think>a</think><response>b</response>c", "b", None),
    ("<think>a</think>x<response>b</response>", "b", None),
    ("<think>a<response>x</response></think><response>b</response>", "b", None),
    ("<think>a</think><response>b</response><response>c</response>", "b", None),
    ("<think>a</think><think>c</think><response>b</response>", "b", None),
]


@pytest.mark.parametrize(
    ("tags", "text", "answer", "strictly"),
    [(ThoughtFormat(), *case) for case in CASES] + [(TAGGED, *case) for case in TAGGED_CASES],
)
def test_the_answer_of_a_completion(tags, text, answer, strictly):
    assert answer_of(text, tags) == answer
    assert answer_of(text, tags, strict=True) == strictly


def test_formats_are_read_from_a_tag_or_a_file(tmp_path):
    assert read_format("</reasoning>") == ThoughtFormat("<reasoning>", "</reasoning>")
    path = tmp_path / "tags.json"
    path.write_text(json.dumps(TAGGED._asdict()))
    assert read_format(str(path)) == TAGGED


def write_config(folder: Path, **values: object) -> Path:
    (folder / LONGCOT).write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("values", "tags", "text"),
    [
        (
            {"longcot_delimiter": "</think>", "end_delimiter": None, "start_think_marker": "<think>\n"},
            ThoughtFormat("<think>", "</think>"),
            "<think>a</think>b",
        ),
        (
            {
                "longcot_delimiter": "<|reserved_special_token_0|>",
                "end_delimiter": "<|end|>",
                "prompt_for_longcot": "x",
            },
            ThoughtFormat("", "<|reserved_special_token_0|>", answer_ends="<|end|>"),
            "a<|reserved_special_token_0|> b <|end|>",
        ),
        (
            {"longcot_delimiter": "<response>", "end_delimiter": "</response>"},
            ThoughtFormat("", "<response>", answer_ends="</response>"),
            "a<response>b",  # its end may be what stopped the sampling
        ),
        (
            {"longcot_delimiter": "<response>", "end_delimiter": None, "start_think_marker": "<think>"},
            ThoughtFormat("<think>", "<response>", answer_ends="</response>"),
            "<think> a </think> <response> b </response>",
        ),
    ],
    ids=["think", "reserved", "response", "prompted"],
)
def test_the_tags_of_a_model_with_long_thoughts(tmp_path, values, tags, text):
    write_config(tmp_path, longcot=True, **values)
    assert read_format(str(tmp_path)) == read_format(str(tmp_path / LONGCOT)) == tags
    assert answer_of(text, tags) == answer_of(text, tags, strict=True) == "b"


def test_what_follows_the_end_of_an_answer_is_no_answer():
    tags = ThoughtFormat("", "<response>", answer_ends="</response>")
    assert answer_of("a<response>b</response>c", tags) == "b"
    assert answer_of("a<response>b</response>c", tags, strict=True) is None
    assert answer_of("a<response></response>c", tags) is None


def test_a_model_without_thoughts(tmp_path):
    tags = read_format(str(write_config(tmp_path, longcot=False, longcot_delimiter="</think>")))
    assert tags is None
    assert answer_of("<think>a</think> b ", tags) == "<think>a</think> b"
    assert answer_of(" ", tags) is None


def test_a_directory_without_the_file_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"longcot_config\.json must be .* No such file"):
        read_format(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no such directory"):
        read_format("runs/final")


def test_a_run_keeps_the_absolute_path(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    kept = [with_absolute_paths(RunConfig(answer_begins=given)).answer_begins for given in ("model", "</think>")]
    assert kept == [str(tmp_path / "model"), "</think>"]


def test_a_delimiter_that_completions_do_not_show_is_refused(tmp_path, tokenizer):
    check_is_shown(tokenizer, None)
    check_is_shown(tokenizer, "</think>")  # a token of its own, but shown
    check_is_shown(tokenizer, str(write_config(tmp_path, longcot=False)))
    write_config(tmp_path, longcot=True, longcot_delimiter="\n<|im_end|>\n")
    with pytest.raises(UserError, match="is a special token of the model"):
        check_is_shown(tokenizer, str(tmp_path))


def learned(tokenizer, *answers: str) -> list[Trajectory]:
    end, rows = tokenizer.convert_tokens_to_ids("<|im_end|>"), []
    for answer in answers:
        messages = [{"role": "user", "content": "Say 1"}, {"role": "assistant", "content": answer}]
        ids, mask = encode_chat(tokenizer, messages, [end])
        rows.append(Trajectory(ids, mask.index(1), mask, [0.0] * len(ids)))
    return rows


@pytest.mark.parametrize(
    ("answers", "tags"),
    [
        (["<think>a</think>b", "<think>a</think>b", "b"], ThoughtFormat()),
        (["<think>a</think>b", "b"], None),  # half of them are not most
        (["<reasoning>a</reasoning>b"], ThoughtFormat("<reasoning>", "</reasoning>")),
        (["a</think>b"], ThoughtFormat("", "</think>")),  # the template has opened the thought
        (["<think>\n</think>b", "</think>b"], None),
        (["<mine>a</mine>b"], None),
        (["<think> a </think>\n<response> b </response>"] * 2 + ["<think>a</think>b"], RESPONSE),
        (["<think>a</think><response>b</response>", "<think>a</think>b"], ThoughtFormat()),
        (["a</think><response>b</response>"], RESPONSE._replace(thought_begins="")),
        (["<think></think><response>b</response>"], None),
        (["<response> b </response>"], None),
    ],
)
def test_what_sft_writes_is_read_again(tmp_path, tokenizer, answers, tags):
    (tmp_path / "final").mkdir()
    write_longcot(tokenizer, learned(tokenizer, *answers), tmp_path)
    assert not (tmp_path / "final_merged").exists()
    if tags is None:
        assert not (tmp_path / "final" / LONGCOT).exists()
    else:
        assert read_format(str(tmp_path / "final")) == tags
