"""Rows: errors name file and line, filters and splits lose nothing silently, the order is keyed."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from common.errors import UserError
from tasks.arithmetic import FIELDS as REQUIRED

from harness.base.config import RunConfig
from harness.base.hub import _load
from harness.data.benchmarks import SUITES, Benchmark, renamed
from harness.data.data import read_rows
from harness.data.order import prompts_of_step
from harness.evaluation.held_out import evaluate_held_out
from harness.models.loading import load_policy
from harness.run.settings import check_sources, describe_sources
from harness.task.named_task import task_of
from harness.task.scorer import Scorer
from harness.task.task import Task, load_task

pytestmark = pytest.mark.all_questions


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


def test_how_many_rows_pass_each_filter_is_printed(write, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(*(row(n, size=n) for n in range(1, 13)))
    filters = {"at_most": ("size=10",), "max_question_length": 12, "max_prompts": 4}
    train_rows, _ = load_rows(data="rows.jsonl", eval_prompts=2, **filters)
    assert len(train_rows) == 4
    told = capsys.readouterr().out
    assert "rows.jsonl: of 12 rows pass 10 --at-most size=10, then 9 --max-question-length 12\n" in told
    assert "rows.jsonl: the first 4 of 7 training rows are used\n" in told


def test_the_benchmarks_of_a_suite_are_further_sets(write, monkeypatch):
    """Under the task's names for fields; a set that is given replaces the suite's of the same name."""
    sums = {n: write({"problem": f"{n}+{n}?", "answer": str(2 * n)}, name=f"{n}.jsonl") for n in range(3)}
    asked = write({"question": "4+4?", "ground_truth": "8"}, name="asked.jsonl")
    benchmarks = {
        "amc": Benchmark("AMC", sums[0]),
        "minerva": Benchmark("Minerva", asked, renamed(problem="question")),
    }
    monkeypatch.setitem(SUITES, "math", ("math", benchmarks))
    settings = {"data": sums[1], "eval_data": sums[1], "eval_suite": "math", "eval_sets": (f"amc={sums[2]}",)}
    config = RunConfig(task="math", device="cpu", system_prompt="", **settings)
    task = load_task(config)
    found = {name: [row["problem"] for row in rows] for name, rows in task.eval_sets.items()}
    assert found == {"amc": ["2+2?"], "minerva": ["4+4?"]}
    settings = SimpleNamespace(**vars(config), max_new_tokens=4)
    metrics = evaluate_held_out(settings, task, load_policy(config)).metrics
    mean = (metrics["amc/greedy/accuracy"] + metrics["minerva/greedy/accuracy"]) / 2
    assert metrics["math/greedy/accuracy"] == mean


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_windows_files_are_read(tmp_path, mark, end):
    lines = [json.dumps(row(number, note="é"), ensure_ascii=False).encode() for number in range(3)]
    (tmp_path / "rows.jsonl").write_bytes(mark + end.join([lines[0], mark + lines[1], b"  ", lines[2]]) + end)
    rows = read_rows(str(tmp_path / "rows.jsonl"), REQUIRED)
    assert rows == [row(number, note="é") for number in range(3)]
    assert [row.place.rpartition(":")[2] for row in rows] == ["1", "2", "4"]


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


def test_test_data_beside_training_data_are_evaluated_on(write, capsys):
    path, test = write(*map(row, range(5)), name="train.jsonl"), write(*map(row, range(10, 14)), name="test.jsonl")
    train_rows, eval_rows = load_rows(data=path)
    assert (len(train_rows), eval_rows) == (5, list(map(row, range(10, 14))))
    assert f"evaluated on {test}, which comes with {path}" in capsys.readouterr().out
    assert load_rows(data=path, eval_data=path)[1] == train_rows  # an explicit file wins
    assert "test.jsonl" not in capsys.readouterr().out
    other = write(*map(row, range(5)), name="mine.jsonl")  # only for a file named train.jsonl
    assert len(load_rows(data=other, eval_prompts=2)[0]) == 3


def test_a_run_is_not_resumed_with_other_held_out_questions(write, tmp_path):
    path = write(*map(row, range(5)), name="train.jsonl")

    def sources(eval_data: str | None) -> dict:
        task = Task(Scorer(task_of("arithmetic")), sources={"data": path, "eval_data": eval_data})
        return describe_sources(RunConfig(), task)

    without, test = sources(None), write(row(9), name="test.jsonl")
    beside = sources(test)
    check_sources(tmp_path, beside, beside, has_failed=False)
    check_sources(tmp_path, without, without, has_failed=False)
    with pytest.raises(UserError, match=r"test\.jsonl was not there when .* began, which held out rows of --data"):
        check_sources(tmp_path, without, beside, has_failed=False)
    with pytest.raises(UserError, match=r"test\.jsonl, which .* is evaluated on, is no longer there"):
        check_sources(tmp_path, beside, without, has_failed=False)
    write(row(8), name="test.jsonl")
    with pytest.raises(UserError, match=r"--eval-data .*test\.jsonl has changed since"):
        check_sources(tmp_path, beside, sources(test), has_failed=False)


# Datasets of the hub -------------------------------------------------------------------------------------------------

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
- config_name: other
  data_files:
  - {split: validation, path: test.jsonl}
---
"""


@pytest.fixture
def hub_dataset(tmp_path, monkeypatch) -> str:
    """A dataset repository with two subsets; the library reads it from the current directory instead of the hub."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    place = tmp_path / "owner" / "name"
    place.mkdir(parents=True)
    (place / "README.md").write_text(CARD)
    for split, numbers in (("train", range(6)), ("test", range(10, 14))):
        (place / f"{split}.jsonl").write_text("".join(json.dumps(row(number)) + "\n" for number in numbers))
    return "owner/name"


def test_a_hub_source_names_subset_and_split(hub_dataset):
    assert read_rows("owner/name:main", REQUIRED) == list(map(row, range(6)))
    rows = read_rows("owner/name:main:test", REQUIRED)
    assert rows == read_rows("owner/name:other:validation", REQUIRED) == list(map(row, range(10, 14)))
    assert rows[1].place == "owner/name:main:test, row 2"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("owner/name:mian", r"owner/name:mian could not be loaded: .*'mian' not found.* \['main', 'other'\]"),
        ("owner/name:", r"owner/name:SUBSET could not be loaded: .* \['main', 'other'\]"),
        ("owner/name:main:dev", r"owner/name:main has no split 'dev' \(there are: train, test\)"),
        ("owner/name:other", r"no split 'train' \(there are: validation\): owner/name:other:validation, for example"),
        ("owner/nobody:main", "owner/nobody:main could not be loaded: Couldn't reach"),
    ],
)
def test_a_subset_or_split_that_is_missing_is_named(hub_dataset, source, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        read_rows(source, REQUIRED)
    assert "\n" not in str(caught.value)


def test_subset_and_split_are_named_from_the_cache_as_well(hub_dataset, tmp_path):
    read_rows("owner/name:main", REQUIRED)
    (tmp_path / "cache" / "name").rename(tmp_path / "cache" / "owner___name")  # as for one from the hub
    (tmp_path / "owner" / "name").rename(tmp_path / "owner" / "gone")
    _load.cache_clear()
    assert len(read_rows("owner/name:main:test", REQUIRED)) == 4
    with pytest.raises(UserError, match=r"no split 'dev' \(there are: train, test\)"):
        read_rows("owner/name:main:dev", REQUIRED)
    with pytest.raises(UserError, match=r"owner/name:other could not be loaded: .* \['main'\]"):
        read_rows("owner/name:other", REQUIRED)


def test_the_test_split_of_a_hub_dataset_is_evaluated_on(hub_dataset, capsys):
    train_rows, eval_rows = load_rows(data="owner/name:main")
    assert (train_rows, eval_rows) == (list(map(row, range(6))), list(map(row, range(10, 14))))
    assert "evaluated on owner/name:main:test, which comes with owner/name:main" in capsys.readouterr().out
    assert [len(rows) for rows in load_rows(data="owner/name:main:train", eval_prompts=2)] == [4, 2]
    assert [len(rows) for rows in load_rows(data="owner/name:other:validation", eval_prompts=1)] == [3, 1]


def test_a_task_may_have_its_data_on_the_hub(hub_dataset, tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.py").write_text(
        "from tasks.arithmetic import *\nTRAIN_DATA = 'owner/name:main'\nEVAL_DATA = 'data/rows.jsonl'\n"
    )
    task = task_of("tasks/mine.py")
    assert task.train_data == "owner/name:main"
    assert task.eval_data == str(tmp_path / "tasks" / "data" / "rows.jsonl")


@pytest.mark.parametrize(("num_rows", "prompts_per_step"), [(12, 4), (14, 4), (8, 8), (7, 1)])
def test_an_epoch_has_its_own_order_and_repeats_no_row(num_rows, prompts_per_step):
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


def test_the_order_depends_on_seed_and_step_alone():
    later = prompts_of_step(100, 8, 77, seed=3)
    assert prompts_of_step(100, 8, 77, seed=3) == later
    assert prompts_of_step(100, 8, 77, seed=4) != later
    assert prompts_of_step(100, 8, 78, seed=3) != later


@pytest.mark.parametrize("value", ["[1, NaN]", '{"a": [Infinity]}', '["\\ud83d"]'])
def test_a_list_is_examined_to_its_depth(write, value):
    path = write({"values": [1]}, f'{{"values": {value}}}')
    with pytest.raises(UserError, match=r"rows\.jsonl:2: the field 'values' cannot be"):
        read_rows(path, {"values": (list, dict)})
