"""Rows: errors name file and line, filters and splits lose nothing silently, the order is keyed."""

import json
from dataclasses import dataclass

import pytest

from common.errors import UserError
from common.tasks.arithmetic import FIELDS as REQUIRED

from common.plumbing.config import RunConfig
from common.plumbing.data import load_task, prompts_of_step, read_rows


@pytest.fixture
def write(tmp_path):
    def to_file(*lines: str | dict, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
        return str(path)

    return to_file


def load_rows(**settings) -> tuple[list[dict], list[dict]]:
    """The rows of a run with these settings."""

    @dataclass(frozen=True, kw_only=True)
    class Config(RunConfig):
        prompts_per_step: int = 1

    task = load_task(Config(**settings))
    return task.train_rows, task.eval_rows


def row(number: int, **fields) -> dict:
    return {"question": f"What is {number}+0?", "answer": str(number), **fields}


def questions(rows: list[dict]) -> set[str]:
    return {row["question"] for row in rows}


def test_rows_are_read_in_order_with_all_their_fields(write):
    """Blank lines are skipped."""
    rows = [row(1, note="é"), row(2)]
    assert read_rows(write(rows[0], "", "   ", rows[1]), REQUIRED) == rows


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((row(1), "", '{"question": "What'), r"rows\.jsonl:3: not JSON"),
        ((row(1), "[1, 2]"), r"rows\.jsonl:2: a row must be a JSON object, not list"),
        ((row(1), {"question": "What is 2?"}), r"rows\.jsonl:2: .*'answer' is missing \(there are: question\)"),
        ((row(1), '{"question": "x", "answer": Infinity}'), r"rows\.jsonl:2: the field 'answer' cannot be Infinity"),
        ((row(1), '{"question": "x", "answer": -1e999}'), r"rows\.jsonl:2: the field 'answer' cannot be -Infinity"),
        ((row(1), "[" * 100_000), r"rows\.jsonl:2: lists or objects are nested too deeply"),
        ((row(1), "9" * 5000), r"rows\.jsonl:2: an integer has too many digits"),
        ((), "has no rows"),
        (("", " "), "has no rows"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(write, lines, message):
    with pytest.raises(UserError, match=message):
        read_rows(write(*lines), REQUIRED)


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(UserError, match=r"missing\.jsonl: there is no such file"):
        read_rows(str(tmp_path / "missing.jsonl"), REQUIRED)
    with pytest.raises(UserError, match="there is no such file"):
        read_rows("data/missing.jsonl", REQUIRED)  # one slash, and still no id of a hub dataset
    with pytest.raises(UserError, match="there is no such file"):
        read_rows(str(tmp_path), REQUIRED)


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(row(1, note="é"), ensure_ascii=False).encode("latin-1"))
    with pytest.raises(UserError, match=r"rows\.jsonl"):
        read_rows(str(path), REQUIRED)


def test_the_bundled_task_is_evaluated_on_its_heldout_file():
    train_rows, eval_rows = load_rows(eval_prompts=100)
    assert (len(train_rows), len(eval_rows)) == (4096, 100)
    assert not questions(train_rows) & questions(eval_rows)
    assert eval_rows == load_rows(eval_prompts=100, seed=1)[1]  # the same questions for every seed


def test_filters_apply_to_training_and_evaluation():
    filters = {"at_most": ("num_terms=3", "num_digits=1"), "max_question_length": 20}
    for kept, every in zip(load_rows(**filters, eval_prompts=512), load_rows(eval_prompts=512), strict=True):
        expected = [
            row for row in every if row["num_terms"] <= 3 and row["num_digits"] == 1 and len(row["question"]) <= 20
        ]
        assert kept == expected
        assert 0 < len(kept) < len(every)


def test_filters_that_leave_nothing_or_lack_a_field_are_refused(write):
    with pytest.raises(UserError, match=r"none of the 4096 rows of .* passes the filters \(--at-most"):
        load_rows(max_question_length=3)
    with pytest.raises(UserError, match=r"--at-most num_digits: .*rows\.jsonl:2 has no number"):
        load_rows(data=write(row(1, num_digits=1), row(2)), at_most=("num_digits=1",), eval_prompts=1)


def test_rows_held_out_of_a_users_file_are_not_trained_on(write):
    path = write(*map(row, range(50)))

    def split(seed: int) -> tuple[list[dict], list[dict]]:
        return load_rows(data=path, eval_prompts=20, seed=seed)

    train_rows, eval_rows = split(seed=0)
    assert (len(train_rows), len(eval_rows)) == (30, 20)
    assert questions(train_rows) | questions(eval_rows) == questions(read_rows(path, REQUIRED))
    assert split(seed=0) == (train_rows, eval_rows)
    assert questions(split(seed=1)[1]) != questions(eval_rows)


def test_a_users_evaluation_file_costs_no_training_rows(write):
    path, eval_path = write(*map(row, range(5))), write(*map(row, range(10, 20)), name="eval.jsonl")
    train_rows, eval_rows = load_rows(data=path, eval_data=eval_path, eval_prompts=4)
    assert train_rows == [row(number) for number in range(5)]
    assert eval_rows == [row(number) for number in range(10, 14)]


def test_a_users_file_that_evaluation_would_use_up_is_refused(write):
    with pytest.raises(UserError, match="has 5 rows, of which --eval-prompts takes 5"):
        load_rows(data=write(*map(row, range(5))), eval_prompts=5)


@pytest.mark.parametrize(("num_rows", "prompts_per_step"), [(12, 4), (14, 4), (8, 8), (7, 1)])
def test_an_epoch_has_its_own_order_and_repeats_no_row(num_rows, prompts_per_step):
    """Every step has the full number of prompts."""
    steps_per_epoch = num_rows // prompts_per_step
    epochs = []
    for epoch in range(3):
        steps = range(1 + epoch * steps_per_epoch, 1 + (epoch + 1) * steps_per_epoch)
        batches = [prompts_of_step(num_rows, prompts_per_step, step, seed=0) for step in steps]
        assert all(len(batch) == prompts_per_step for batch in batches)
        order = [index for batch in batches for index in batch]
        assert len(set(order)) == len(order)
        assert set(order) <= set(range(num_rows))
        epochs.append(tuple(order))
    assert len(set(epochs)) == 3


def test_rows_that_an_epoch_left_out_come_in_later_ones():
    seen = {index for step in range(1, 61) for index in prompts_of_step(14, 4, step, seed=0)}
    assert seen == set(range(14))


def test_the_order_depends_on_seed_and_step_alone():
    """So a resumed run needs no state of the data."""
    later = prompts_of_step(100, 8, 77, seed=3)
    assert prompts_of_step(100, 8, 77, seed=3) == later
    assert prompts_of_step(100, 8, 77, seed=4) != later
    assert prompts_of_step(100, 8, 78, seed=3) != later


@pytest.mark.parametrize("value", ["[1, NaN]", '{"a": [Infinity]}', '["\\ud83d"]'])
def test_a_list_is_examined_to_its_depth(write, value):
    """A conversation with half a surrogate pair, for example, would end in an error of the tokenizer."""
    path = write({"messages": [1]}, f'{{"messages": {value}}}')
    with pytest.raises(UserError, match=r"rows\.jsonl:2: the field 'messages' cannot be"):
        read_rows(path, {"messages": (list, dict)})


def test_no_depth_of_nesting_is_a_traceback(write):
    """Also just below what the parser refuses."""
    for depth in range(850, 1000):
        try:
            read_rows(write({"messages": []}, f'{{"messages": {"[" * depth}{"]" * depth}}}'), {"messages": list})
        except UserError as error:
            assert "nested" in str(error)  # noqa: PT017
