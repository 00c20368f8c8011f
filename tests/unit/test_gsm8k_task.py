"""The GSM8K task: reading the right number, all published golds, components, and rows given to other tasks."""

import json
import math
import re
from fractions import Fraction
from pathlib import Path

import pytest
from decisions import decisions, tagged

from common.errors import UserError
from tasks import gsm8k

from harness.data.data import read_rows
from harness.data.rows import Row
from harness.task.row_checks import try_solutions
from harness.task.scorer import Scorer
from harness.task.task_file import TaskFile

PUBLISHED = Path(__file__).resolve().parents[2].parent / "shared/data/gsm8k"  # beside the repository
RAW = "She sold 48+24 = <<48+24=72>>72 clips.\n#### 72"
ROW = {"question": "How many clips?", "answer": RAW}


def test_the_table_of_decisions_holds():
    table = list(decisions(gsm8k))
    assert len(table) > 80
    for gold, answer, column in table:
        for row in ({"answer": gold}, {"answer": f"It is <<9*2=18>>18.\n#### {gold}"}):
            assert gsm8k.reward(row, tagged(answer))["correct"] == (column == 0), (gold, answer)


def test_what_the_prompt_asks_for_is_what_the_rewards_pay_for(load_script):
    """The prompt, the four rewards that read tags, and the worked examples of the notebook agree on the tags."""
    assert re.findall("<[^>]+>", gsm8k.SYSTEM_PROMPT) == list(gsm8k.TAGS)
    begin, end, answer, close = gsm8k.TAGS
    paid = gsm8k.reward(ROW, f"{begin}48 + 24 = 72{end}{answer}72{close}")
    assert [paid[name] for name in ("correct", "strict_format", "soft_format", "integer_answer")] == [1, 1, 1, 1]
    examples = load_script("docs/notebooks/gsm8k_by_example.py").EXAMPLES
    for text in examples.values():
        assert gsm8k.reward(ROW, text)["strict_format"] == 1
    for tag in gsm8k.TAGS:  # each is needed
        assert gsm8k.reward(ROW, f"{begin}9{end}{answer}72{close}".replace(tag, ""))["strict_format"] == 0


# Golds --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "num_rows", "num_unread"), [("test", 1319, 14), ("train", 7473, 79)])
def test_every_published_gold_is_read(name, num_rows, num_unread):
    """Notebooks that call int() on the text lose the golds with a comma."""
    path = PUBLISHED / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    texts = [row["answer"].split("####")[1].strip() for row in rows]
    assert (len(rows), sum("," in text for text in texts)) == (num_rows, num_unread)
    for row, text in zip(rows, texts, strict=True):
        assert gsm8k.gold(row) == int(text.replace(",", ""))
        rewards = gsm8k.reward(row, gsm8k.solution(row))
        assert rewards["correct"] == rewards["integer_answer"] == 1
        assert gsm8k.reward(row, f"<answer>{gsm8k.gold(row) + 1}</answer>")["correct"] == 0


@pytest.mark.parametrize("name", ["test", "train"])
def test_published_solutions_are_learned_in_the_form_that_is_rewarded(name):
    """Their steps without the marks of a calculator, which is not there."""
    path = PUBLISHED / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    for row in read_rows(str(path), {"messages": list}):
        user, assistant = row["messages"]
        assert user == {"role": "user", "content": row["question"]}
        rewards, text = gsm8k.reward(row, assistant["content"]), assistant["content"]
        assert rewards["correct"] == rewards["strict_format"] == 1
        assert not any(mark in text for mark in ("<<", ">>", "####"))
        steps = row["answer"].partition("####")[0].strip()
        assert text.partition("\n</think>")[0].split("\n")[1:] == [bare(line) for line in steps.split("\n")]


def bare(line: str) -> str:
    """A line without the marks, by a loop."""
    while "<<" in line:
        before, _, rest = line.partition("<<")
        line = before + rest.partition(">>")[2]
    return line


def test_rows_without_steps_are_no_conversations(tmp_path):
    path = tmp_path / "rows.jsonl"
    for answer in ("72", "#### 72", "48+24 = 72\n#### ", 72, None):
        path.write_text(json.dumps({"question": "How many clips?", "answer": answer}))
        with pytest.raises(UserError, match="the field 'messages' is missing"):
            read_rows(str(path), {"messages": list})


def test_the_easy_questions_follow_their_rule_and_are_answerable(load_script):
    easy_rows = load_script("imitation/tiny_policy/make_gsm8k_easy.py").easy_rows
    data = Path(__file__).resolve().parents[2] / "data"
    parts = [(data / f"{name}.jsonl").read_text("utf-8").splitlines() for name in ("gsm8k_easy", "gsm8k_easy_heldout")]
    lines = [line for part in parts for line in part]
    assert len(set(lines)) == len(lines) == 301
    assert easy_rows(lines) == lines
    assert all(gsm8k.reward(row, gsm8k.solution(row))["correct"] for row in map(json.loads, lines))
    path = PUBLISHED / "train.jsonl"
    assert not path.exists() or easy_rows(path.read_text("utf-8").splitlines()) == lines


def test_golds_are_text_or_numbers():
    whole = [(72, 72), (-3, -3), (72.0, 72), ("#### 7\n#### -8 ", -8), ("####72", 72)]  # the last #### counts
    for answer, number in [*whole, (0.1, Fraction(1, 10)), (1e-7, Fraction(1, 10**7)), ("$1,080.50", 1080.5)]:
        row = {"question": "", "answer": answer}
        assert gsm8k.gold(row) == number
        assert gsm8k.reward(row, gsm8k.solution(row))["correct"] == 1


NO_NUMBERS = ["", "blue", "#### 18 or 20", "72 ####", RAW + "\nSo 72.", "9" * 101, 1e300, math.nan]


@pytest.mark.parametrize("answer", NO_NUMBERS, ids=lambda answer: ascii(answer)[:20])
def test_a_row_whose_gold_is_no_number_is_refused(answer):
    row = Row({"question": "", "answer": answer})
    row.place = "rows.jsonl:7"
    with pytest.raises(UserError, match=r"^rows\.jsonl:7: .*no completion can be right"):
        try_solutions(Scorer(TaskFile(gsm8k, "gsm8k")), [row])
    for text in ("", "<answer></answer>", "<answer>72</answer>", "<answer>nan</answer>", f"<answer>{answer}</answer>"):
        assert gsm8k.reward(row, text)["correct"] == 0


# Numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", ["7", "1,", "1,234", " ", "$", "7/", "a", " a", "a7", "\n", "<", *gsm8k.TAGS])
def test_long_texts_are_rewarded(piece):
    text = piece * 300_000
    for completion in (text, f"<think>{text}</think><answer>{text}</answer>"):
        assert gsm8k.reward(ROW, completion)["correct"] == 0
        assert gsm8k.describe(ROW, completion)["unread"] in (0, 1)


# Components ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "strict", "soft", "integer"), [
    ("<think>48+24=72</think><answer>72</answer>", 1, 1, 1),
    ("\n<think>\n48+24=72\n</think>\n\n<answer>\n72\n</answer>\n", 1, 1, 1),
    ("<think>1 < 2</think><answer>72</answer>", 1, 1, 1),
    ("<think>48+24=72</think><answer>blue</answer>", 1, 1, 0), ("<think>x</think><answer>72.5</answer>", 1, 1, 0),
    ("<think>x</think><answer>$72.00</answer>", 1, 1, 1), ("<think>x</think><answer>73 clips</answer>", 1, 1, 1),
    ("<think> </think><answer>72</answer>", 0, 1, 1), ("<answer>72</answer>", 0, 0.5, 1),
    ("So <think>x</think><answer>72</answer>", 0, 1, 1), ("<think>x</think><answer>72</answer>!", 0, 1, 1),
    ("<think>x</think><answer><b>72</b></answer>", 0, 1, 0), ("<answer>72</answer><think>x</think>", 0, 1, 1),
    ("</answer></think><answer><think>", 0, 1, 0), ("<think><think>x</think><answer>72</answer>", 0, 0.75, 1),
    ("<think>x</think><answer>72</answer><answer>72</answer>", 0, 0.5, 0),
    ("<think><answer>72</answer></think>", 0, 1, 0), ("<think>x", 0, 0.25, 0),
    ("<THINK>x</THINK><ANSWER>72</ANSWER>", 0, 0, 0), ("", 0, 0, 0),
])  # fmt: skip
def test_components_are_what_their_definition_says(text, strict, soft, integer):
    rewards = gsm8k.reward(ROW, text)
    assert (rewards["strict_format"], rewards["soft_format"], rewards["integer_answer"]) == (strict, soft, integer)
    assert rewards["length"] == 1 - len(text) / 2000
    assert gsm8k.reward(ROW, "x" * 4000)["length"] == 0


@pytest.mark.parametrize(("text", "names"), [
    ("<answer>72</answer>", set()), ("<think>72</think><answer>73</answer>", set()),
    ("<answer>73</answer>, or 72", {"right_elsewhere"}),
    ("<answer>It is 72</answer>", {"unread", "right_elsewhere"}), ("<answer></answer>", {"unread"}),
    ("\\boxed{72}", {"boxed", "right_elsewhere"}),
    ("<answer>\\boxed{72}</answer>", {"unread", "right_elsewhere"}), ("#### 72", {"hashes", "right_elsewhere"}),
    ("The answer is $72.00.", {"sentence", "right_elsewhere"}),
    ("The answer is \\boxed{72}.", {"boxed", "right_elsewhere"}), ("<think>It is 100-72", {"right_elsewhere"}),
    ("72, then 73", set()), ("", set()),
])  # fmt: skip
def test_a_description_says_which_form_was_used(text, names):
    description = gsm8k.describe(ROW, text)
    assert {name for name, value in description.items() if value} == names
    assert list(description) == ["unread", "boxed", "hashes", "sentence", "right_elsewhere"]


# Files --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "strict", "flexible"), [
    ("9 * 2 = 18\n#### 18", 1, 1), ("#### 17 No: #### 18", 1, 1), ("The answer is 18", 0, 1),
    ("The answer is 18.", 0, 0),  # "18." is no "18"
    ("#### 18, because 9 * 2 is", 1, 0),  # removes the comma; the last number is another one
    ("####18", 0, 1), ("#### $18", 0, 1), ("", 0, 0),
    ("#### 18" + " " * 300, 0, 0),  # only the end is read
])  # fmt: skip
def test_the_verifiers_of_verl(text, strict, flexible):
    rewards = gsm8k.reward({"question": "?", "answer": "9 * 2 = <<9*2=18>>18\n#### 18"}, text)
    assert (rewards["strict"], rewards["flexible"]) == (strict, flexible)
    thousands = {"question": "?", "answer": "#### 1,080"}
    assert [gsm8k.reward(thousands, f"#### {n}")["strict"] for n in ("1,080", "1080", "108")] == [1, 1, 0]
    assert [gsm8k.reward(thousands, n)["flexible"] for n in ("1,080", "1080")] == [0, 1]
