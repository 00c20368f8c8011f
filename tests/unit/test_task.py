"""Tasks: a mistake in a user's file is reported in one sentence that names file, row and component."""

import contextlib
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.errors import UserError

from harness.base.config import RunConfig
from harness.task import row_checks
from harness.task import task_file as task_module
from harness.task.task import Task, load_scorer, load_task
from harness.task.task_file import _import_once

ROOT = Path(__file__).resolve().parents[2]
GOOD = """
REWARD_WEIGHTS = {"correct": 1.0, "short": 0.5}
def messages(row, system_prompt):
    return [{"role": "user", "content": row["question"]}]
def reward(row, text):
    return {"correct": 1.0, "short": 0.0}
"""


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    prompts_per_step: int = 1


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load a task from the text of its file, with five rows of data."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(5)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load(text: str, **settings) -> Task:
        Path("my_task.py").write_text(text)
        _import_once.cache_clear()  # two versions can be written within one tick of the clock
        defaults = {"task": "my_task.py", "data": "rows.jsonl", "eval_data": "rows.jsonl", "eval_prompts": 2}
        return load_task(Config(**(defaults | settings)))

    return load


def with_reward(body: str) -> str:
    return GOOD.replace('return {"correct": 1.0, "short": 0.0}', body)


def test_held_out_questions_that_are_trained_on_are_counted(load, capsys):
    Path("others.jsonl").write_text('{"question": "What is 2+2?", "answer": "4"}\n{"question": "?", "answer": "4"}\n')
    load(GOOD, eval_data="others.jsonl")
    assert "1 of the 2 held-out questions are training questions as well" in capsys.readouterr().out


def test_a_good_file_is_a_task(load):
    task = load(GOOD)
    assert task.scorer.weights == {"correct": 1.0, "short": 0.5}
    assert task.total_reward(task.reward(task.train_rows[0], "x")) == 1.0
    assert task.describe(task.train_rows[0], "x") == {}
    assert task.feedback(task.train_rows[0], "x") == ""
    assert (len(task.train_rows), len(task.eval_rows)) == (5, 2)
    assert task.file.question(task.train_rows[3]) == "What is 3+3?"


@pytest.mark.parametrize(
    ("solution", "shown"),
    [
        ("", "6"),
        ("def solution(row): return f'<answer>{row[\"answer\"]}.0</answer>'", "6.0"),
        ("def solution(row): return 'six'", "six"),
        ("def solution(row): return 'six'\ndef vote(row, text): return text.upper()", "SIX"),
        ("def solution(row): return None", "6"),
    ],
)
def test_the_right_answer_is_that_of_the_solution(load, solution, shown):
    assert (task := load(GOOD + solution)).file.right_answer(task.train_rows[3]) == shown


def test_a_file_can_use_dataclasses_and_is_never_stale(load, tmp_path):
    text = "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 1\n" + GOOD
    assert load(text).scorer.weights["short"] == 0.5
    assert load(text.replace("0.5", "0.7")).scorer.weights["short"] == 0.7  # of equal size, within the same second
    assert not list(tmp_path.glob("__pycache__"))


def test_weights_can_be_changed(load):
    task = load(GOOD, reward_weight=("short=-0.25", "correct=2"))
    assert task.scorer.weights == {"correct": 2.0, "short": -0.25}
    assert task.total_reward({"correct": 1.0, "short": 1.0}) == 1.75


FILE = r"^--task my_task\.py"


def test_a_reward_that_fails_later_names_its_row(load):
    task = load(with_reward('return {"correct": 1 / (len(text) - 3), "short": 0}'))
    assert task.reward(task.train_rows[2], "12345")["correct"] == 0.5
    with pytest.raises(UserError, match=rf"{FILE}: reward of rows\.jsonl:3 raised ZeroDivisionError"):
        task.reward(task.train_rows[2], "123")


def test_feedback_is_a_text(load):
    task = load(GOOD + "def feedback(row, text): return f'{text} is wrong' if row['answer'] != text else None")
    assert task.feedback(task.train_rows[2], "5") == "5 is wrong"
    with pytest.raises(UserError, match=rf"{FILE}: feedback of rows\.jsonl:3 must return a str, not None"):
        task.feedback(task.train_rows[2], task.train_rows[2]["answer"])


def test_a_reward_that_is_nan_is_reported_once_with_its_row(load, capsys):
    """A description that is NaN, or the trial at the start, does not cause a report."""
    text = with_reward('return {"correct": 1, "short": float("nan")}')
    task = load(text + "def describe(row, text): return {'x': float('nan')}")
    capsys.readouterr()
    task.describe(task.train_rows[0], "x")
    assert capsys.readouterr().err == ""
    for row in (task.train_rows[3], task.train_rows[4]):
        assert math.isnan(task.reward(row, "x")["short"])
    sentence = "--task my_task.py: reward of rows.jsonl:4 gives 'short' the value nan; an update with it is skipped\n"
    assert capsys.readouterr().err == sentence


def test_a_component_that_is_only_logged_never_stops_training(load):
    task = load(GOOD.replace("0.5", "0"))
    assert task.total_reward({"correct": 1.0, "short": math.nan}) == 1.0


@pytest.mark.parametrize(("kind", "value", "is_fine"), [
    ("bool", True, True), ("int", True, False), ("float", 1, True), ("int", 1.5, False), ("(str, list)", [1], True),
])  # fmt: skip
def test_types_of_fields_are_those_of_json(load, kind, value, is_fine):
    Path("typed.jsonl").write_text(json.dumps({"question": "a", "x": value}) + "\n")
    refused = pytest.raises(UserError, match=r"^typed\.jsonl:1: the field 'x' cannot be")
    with contextlib.nullcontext() if is_fine else refused:
        load(GOOD + f"FIELDS = {{'x': {kind}}}", data="typed.jsonl", eval_data="typed.jsonl")


def test_rows_may_have_lists_in_kind_fields(load):
    task = load(GOOD + "KIND_FIELDS = ('num_terms',)")
    assert len({task.file.kind({"num_terms": terms}) for terms in ([1], [2], [1])}) == 2


SOLVED = with_reward(
    """return {"correct": float(text == f"<{int(row['answer'])}>") if row["answer"].isdigit() else 0.0, "short": 1.0}
def solution(row):
    return f"<{row['answer']}>"
"""
)
GSM8K = "She has 3 * 7 = <<3*7=21>>21 eggs.\\n#### 21"
UNSOLVED = {
    "": None,
    '{"question": "x", "answer": "'
    + GSM8K
    + '"}': r"^bad\.jsonl:2: no completion can be right, .*She has .* correct = 0",
    '{"question": "x", "answer": "\\u001b[31m7"}': r"^bad\.jsonl:2: .*'<\\x1b\[31m7>' earns correct = 0: bring the row",
    '{"question": "x", "answer": "' + "7 " * 5000 + '"}': r"^bad\.jsonl:2: no .*7 \.\.\. earns correct = 0",
}


@pytest.mark.parametrize("line", UNSOLVED, ids=range(len(UNSOLVED)))
@pytest.mark.parametrize("name", ["data", "eval_data"])
def test_a_gold_that_no_completion_could_earn_is_refused(load, name, line):
    """By file and line, before training, in training and evaluation rows alike."""
    good = '{"question": "x", "answer": "7"}\n'
    Path("bad.jsonl").write_text(good + line + "\n" + good)
    if UNSOLVED[line] is None:
        assert load(SOLVED, **{name: "bad.jsonl"}).train_rows
        return
    with pytest.raises(UserError, match=UNSOLVED[line]) as caught:
        load(SOLVED, **{name: "bad.jsonl"})
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()
    assert load(SOLVED.replace("def solution", "def unused"), **{name: "bad.jsonl"}).train_rows


def test_rows_that_are_filtered_out_need_no_solution(load):
    rows = [{"question": "x", "answer": "7", "size": 1}, {"question": "x", "answer": "seven", "size": 2}]
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = {"data": "d.jsonl", "eval_data": "d.jsonl"}
    assert len(load(SOLVED, **both, at_most=("size=1",)).train_rows) == 1
    with pytest.raises(UserError, match=r"^d\.jsonl:2: no completion can be right"):
        load(SOLVED, **both)


def test_without_correct_a_solution_earns_more_than_nothing(load):
    text = SOLVED.replace('"correct"', '"close"').replace('"short": 1.0', '"short": 0.0')
    assert load(text).train_rows
    with pytest.raises(UserError, match=r"^rows\.jsonl:1: .*'no' earns a total reward of 0"):
        load(text.replace("return f", 'return "no" or f'))


def test_solutions_are_tried_for_so_long_and_no_longer(load, monkeypatch, capsys):
    """The user is told how many rows fitted into the time."""
    monkeypatch.setattr(row_checks, "PATIENCE", -1)
    load(SOLVED)
    assert "the solutions of 0 of 7 rows were tried in -1 s" in capsys.readouterr().out


def test_numbers_of_other_libraries_are_numbers(load):
    task = load(
        "import torch, numpy\n" + with_reward('return {"correct": torch.tensor(1.), "short": numpy.float32(0.5)}')
    )
    assert task.reward(task.train_rows[0], "x") == {"correct": 1.0, "short": 0.5}


def test_a_slow_reward_is_reported_while_it_runs(load, monkeypatch, capsys):
    monkeypatch.setattr(task_module, "PATIENCE", 0.05)
    task = load("import time\n" + with_reward('time.sleep(0.3 if text else 0)\n    return {"correct": 1, "short": 0}'))
    assert capsys.readouterr().err == ""
    assert task.reward(task.train_rows[1], "x")["correct"] == 1
    assert capsys.readouterr().err.count("reward of rows.jsonl:2 has been running for 0.05 s") == 1
    task.reward(task.train_rows[1], "")
    time.sleep(0.2)
    assert capsys.readouterr().err == ""  # nothing about calls that have ended


def test_the_task_template_is_short_and_valid():
    path = ROOT / "docs" / "task_template.py"
    assert len(path.read_text().splitlines()) <= 36
    task = load_scorer(RunConfig(task=str(path)))
    row = {"question": "What is 1+1?", "answer": "2"}
    assert task.reward(row, task.file.solution(row)) == {"correct": 1.0, "short": 1.0}
    assert task.reward(row, "") == {"correct": 0.0, "short": 1.0}
    assert task.reward(row, "<think>" + "1+1=2 " * 20 + "</think><answer>3</answer>") == {"correct": 0.0, "short": 0.0}
