"""What a judge is shown of a completion: closed, unclosed, repeated, nested and empty thoughts, in three formats."""

import json

import pytest

from harness.data.thoughts import ThoughtFormat, answer_of, read_format

TAGGED = ThoughtFormat(answer_begins="<response>", answer_ends="</response>")

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
