"""The audit finds each planted fault and nothing else, and reports the known faults of real files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from run_files import json_of

from common.errors import UserError
from tasks.audit.__main__ import main
from viewer.results import read_json

from harness.base.config import RunConfig
from harness.task.row_checks import normalise
from harness.task.task import load_task

ROOT = Path(__file__).resolve().parents[2]
REAL, RESULTS = ROOT.parent / "shared" / "data", ROOT / "benchmarks" / "results" / "measurements.json"


@pytest.fixture
def audit(tmp_path, capsys) -> Callable[..., tuple[int, dict, str]]:
    """The exit status, the JSON and the text of an audit with these flags."""

    def run(*argv: str) -> tuple[int, dict, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*argv, "--json", str(tmp_path / "report.json")])
        return ended.value.code, json_of(tmp_path / "report.json"), capsys.readouterr().out

    return run


@pytest.fixture
def write(tmp_path) -> Callable[..., str]:
    def to_file(name: str, *lines: str | dict) -> str:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / name).write_text("\n".join(texts) + "\n", encoding="utf-8")
        return str(tmp_path / name)

    return to_file


def found(report: dict, **wanted) -> dict[str, list[int]]:
    """The line numbers of every finding that has rows."""
    findings = [finding for finding in report["findings"] if finding["rows"] and wanted.items() <= finding.items()]
    return {finding["name"]: [int(place.rpartition(":")[2]) for place in finding["places"]] for finding in findings}


def row(question: str, answer: object) -> dict:
    return {"question": question, "answer": answer}


STORY = "On the way to the old mill by the river the farmer counted every one of his sheep"
TRAINING = (
    row("How many eggs are in 2 boxes of 6?", "2*6=<<2*6=12>>12\n#### 12"),
    '{"question": "What',  # 2
    "[1]",  # 3
    {"question": "What is 1+1?"},  # 4
    row("What is 1+1?", None),  # 5
    row("What is 8+1?", "#### "),  # 6
    row("What is 7+1?", "eight, or so\n#### eight"),  # 7
    row("what is 2 boxes times 6 eggs", "#### 9"),
    row("What is 2 boxes, times 6 eggs?", "#### 9"),  # 9: once more
    row("What is 2 boxes times 6 eggs?", "#### 12"),  # 10: with another answer
    row("A bell\x07 rings 3 times. How often?", "#### 4"),  # 11; the answer is not 3
    row("He had 1,080 coins, and lost none. How many are left?", "#### 1080"),  # 12
    row("What is 10 plus 5 minus 1?", "10+5=<<10+5=16>>16, 16-1=<<16-1=15>>15\n#### 15"),  # 13: wrong on the way
    row(f"{STORY}, and then counted them again: 8 and 9. How many?", "#### 17"),
    row(f"{STORY}, and his 11 goats. If there were 20 sheep, how many in all?", "#### 31"),  # 15
    row("What is 4 times 11? " + "Think well. " * 500, "#### 44"),  # 16: too long
)
EVALUATION = (
    row("How many eggs are in 2 boxes of 6?", "#### 12"),  # 1: exactly
    row("how many eggs are  in 2 boxes, of 6", "#### 12"),  # 2: normalised
    row(f"At noon: {STORY.lower()} once. There were 40 and 2. How many?", "#### 42"),  # 3: a run of words
    row("What is 20 plus 22?", "#### 42"),
)


def test_every_planted_fault_is_found_and_nothing_else(audit, write):
    data, eval_data = write("train.jsonl", *TRAINING), write("test.jsonl", *EVALUATION)
    status, report, text = audit("--task", "gsm8k", "--data", data, "--eval-data", eval_data)
    assert status == 1
    assert found(report, is_problem=True) == {
        "training_unusable": [2, 3, 4, 5],
        "training_empty_golds": [6],
        "training_refused_golds": [7],
        "training_conflicts": [10],
        "training_long_prompts": [16],
        "training_control_characters": [11],
        "shared_exactly": [1],
        "shared_normalised": [2],
    }
    assert found(report, is_problem=False) == {
        "training_repeated": [9],
        "training_answer_in_question": [12],
        "training_wrong_calculations": [13],
        "training_13_words": [15],
        "evaluation_repeated": [2],
        "shared_13_words": [3],
    }
    assert "train.jsonl:7: '<answer>eight</answer>' earns correct = 0" in text
    assert "\x07" not in text
    assert (report["rows"], report["sources"]["evaluation"]) == ({"training": 12, "evaluation": 4}, eval_data)


def test_clean_data_have_notes_at_most(audit, write):
    clean = [row(f"What are {n} and {n + 1}, added up?", f"#### {2 * n + 1}") for n in range(20, 30)]
    write("test.jsonl", row("What is 3 times 4?", "#### 12"))
    status, report, text = audit("--task", "gsm8k", "--data", write("train.jsonl", *clean))
    assert (status, found(report)) == (0, {})
    assert report["sources"]["evaluation"].endswith("test.jsonl")
    assert "problems: none" in text
    status, report, _ = audit("--task", "arithmetic")
    assert status == 0
    assert found(report).keys() == {"training_answer_in_question", "evaluation_answer_in_question"}


def test_the_audit_finds_what_a_run_finds_in_the_rows_that_it_holds_out(audit, write, capsys):
    rows = [row(f"What is {n % 20} plus 1{'  ' * (n % 3)}?", f"{n % 20 + 1}") for n in range(30)]
    data = write("rows.jsonl", *rows, *(row(f"How much is {n} plus 2?", f"{n + 2}") for n in range(200)))
    said = set()
    for seed in range(3):
        flags = ("--task", "arithmetic", "--data", data, "--eval-prompts", "32", "--seed", str(seed))
        status, report, text = audit(*flags)
        shared = sum(len(lines) for name, lines in found(report).items() if name.startswith("shared_"))
        capsys.readouterr()
        load_task(RunConfig(task="arithmetic", data=data, eval_prompts=32, seed=seed))
        sentence = f"{shared} of the 32 held-out questions are training questions as well"
        assert (sentence in capsys.readouterr().out) == (shared > 0)
        assert status == (shared > 0)
        assert "a run holds out 32 of --data" in text
        said.add(shared)
    assert len(said) > 1
    status, report, text = audit("--task", "arithmetic", "--data", data)  # 256 of 230 rows cannot be held out
    assert status == 1
    assert "training_repeated" in found(report, is_problem=True)
    assert "a run can hold out none of so few: lower --eval-prompts" in text


def test_answers_of_mathematics_are_examined(audit, write):
    solved = "Part 0: what is $1+1$? Solution: it is \\boxed{\\frac{4}{2}}. Part 1: what is half of it?"
    data = write(
        "m.jsonl",
        {"problem": "What is $x$?", "answer": "\\frac{1}{2"},
        {"problem": "What are $m, n$?", "answer": ["$221,$8$"]},
        {"problem": "What is $y$?", "answer": ["", " "]},
        {"problem": solved, "answer": "2"},
        {"problem": "What is half of it, if $3+1=\\boxed{4}$?", "answer": "2"},
        {"problem": "What is $2-3$?", "answer": -1.0},
        {"problem": "What is $2+3$?", "answer": [5]},
    )
    status, report, _ = audit("--task", "math", "--data", data)
    assert status == 1
    assert found(report) == {
        "training_ill_formed_golds": [1, 2],
        "training_empty_golds": [3],
        "training_boxed_in_question": [4],
        "training_answer_in_question": [4],
    }


def test_a_task_of_ones_own_is_audited(audit, write, tmp_path):
    (tmp_path / "mine.py").write_text(
        "FIELDS, REWARD_WEIGHTS = {'number': int}, {'odd': 1.0}\n"
        "def messages(row, system_prompt): return [{'role': 'user', 'content': str(1 / row['number'])}]\n"
        "def reward(row, text): return {'odd': float(text == 'odd')}\n"
        "def solution(row): return 'odd' if row['number'] % 2 else 'even'\n"
    )
    data = write("rows.jsonl", *({"number": number} for number in (1, 0, 2, 3, 50)))
    status, report, text = audit("--task", str(tmp_path / "mine.py"), "--data", data, "--at-most", "number=9")
    assert (status, found(report)) == (1, {"training_unusable": [2], "training_refused_golds": [3]})
    assert (report["rows"], report["rows_after_filters"]) == ({"training": 4}, {"training": 3})
    assert "rows.jsonl:2: raised ZeroDivisionError" in text
    with pytest.raises(UserError, match=r"^no row of .* can be used: .*'question' is missing .*nums, target"):
        main(["--task", "gsm8k", "--data", write("c.jsonl", {"nums": [1, 2], "target": 3})])
    with pytest.raises(UserError, match=r"--task countdown$"):
        main(["--task", "gsm8k", "--data", str(tmp_path / "c.jsonl")])


def test_lengths_are_those_of_the_tokenizer(audit, write, tokenizer):
    worked = "9*2=<<9*2=18>>18\n#### 18"
    data = write("rows.jsonl", *(row(f"What is {n}+1?", worked.replace("9", str(n))) for n in range(1, 11)))
    _, report, _ = audit("--task", "gsm8k", "--data", data, "--max-new-tokens", "9")
    lengths = {entry["name"]: entry for entry in report["tokens"]}
    messages = [{"role": "user", "content": "What is 10+1?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert lengths["training_prompts"]["longest"] == len(ids)
    bare = worked.replace("<<9*2=18>>", "")
    expected = sorted(len(tokenizer.encode(bare.replace("9", str(n)))) for n in range(1, 11))
    entry = lengths["training_solutions"]
    assert (entry["median"], entry["longest"]) == (expected[4], expected[-1])
    assert entry["beyond_limit"] == sum(length > 9 for length in expected)


def test_what_a_question_means_is_kept_when_normalised():
    same = [("What is x + 1?", "what is $x+1$"), ("1,080 eggs.", "1080 eggs"), ("a  \u201cb\u201d", "A b")]
    other = [("2+3", "2-3"), ("1.5", "15"), ("(2+3)*4", "2+3*4"), ("x_1", "x1"), ("1 2", "12"), ("12,34", "1234")]
    assert all(normalise(a) == normalise(b) for a, b in same)
    assert [pair for pair in other if normalise(pair[0]) == normalise(pair[1])] == []


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="the published files are not there")
def test_the_committed_report_is_that_of_the_file(audit):
    committed = found(read_json(RESULTS, "audits")["minerva"])
    status, report, _ = audit("--task", "math", "--data", str(REAL / "math_benchmarks" / "minerva.jsonl"))
    assert (status, found(report)) == (1, {name: x for name, x in committed.items() if name.startswith("training")})
    assert len(found(report)["training_boxed_in_question"]) == 33
