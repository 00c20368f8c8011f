"""The task `typed_answers`, and the published benchmarks that become its rows."""

import csv
import itertools
import json
from pathlib import Path

import pytest
from decisions import decisions, tagged
from run_files import ROOT

from common.errors import UserError
from tasks import typed_answers
from tasks.typed_answers import reward, tally, vote

import harness.base.hub
from harness.base.hub import read_split
from harness.data.benchmarks import SUITES
from harness.data.rows import Row
from harness.evaluation.figures import shares
from harness.task.questions import filter_rows, read_published
from harness.task.row_checks import try_solutions
from harness.task.scorer import Scorer
from harness.task.task_file import TaskError, TaskFile

FILE = TaskFile(typed_answers, "typed_answers")
CHOICES = ["Lyon", "Paris", "A lot", "Lima", "Lima", "A"]
SUITE_NAMES = ("mmlu_redux", "popqa", "zebra_logic")


def row_of(gold: str) -> dict:
    kind = "json" if gold.startswith("{") else "choice" if len(gold) == 1 else "exact"
    return {"question": "", "answer_type": kind, "answer": gold, "choices": CHOICES}


def published(name: str, folder: Path = ROOT / "tests/data") -> list[Row]:
    return read_published(str(folder / f"{name}.jsonl"), FILE, SUITES[name][1][name].read)


def test_the_table_of_decisions_holds():
    table = list(decisions(typed_answers))
    assert len(table) > 60
    assert {row_of(gold)["answer_type"] for gold, _, _ in table} == {"choice", "exact", "json"}
    for gold, answer, column in table:
        assert reward(row_of(gold), tagged(answer))["correct"] == (column == 0), (gold, answer)


@pytest.mark.parametrize(("text", "is_right"), [
    ('```json\n{"H": {"a": "Al"}}\n```', True),
    ('\n```\n{"H": {"a": "Al"}}```\n', True),
    ('```\n```json\n{"H": {"a": "Al"}}\n```\n```', False),
    ('```json\n{"H": {"a": "Al"}}', False),
    ('Here:\n```json\n{"H": {"a": "Al"}}\n```', False),
    ("[" * 100_000, False),
    ('{"a":' * 100_000, False),
    ('{"H": {"a": ' + "9" * 5000 + "}}", False),
    ("", False),
])  # fmt: skip
def test_json_may_be_in_one_fence(text, is_right):
    row = {"answer_type": "json", "answer": '{"H": {"a": "Al"}}'}
    assert reward(row, f"<answer>{text}</answer>")["correct"] == is_right


def test_cells_are_counted_and_no_list_of_guesses_earns_more_than_one():
    gold = {"1": {"a": "x", "b": "y"}, "2": {"a": "y", "b": "x"}}
    row = {"answer_type": "json", "answer": json.dumps(gold)}
    for values in itertools.product("xyz", repeat=4):
        given = {"1": dict(zip("ab", values[:2], strict=True)), "2": dict(zip("ab", values[2:], strict=True))}
        text = f"<answer>{json.dumps(given)}</answer>"
        right = sum(given[house][key] == gold[house][key] for house in gold for key in "ab")
        assert reward(row, text) == {"correct": float(right == 4), "partial": right / 4, "format": 1.0}
        assert (sum(tally(row, text)["cell_acc"]), tally(row, text)["puzzle_acc"]) == (right, [right == 4])
    for cell in (["x", "y"], {"x": 1, "y": 1}, "x y", "x, y"):
        guesses = {house: {"a": cell, "b": cell} for house in gold}
        assert reward(row, f"<answer>{json.dumps(guesses)}</answer>")["partial"] == 0


def test_the_published_figures_are_shares_of_all_rows():
    """Lenient figures accept text that earns nothing; cells of puzzles without an answer are wrong cells."""
    rows = published("popqa")
    texts = ["She was a Programmer.", "<think>Dakar?</think><answer>Thies</answer>", "<answer>austen</answer>"]
    assert [reward(row, text)["correct"] for row, text in zip(rows, texts, strict=True)] == [0, 0, 1]
    found = shares([tally(row, text) for row, text in zip(rows, texts, strict=True)])
    assert found["contained"]["value"] == pytest.approx(2 / 3)
    rows = published("zebra_logic")
    first = json.loads(rows[0]["answer"]) | {"House 2": {"Name": "Tom", "Pet": "fish"}}
    found = shares([tally(rows[0], f"<answer>{json.dumps(first)}</answer>"), tally(rows[1], "no idea")])
    assert (found["puzzle_acc"]["value"], found["cell_acc"]["value"]) == (0, pytest.approx(3 / 10))


def test_equal_answers_are_one_vote():
    row = row_of("B")
    assert {vote(row, tagged(text)) for text in ("B", "(b)", "B. Paris", "Paris")} == {"B"}
    assert [vote(row, text) for text in ("<answer>A or B</answer>", "B")] == [None, None]
    row = row_of('{"H": {"a": "Al", "b": 2}}')
    texts = ('{"H": {"a": "al", "b": 2}}', '{"H": {"b": "2", "a": "Al"}, "more": 1}', '{"H": {"a": "Bo", "b": 2}}')
    first, second, other = (vote(row, f"<answer>{text}</answer>") for text in texts)
    assert first == second != other
    assert vote(row, "<answer>{</answer>") is None
    assert vote(row_of("1846"), "<answer>1,846.</answer>") == "1846"


@pytest.mark.parametrize(("change", "problem"), [
    ({"answer_type": "number"}, "answer_type 'number' is none of choice, exact, json"),
    ({"choices": None}, "answer_type 'choice' needs a list of texts in 'choices'"),
    ({"answer": "H"}, "the answer 'H' is the letter of none of the 6 choices"),
    ({"answer": ["B"]}, r"the answer \['B'\] is the letter of none of the 6 choices"),
    ({"answer_type": "json", "answer": "[1]"}, "answer_type 'json' needs the text of a JSON object in 'answer'"),
])  # fmt: skip
def test_a_row_that_cannot_be_asked_is_named(change, problem):
    row = Row(row_of("B") | change)
    row.place = "rows.jsonl:7"
    with pytest.raises(TaskError, match=rf"messages of rows\.jsonl:7 raised ValueError: {problem}"):
        FILE.question(row)


@pytest.mark.parametrize(("kind", "answer"), [
    *(("choice", answer) for answer in ("E", "b", "", "1")),
    *(("exact", answer) for answer in ("", [], "a\nb", ["2+2 #### 4"], "</answer>")),
    *(("json", answer) for answer in ("{}", '{"H": {"a": null}}', '{"H": ["a"]}')),
])  # fmt: skip
def test_an_answer_that_cannot_be_given_is_refused_before_training(kind, answer):
    row = Row({"question": "", "answer_type": kind, "choices": ["2", "3", "4", "5"], "answer": answer})
    row.place = "rows.jsonl:7"
    with pytest.raises(UserError, match=r"^rows\.jsonl:7: .*no completion can be right"):
        try_solutions(Scorer(FILE), [row])


# Benchmarks -----------------------------------------------------------------------------------------------------------


def test_published_rows_become_rows_of_the_task(capsys):
    mmlu, popqa, zebra = map(published, SUITE_NAMES)
    assert [row["answer"] for row in mmlu] == ["B", "C"]  # those with an error are left out
    told = capsys.readouterr().out
    assert "mmlu_redux.jsonl: 2 of 4 rows are left out: faulty or hidden answers" in told
    assert "zebra_logic.jsonl: 1 of 3 rows are left out: faulty or hidden answers" in told
    assert "popqa.jsonl" not in told
    assert mmlu[1].question.splitlines()[2:] == [
        *("A. 0 °C.", "B. 50 °C.", "C. 100 °C.", "D. 200 °C.", "", "Answer with the letter of one choice."),
    ]
    assert popqa[1]["answer"] == ["Dakar", "City of Dakar"]
    assert popqa[1].question == "What is the capital of Senegal?\n\nAnswer with a name, a number or a few words."
    assert json.loads(zebra[0]["answer"])["House 2"] == {"Name": "Tom", "Pet": "cat"}
    form = '{"House 1": {"Name": "___", "Pet": "___"}, "House 2": {"Name": "___", "Pet": "___"}}'
    assert zebra[0].question.endswith(f"2. Mia has the dog.\n\n\nAnswer with a JSON object of this form:\n{form}")
    assert "{}" not in "".join(row.question for row in (*mmlu, *popqa, *zebra))
    try_solutions(Scorer(FILE), [*mmlu, *popqa, *zebra])


def test_a_table_of_popqa_is_read(tmp_path):
    """The published file is one: every value is text."""
    rows = [json.loads(line) for line in (ROOT / "tests/data/popqa.jsonl").read_text().splitlines()]
    with (tmp_path / "test.tsv").open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0], delimiter="\t")
        table.writeheader()
        table.writerows(rows)
    found = read_published(str(tmp_path / "test.tsv"), FILE, SUITES["popqa"][1]["popqa"].read)
    assert [row["answer"] for row in found] == [json.loads(row["possible_answers"]) for row in rows]
    few = filter_rows(found, "test.tsv", FILE, ("s_pop=55000",), None)
    assert [row["subj"] for row in few] == ["Ada Lovelace", "Emma"]


@pytest.mark.parametrize("name", SUITE_NAMES)
def test_a_row_of_another_form_is_named(name, tmp_path):
    (tmp_path / f"{name}.jsonl").write_text('{"question": "1+1?", "answer": "two"}\n')
    with pytest.raises(UserError, match=r"\.jsonl:1: not a row as it is published \((Key|Value)Error: "):
        published(name, tmp_path)


@pytest.mark.slow  # it imports datasets
def test_the_subsets_of_a_dataset_are_joined(tmp_path, monkeypatch):
    """A local copy in the hub's layout, read by `datasets`; the hub is not asked whether it has the dataset."""
    folder = tmp_path / "owner" / "name"
    lines = (ROOT / "tests/data/mmlu_redux.jsonl").read_text().splitlines(keepends=True)
    configs = []
    for subset, part in (("anatomy", lines[:1]), ("astronomy", lines[1:])):
        (folder / subset).mkdir(parents=True)
        (folder / subset / "test.jsonl").write_text("".join(part))
        configs += [f"- config_name: {subset}\n  data_files:\n  - split: test\n    path: {subset}/test.jsonl\n"]
    (folder / "README.md").write_text(f"---\nconfigs:\n{''.join(configs)}---\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(harness.base.hub, "must_be_cached", lambda *_: True)
    rows = read_split("owner/name:*:test")
    assert [row["subset"] for row in rows] == ["anatomy", "astronomy", "astronomy", "astronomy"]
    assert [row["question"] for row in rows] == [json.loads(line)["question"] for line in lines]
    with pytest.raises(UserError, match=r"the dataset owner/name:anatomy has no split 'train' \(there are: test\)"):
        read_split("owner/name:*")
    with pytest.raises(UserError, match=r"^the subsets of owner/other could not be listed: "):
        read_split("owner/other:*:test")
