"""Schemas and formats of other people's files: what is read, what is refused, and what the page says about both."""

import json
import re
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from common.errors import UserError

from harness.base.config import RunConfig
from harness.data.data import find_test_data, read_rows
from harness.data.rows import Row
from harness.data.schemas import SCHEMAS, read_as
from harness.task.named_task import task_of
from harness.task.questions import load_rows
from harness.task.row_checks import suggest_task
from harness.task.task import load_task

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
TURNS = (str, list)
KINDS = {"messages": list, "prompt": TURNS, "chosen": TURNS, "rejected": TURNS, "nums": list, "target": (int, str)}
KINDS |= {"question": str, "problem": str, "answer": (str, int, float, list)}
USER, GOLD = {"role": "user", "content": "2+2?"}, {"reward_model": {"ground_truth": "4"}}
CHAT = [USER, {"role": "assistant", "content": "4"}]
SYSTEM = {"role": "system", "content": "Add."}
VERL = {"prompt": [USER | {"content": '2+2? End with "####".'}], **GOLD}


def read(row: dict, *names: str, is_own: bool = False, **kinds) -> Row | str:
    """The row with these fields, or its problem."""
    made = Row(row)
    problem = read_as(made, {name: KINDS[name] for name in names} | kinds, is_own)[0]
    return made if problem is None else problem


def test_the_page_shows_the_table_and_every_example_is_read(tmp_path):
    table = re.findall(
        r"^\| (.+?) \| (\w+: `.+?`) \| `(\{.+?\})` \| `(\{.+\})` \|$", PAGE.read_text("utf-8"), re.MULTILINE
    )
    shown = [(name, reads) for name, reads, _, _ in table]
    assert shown == [(name, ", ".join(f"{kind}: `{path}`" for kind, path in reads.items())) for name, reads in SCHEMAS]
    for *_, example, gives in table:
        row, wanted = json.loads(example), json.loads(gives)
        (tmp_path / "rows.jsonl").write_text(example + "\n")
        (found,) = read_rows(str(tmp_path / "rows.jsonl"), {name: KINDS[name] for name in wanted})
        assert found == row | wanted


def test_the_lines_that_convert_do(tmp_path, monkeypatch):
    import datasets

    monkeypatch.chdir(tmp_path)
    first, second = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    rows = [
        {"Q": "2+2?", "A": "4", "no": "5", "prompt": [SYSTEM, USER], "completion": text, "label": text == "4"}
        for text in "45"
    ]
    for code in (first, second):
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        exec(code, known := {"datasets": datasets, "rows": rows})
        pairs = list(read_rows("pairs.jsonl", dict.fromkeys(("prompt", "chosen", "rejected"), TURNS)))
        assert [(pair["chosen"], pair["rejected"]) for pair in pairs] == [("4", "5")] * (2 if code is first else 1)
        rows = [row | {"prompt": "2+2?"} for row in rows]
    assert [row["question"] for row in known["rows"] if "question" in row] == []
    assert [row["question"] for row in read_rows("converted.jsonl", {"question": str})] == ["2+2?"] * 2
    assert [row["messages"][-1]["content"] for row in read_rows("good.jsonl", {"messages": list})] == ["4"]


@pytest.mark.parametrize(("row", "wanted"), [
    (VERL, {"question": '2+2? End with "####".', "answer": "4"}),
    (VERL | {"reward_model": '{"ground_truth": ["4"]}', "extra_info": None}, {"answer": ["4"]}),
    (VERL | {"prompt": json.dumps([USER])}, {"question": "2+2?"}),
    (VERL | {"extra_info": {"question": "2+2?"}}, {"problem": "2+2?", "answer": "4"}),
    (VERL | {"prompt": [SYSTEM, *VERL["prompt"]], "extra_info": {"question": "2+2?"}}, {"question": "2+2?"}),
    ({"prompt": "2+2?", "reward_model": {"ground_truth": {"target": ["4", "four"]}}}, {"answer": ["4", "four"]}),
    ({"prompt": "2+2?", "reward_model": {"ground_truth": '["4", "four"]'}}, {"answer": ["4", "four"]}),
    ({"prompt": "?", "reward_model": {"ground_truth": "[3,4]"}}, {"answer": "[3,4]"}),  # an interval
    ({"input": "2+2?", "answer": "2+2=4\n#### 4", "label": 4}, {"question": "2+2?", "answer": "2+2=4\n#### 4"}),
    ({"question": "2+2?", "answer": "\\frac82"}, {"problem": "2+2?"}),
    ({"problem": "2+2?", "label": "4"}, {"problem": "2+2?", "answer": "4"}),
    ({"prompt": "2+2?", "solution": "$4"}, {"answer": "$4"}),  # dollars
    ({"prompt": "2+2?", "solution": 4}, {"answer": "4"}),
    ({"prompt": "2+2?", "solution": "2+2=4\n#### 4"}, {"question": "2+2?", "answer": "4"}),
    ({"messages": [USER], "ground_truth": "4"}, {"question": "2+2?", "answer": "4"}),  # Tulu 3's RLVR
    ({"question": "2+2?", "final_answer": "4"}, {"problem": "2+2?", "answer": "4"}),
    ({"messages": CHAT, "system": "Add."}, {"messages": [SYSTEM, *CHAT]}),
    ({"instruction": "2+2?", "output": "4", "prompt": "### 2+2? 4"}, {"messages": CHAT}),
    ({"prompt": [USER], "instruction": None}, {"prompt": [USER]}),
    ({"messages": json.dumps(CHAT), "tools": '[{"name": "f"}]'}, {"messages": CHAT, "tools": [{"name": "f"}]}),
    ({"messages": [{"role": "human", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}]},
     {"messages": [USER]}),
    ({"conversations": [{"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
                        {"from": "observation", "value": "4"}]},
     {"messages": [{"role": "assistant", "content": "",
                    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]},
                   {"role": "tool", "content": "4"}]}),
    ({"prompt": "2+2?", "completion": "4", "label": None}, {"messages": CHAT}),
    ({"instruction": "2+2?", "input": None, "output": "4", "system": "Add."}, {"messages": [SYSTEM, *CHAT]}),
    ({"prompt": "2+2?", "system": "Add."}, {"prompt": [SYSTEM, USER]}),
    ({"conversations": [{"from": "human", "value": "2+2?"}], "chosen": {"from": "gpt", "value": "4"}, "rejected": "5"},
     {"prompt": "2+2?", "chosen": CHAT[1:], "rejected": "5"}),
])  # fmt: skip
def test_what_is_not_ambiguous_is_read(row, wanted):
    found = read(row, *(name for name in wanted if name in KINDS))
    assert {name: found[name] for name in wanted} == wanted
    others = row.keys() - wanted
    assert {name: found[name] for name in others} == {name: row[name] for name in others}


def test_a_row_that_has_what_is_asked_for_is_never_changed():
    for row in ({"problem": "?", "solution": r"\fbox{4}", "label": 5}, {"problem": "?", "solution": "It is 4."}):
        assert read(row, "problem") == row
    own = {"prompt": [USER | {"content": [{"type": "image"}]}], "answer": True, "label": "5"}
    assert read(own, is_own=True, prompt=list, answer=bool) == own
    assert read({"problem": "?"}, "problem", is_own=True) == {"problem": "?"}
    assert read(VERL, "question", "answer", is_own=True)["answer"] == "4"  # it would be refused otherwise


@pytest.mark.parametrize(("script", "loads", "good"), [
    ("imitation/sft", "load_policy", {"messages": CHAT}),
    ("rewards/dpo", "load_policy", {"prompt": [USER], "chosen": "4", "rejected": "5"}),
    ("rewards/reward_model", "new_reward_model", {"prompt": [USER], "chosen": "4", "rejected": "5"}),
])  # fmt: skip
def test_rows_are_looked_at_before_a_model_is_loaded(load_script, tmp_path, monkeypatch, script, loads, good):
    monkeypatch.syspath_prepend(PAGE.parents[1] / script)
    train = load_script(f"{script}/train.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, loads, lambda *_: pytest.fail("a model is loaded"))
    name = next(iter(good))
    rows = [good, good, good | {name: [USER | {"content": [{"type": "image"}]}]}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"^rows\.jsonl:3: message 0 has a part that is no text"):
        train.main(["--data", "rows.jsonl", "--model", "tiny", "--device", "cpu", "--eval-prompts", "1"])
    assert not Path("runs").exists()


# Formats -------------------------------------------------------------------------------------------------------------

ANSWERS = ["007", "1,50", "NA", "null", "1.50", "2024-01-02"]
ROWS = [{"question": f'"{answer}",\n?', "answer": answer, "x": None} for answer in ANSWERS]
WRITERS = {
    "rows.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "rows.parquet": lambda path: pa.parquet.write_table(pa.Table.from_pylist(ROWS), path),
    "rows.arrow": lambda path: pa.feather.write_feather(pa.Table.from_pylist(ROWS), path, compression="uncompressed"),
    "rows.jsonl": lambda path: pa.parquet.write_table(pa.Table.from_pylist(ROWS), path),  # by content
    "rows.csv": lambda path: path.write_text(csv_of(","), encoding="utf-8-sig"),
    "excel.csv": lambda path: path.write_text(csv_of(";")),
    "rows.tsv": lambda path: path.write_text(csv_of("\t")),
}


def csv_of(mark: str) -> str:
    import csv
    import io

    text = io.StringIO()
    writer = csv.DictWriter(text, ["question", "answer", "x"], delimiter=mark)
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue()


@pytest.mark.parametrize("name", WRITERS)
def test_values_of_every_format_are_those_that_were_written(tmp_path, name):
    WRITERS[name](tmp_path / name)
    rows = read_rows(str(tmp_path / name), {"question": str, "answer": (str, int, float)})
    assert rows == ROWS
    assert rows[1].place.endswith(f"{name}:5" if name.endswith(("csv", "tsv")) else f"{name}, row 2")


def test_a_table_has_numbers_and_lists_where_a_task_wants_them(tmp_path):
    (tmp_path / "rows.csv").write_text('nums,target,size\n"[1, 2]",3,2\n"[3, 4]",7,007\n')
    rows = read_rows(str(tmp_path / "rows.csv"), {"nums": list, "target": (int, float, str), "size": (str, int)})
    assert [list(row.values()) for row in rows] == [[[1, 2], "3", "2"], [[3, 4], "7", "007"]]
    found = load_rows(str(tmp_path / "rows.csv"), task_of("countdown"), ("size=3",), None)
    assert [row["nums"] for row in found] == [[1, 2]]
    (tmp_path / "rows.csv").write_text("x\n5\n1,5\n".replace(",", "."))
    with pytest.raises(UserError, match=r'rows.csv:3: the field \'x\' cannot be "1.5", but a whole number'):
        read_rows(str(tmp_path / "rows.csv"), {"x": int})


def test_dates_and_missing_values_of_arrow(tmp_path):
    rows = [
        {"problem": "?", "solution": r"\boxed{4}", "answer": None},
        {"problem": "?", "solution": None, "answer": "5"},
    ]
    pa.parquet.write_table(
        pa.Table.from_pylist([row | {"on": date(2024, 1, 2)} for row in rows]), tmp_path / "m.parquet"
    )
    task = load_task(RunConfig(task="math", data=str(tmp_path / "m.parquet"), eval_data=str(tmp_path / "m.parquet")))
    assert [task.file.right_answer(row) for row in task.train_rows] == ["4", "5"]
    with pytest.raises(UserError, match=r"m.parquet, row 1: the field 'on' cannot be \"2024-01-02\", but text"):
        read_rows(str(tmp_path / "m.parquet"), {"on": str})


@pytest.mark.parametrize("end", [".jsonl", ".parquet", ".csv", "-00000-of-00001.parquet"])
def test_test_data_lie_beside_training_data(tmp_path, end):
    train, test = (tmp_path / f"{name}{end}" for name in ("train", "test"))
    assert find_test_data(str(train)) is None
    test.touch()
    assert find_test_data(str(train)) == str(test)


# Hints ---------------------------------------------------------------------------------------------------------------

MATH = {"prompt": [USER | {"content": r"What is $1/2+1/4$? Put your answer within \boxed{}."}]}


@pytest.mark.parametrize(("row", "name", "hint"), [
    ({"question": "What is $1/2+1/4$?", "answer": r"\frac{3}{4}"}, "gsm8k", "; .* belong to --task math$"),
    (MATH | {"answer": "27"}, "countdown", "; .* belong to --task math$"),
    (MATH | {"reward_model": {"ground_truth": r"\frac34"}}, "gsm8k", "; .* belong to --task math$"),
    (VERL, "countdown", "^$"),  # no task pays for ####
    (VERL | {"extra_info": {"question": "2+2?"}}, "countdown", "; .* --task arithmetic or --task gsm8k or"),
    ({"question": "Who?", "answer": ["Jarce", "J."]}, "arithmetic", "; .* belong to --task qa$"),
])  # fmt: skip
def test_only_tasks_that_can_judge_a_row_are_named(row, name, hint):
    assert re.search(hint, suggest_task(Row(row), task_of(name)))


@pytest.mark.parametrize(("row", "name", "sentence"), [
    (VERL, "gsm8k", "rows.jsonl:1: --task gsm8k pays 0 for #### 4, although the question asks for this form: remove"),
    (MATH | {"answer": "0.75"}, "arithmetic", r"--task arithmetic pays 0 for .*boxed\{0.75\}.*belong to --task math\n"),
    (VERL | {"extra_info": {"question": "2+2?"}}, "gsm8k", "^$"),
    (MATH | {"answer": "0.75"}, "math", "^$"),
    (MATH | {"answer": r"\frac34"}, "gsm8k", "^$"),  # no completion can be right, which is said later
])  # fmt: skip
def test_a_form_that_is_asked_for_and_not_paid_for_is_said(tmp_path, capsys, row, name, sentence):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    load_rows(str(tmp_path / "rows.jsonl"), task_of(name), (), None)
    assert re.search(sentence, capsys.readouterr().err)
