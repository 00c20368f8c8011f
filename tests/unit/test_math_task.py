"""The task `math`: reading the answer of a completion, judging it, and surviving hostile text."""

from pathlib import Path

import pytest
from decisions import decisions
from run_files import read_lines, write_rows

from common.errors import UserError
from tasks import math as task
from tasks.verdicts import judge as judge_module
from tasks.verdicts.judge import Judge, has_library

from harness.base.config import RunConfig
from harness.data.data import load_task

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT.parent / "shared" / "data" / "math_benchmarks"
needs_library = pytest.mark.skipif(not has_library(), reason="math-verify is not installed")


@pytest.fixture(scope="module", autouse=True)
def judge():
    """With enough time for a slow processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge_module, "HUNG_SECONDS", 300.0)
        patch.setattr(judge_module, "num_workers", lambda: 1)
        patch.setattr(task, "_JUDGE", Judge())
        yield task._JUDGE
        task._JUDGE.close()


@needs_library
def test_every_decision_of_the_docstring():
    table = list(decisions(task))
    assert len(table) > 55
    rows, texts = [{"answer": gold} for gold, *_ in table], [rf"So it is \boxed{{{x}}}." for _, x, _ in table]
    task.prepare(rows, texts)
    found = [task.reward(row, text)["correct"] == 1 for row, text in zip(rows, texts, strict=True)]
    assert [case for case, is_right in zip(table, found, strict=True) if (case[2] == 0) is not is_right] == []


@pytest.mark.parametrize(("text", "answer"), [
    (r"\boxed{5}", "5"), (r"First \boxed{4}, no: \boxed{5}", "5"), (r"\boxed{5} and then \boxed{6", "5"),
    (r"\fbox{5}", "5"), (r"\boxed {5}", "5"), (r"So $\boxed 5$", "5"),
    (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."), (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{x = \boxed{5}}", "5"), (r"\boxed{}", ""), ("<answer> 5 </answer>", "5"),
    (r"<answer>$\boxed{5}$</answer>", "5"), (r"\boxed{4} <answer>5</answer>", "5"),
    (r"<answer>5</answer> \boxed{4}", "5"), ("<answer>4</answer><answer>5</answer>", None),
    (r"<answer>4</answer><answer>5</answer>\boxed{5}", None), (r"\boxed{5} <answer>6", "5"),
    (r"<think>\boxed{4}</think>\boxed{5}", "5"), (r"<think><answer>4</answer></think><answer>5</answer>", "5"),
    (r"<think>\boxed{4}</think>", None), (r"<think>\boxed{4}", None),
    (r"begun by the prompt \boxed{4}</think> \boxed{5}", "5"), (r"begun by the prompt \boxed{4}</think>", None),
    ("<ans<think></think>wer>5</answer>", None), ("<answer>5<think>6</answer></think></answer>", None),
    (r"\boxed{1<think>6</think>8}", None), ("5", None), ("", None),
])  # fmt: skip
def test_which_answer_a_completion_gives(text, answer):
    assert task.given_answer(text) == answer


@pytest.mark.parametrize(("text", "rewards"), [
    (r"<think>2+3</think>\boxed{5}", (1, 1, 1)), ("<think>2+3</think><answer>5</answer>", (1, 1, 0)),
    (r"\boxed{5} \boxed{5}", (1, 0, 1)), (r"<answer>\boxed{5}</answer>", (1, 1, 1)), (r"\boxed{6}", (0, 1, 1)),
    (r"\boxed{5} <think>and", (1, 0, 1)), ("<answer>5</answer><answer>5</answer>", (0, 0, 0)),
    (r"<think>\boxed{5}</think>", (0, 0, 0)), ("", (0, 0, 0)),
])  # fmt: skip
def test_reward_components(text, rewards):
    assert tuple(task.reward({"answer": "5"}, text).values()) == rewards
    assert task.reward({"answer": "5"}, text).keys() == task.REWARD_WEIGHTS.keys()


@pytest.mark.parametrize(("row", "golds"), [
    ({"answer": 142.0}, ["142"]), ({"answer": 7}, ["7"]),
    ({"answer": ["4.4e7\n", "4.4 \\times 10^7\n"]}, ["4.4e7", "4.4 \\times 10^7"]),
    ({"answer": "5", "solution": r"\boxed{6}"}, ["5"]),
    ({"solution": r"As $\boxed{1}$ shows, $\boxed{\frac{1}{2}}$."}, [r"\frac{1}{2}"]),
    ({"solution": r"It is $\boxed 9$."}, ["9"]), ({"solution": "no box"}, []), ({"answer": None}, []),
    ({"answer": True}, []), ({"answer": float("nan")}, []), ({"answer": []}, []), ({"answer": ["", None, {}]}, []),
])  # fmt: skip
def test_gold_answers_of_a_row(row, golds):
    assert task.golds(row) == golds
    assert task.reward(row, task.solution(row))["correct"] == bool(golds)


def test_any_gold_answer_of_a_list_is_right():
    row = {"answer": ["6630.65\n", "6630\n"]}
    assert [task.reward(row, rf"\boxed{{{x}}}")["correct"] for x in ("6630", "6,630.65", "6630.6")] == [1, 1, 0]


@needs_library
def test_what_is_undecided_is_wrong_and_described():
    row, text = {"answer": "x"}, r"\boxed{9^{9^{9^9}}}"
    assert task.reward(row, text)["correct"] == 0
    assert task.describe(row, text) == {"answered": 1.0, "undecided": 1.0, "right_elsewhere": 0.0}
    assert task.describe(row, r"\boxed{x}") == {"answered": 1.0, "undecided": 0.0, "right_elsewhere": 0.0}
    assert task.describe(row, "x") == {"answered": 0.0, "undecided": 0.0, "right_elsewhere": 0.0}


@pytest.mark.parametrize(("gold", "text", "is_logged"), [
    ("36", r"\boxed{36\text{ or so}}", 1), ("36", r"\boxed{36x^2}", 1), ("36", r"\boxed{36}", 0),
    ("36", r"\boxed{37}", 0), ("36", r"36, no: \boxed{37}", 0), ("36", "The answer is 36.", 1), ("36", "36 or 37", 0),
    (["9", "36"], "So: 36", 1), ("-36", "It is -36", 1), ("36", "It is -36", 0),
    (r"\frac{1}{2}", r"Thus \frac{2}{4}.", 1), ("1,080", "We get 1080", 1), ("x", "x", 0),
    ("36", r"<think>\boxed{36}</think>", 1), ("36", "", 0), ("36", r"\boxed{}", 0), ("36", r"\boxed{-36x}", 0),
])  # fmt: skip
def test_an_answer_that_is_refused_although_its_number_agrees_is_logged(gold, text, is_logged):
    row = {"answer": gold}
    assert task.describe(row, text)["right_elsewhere"] == is_logged
    assert not (is_logged and task.reward(row, text)["correct"])


@pytest.mark.parametrize("text", [
    "\\" * 100_000, r"\boxed{" * 20_000, r"\boxed{" + "{" * 10_000 + "}" * 10_000 + "}",
    r"\boxed{" + "\\" * 100_001 + "}", r"\boxed" + " " * 100_000, "\\boxed{\ud800}", "\\boxed{\0\n\r\u2028}",
    "<think>" * 20_000, "<answer>" * 20_000, "<answer>" + "<" * 100_000 + "</answer>", "</think>" * 20_000,
    r"\boxed{" + "9" * 100_000 + "}", r"\boxed{" + r"\frac" * 300 + "}", r"\boxed{" + "1," * 140 + "}",
    r"\boxed{" + "(" * 299 + "}",
])  # fmt: skip
def test_hostile_text_is_wrong_and_nothing_else(text):
    row = {"answer": r"\frac{1}{2}"}
    task.prepare([row], [text])
    assert task.reward(row, text)["correct"] == 0
    assert task.describe(row, text).keys() == {"answered", "undecided", "right_elsewhere"}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load rows without math-verify."""
    monkeypatch.setattr(judge_module, "has_library", lambda: False)
    monkeypatch.setattr(task, "has_library", lambda: False)
    monkeypatch.setattr(task, "_JUDGE", Judge())

    def load(*rows: dict):
        write_rows(tmp_path / "rows.jsonl", rows)
        return load_task(RunConfig(task="math", data=str(tmp_path / "rows.jsonl"), eval_prompts=1))

    return load


def test_rows_of_both_forms_can_be_trained_on(load, capsys):
    loaded = load({"problem": "1+1?", "answer": 2.0}, {"problem": "2+2?", "solution": r"\boxed{4}"})
    assert len(loaded.train_rows + loaded.eval_rows) == 2
    assert capsys.readouterr().err.count("math-verify is not installed") == 1


@pytest.mark.parametrize(("row", "message"), [
    ({"problem": "2+2?"}, "a row needs a field 'answer', or a 'solution'"),
    ({"problem": "2+2?", "answer": ""}, r"rows\.jsonl:1: .*no completion can be right"),
    ({"problem": "2+2?", "solution": "It is 4."}, r"rows\.jsonl:1: .*no completion can be right"),
    ({"text": "2+2?", "answer": "4"}, r"rows\.jsonl:1: the field 'problem' is missing"),
])  # fmt: skip
def test_rows_without_a_gold_answer_are_refused(load, row, message):
    with pytest.raises(UserError, match=message):
        load(row, {"problem": "1+1?", "answer": "2"})


@pytest.mark.skipif(not REAL.exists(), reason="the real files are not there")
@pytest.mark.parametrize(
    ("name", "number"),
    [("math500", 500), ("aime24", 30), ("amc", 83), ("minerva", 272), ("olympiad_bench", 675), ("asdiv", 1788)],
)
def test_every_real_gold_is_its_own_answer(name, number):
    rows = read_lines(REAL / f"{name}.jsonl")
    assert len(rows) == number
    assert [row["answer"] for row in rows if task.reward(row, task.solution(row))["correct"] != 1] == []


@needs_library
def test_what_is_prepared_is_not_asked_again(judge):
    rows = [{"answer": "19q"}, {"answer": "23q"}]
    texts = [r"\boxed{18q+q}", r"\boxed{22q+q}"]
    before = judge.num_asked
    task.prepare(rows, texts)
    assert judge.num_asked == before + 2
    assert [task.reward(row, text)["correct"] for row, text in zip(rows, texts, strict=True)] == [1, 1]
    assert judge.num_asked == before + 2
