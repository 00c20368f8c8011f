"""The evaluation package: intervals, votes, restarts after a kill, batches, comparisons, and the page of failures."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.keyed import keyed_generator
from common.trajectory import Trajectory
from viewer.table import wilson

import harness.evaluation.figures
from harness.data.benchmarks import renamed
from harness.data.rows import Row
from harness.evaluation.comparison import compare, read_results
from harness.evaluation.completions import Completions, make_batches
from harness.evaluation.failures import failures
from harness.evaluation.figures import (
    GREEDY,
    Answer,
    Answers,
    difference,
    figures,
    majority,
    mean_with_interval,
)
from harness.evaluation.held_out import evaluate_held_out
from harness.evaluation.session import begin, evaluate, load_questions
from harness.evaluation.suite import parts
from harness.models.loading import load_policy
from harness.task.task import load_task

SOME_ROWS = [{"question": f"What is {number}+{number}?", "answer": str(2 * number)} for number in range(1, 7)]

# A random policy never answers right; this task's verdict depends on the length of its text
LENGTHS = """
from tasks.arithmetic import messages
REWARD_WEIGHTS = {"correct": 1.0, "brief": 0.0}
def reward(row, text):
    return {"correct": float(len(text) % 3 == int(row["answer"]) % 3), "brief": 1 / (1 + len(text))}
def describe(row, text):
    return {"even": float(len(text) % 2 == 0)}
def vote(row, text):
    return str(len(text) % 3)
"""


# Intervals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("right", "count"), [(0, 1), (1, 1), (3, 10), (60, 256), (256, 256), (0, 30)])
def test_of_single_answers_the_interval_is_wilsons(right, count):
    found = mean_with_interval([1.0] * right + [0.0] * (count - right))
    assert found["value"] == right / count
    assert bounds(found) == pytest.approx(wilson(right / count, count), abs=1e-12)


def bounds(estimate: dict) -> tuple[float, float]:
    return estimate["low"], estimate["high"]


def test_samples_that_always_agree_are_worth_one_answer():
    for single in ([1.0] * 12 + [0.0] * 18, [1.0] * 30):
        assert mean_with_interval(single, answers_per_question=8) == mean_with_interval(single)


def test_samples_of_equal_questions_are_worth_all_answers():
    shares = keyed_generator("shares", 0).binomial(8, 0.4, size=1000) / 8
    found = mean_with_interval(shares.tolist(), answers_per_question=8)
    assert bounds(found) == pytest.approx(wilson(shares.mean(), 8000), abs=2e-3)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 64))
def test_an_interval_is_inside_0_to_1_and_holds_the_mean(values, answers):
    found = mean_with_interval(values, answers)
    low, high = bounds(found)
    assert 0 <= low <= found["value"] <= high <= 1 + 1e-12
    assert high - low > 0  # also if all questions are equal


def test_intervals_hold_the_truth_where_naive_ones_do_not():
    """40 questions of unequal difficulty with 8 samples each."""
    generator = keyed_generator("coverage", 0)
    held = naive = 0
    for _ in range(200):
        shares = generator.binomial(8, generator.beta(0.4, 0.6, size=40)) / 8
        low, high = bounds(mean_with_interval(shares.tolist(), answers_per_question=8))
        held += low <= 0.4 <= high
        low, high = wilson(float(shares.mean()), 320)
        naive += low <= 0.4 <= high
    assert held / 200 > 0.92
    assert naive / 200 < 0.75


def test_a_difference_is_paired_and_has_a_sign():
    generator = keyed_generator("paired", 0)
    hard = generator.random(200)
    before, after = (np.clip(hard + shift, 0, 1) for shift in (0.0, 0.05))
    found = difference(before, after, seed=0)
    assert found["low"] > 0  # every question improved; unpaired, the spread of 200 questions would hide it
    back = difference(after, before, seed=0)
    assert (-back["value"], -back["high"], -back["low"]) == pytest.approx((found["value"], *bounds(found)), abs=1e-12)
    spread = generator.normal(0.1, 1.0, size=400)
    found = difference(np.zeros(400), spread, seed=1)
    reach = 1.96 * found["standard_error"]
    assert bounds(found) == pytest.approx((spread.mean() - reach, spread.mean() + reach), abs=0.01)


# Votes ---------------------------------------------------------------------------------------------------------------


def slow_majority(answers: list, correct: list, k: int) -> float:
    """The mean over all subsets of k samples."""
    values = []
    for subset in itertools.combinations(range(len(answers)), k):
        given = [answers[i] for i in subset if answers[i] is not None]
        most = max(map(given.count, given), default=0)
        winners = {answer for answer in given if given.count(answer) == most}
        worth = [np.mean([correct[i] for i in range(len(answers)) if answers[i] == winner]) for winner in winners]
        values.append(np.mean(worth) if worth else 0.0)
    return float(np.mean(values))


@pytest.mark.parametrize("answers", [
    ["58", "60", "58", None, "58", "61", "60", "60"],  # a tie of right and wrong
    ["58", "60", "60", "60", None, None, None, None],
    ["58"] * 8,
    [None] * 8,
])  # fmt: skip
def test_majority_is_the_mean_over_all_subsets(monkeypatch, answers):
    monkeypatch.setattr(harness.evaluation.figures, "DRAWS", 4000)
    correct = [float(answer == "58") for answer in answers]
    found = majority(answers, correct, seed=0, question=3)
    assert list(found) == [1, 2, 4, 8]
    for k, value in found.items():
        assert value == pytest.approx(slow_majority(answers, correct, k), abs=1e-12 if k in (1, 8) else 0.02)
    assert found[1] == pytest.approx(np.mean(correct))


def answers_of(correct: list[list[float]], given: list[list]) -> Answers:
    sampled = [
        [Answer(c, g, 3, False, {}) for c, g in zip(*group, strict=True)] for group in zip(correct, given, strict=True)
    ]
    return Answers([group[0] for group in sampled], ["" for _ in sampled], sampled)


def test_without_a_way_to_read_right_answers_there_is_no_vote():
    assert "maj@k" not in figures(answers_of([[1.0, 0.0]], [[None, None]]), seed=0)["sampled"]
    assert "maj@k" in figures(answers_of([[1.0, 0.0]], [["x", None]]), seed=0)["sampled"]


def test_an_estimate_from_k_samples_is_worth_n_over_k_answers():
    sampled = figures(answers_of([[1.0, 1.0, 0.0, 0.0]] * 10, [["7", "7", "8", "8"]] * 10), seed=0)["sampled"]
    for k, answers in ((1, 40), (2, 20)):
        found = sampled["pass@k"][str(k)]
        assert bounds(found) == pytest.approx(wilson(found["value"], answers))


@pytest.mark.parametrize("correct", [0.0, 1.0])
def test_all_right_and_all_wrong_of_one_question_have_intervals(correct):
    found = figures(answers_of([[correct] * 4], [["7"] * 4]), seed=0)
    for estimate in (found["greedy"]["accuracy"], found["sampled"]["accuracy"], *found["sampled"]["pass@k"].values()):
        assert estimate["value"] == correct
        assert estimate["high"] - estimate["low"] > 0.5  # one question says hardly anything
    assert found["greedy"]["length"]["mean_if_wrong" if correct else "mean_if_right"] is None


# After a kill ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 20), st.integers(0, 9), st.integers(1, 30))
def test_batches_hold_every_row_once_and_in_order(questions, samples, size):
    batches = make_batches(questions, samples, size)
    numbers = [number for batch in batches for number in batch]
    expected = [(q, GREEDY) for q in range(questions)] + [(q, s) for q in range(questions) for s in range(samples)]
    assert numbers == expected
    assert all(1 <= len(batch) <= size for batch in batches)
    assert not any(len({sample == GREEDY for _, sample in batch}) > 1 for batch in batches)


def trajectory(text: str) -> Trajectory:
    return Trajectory([1, 2], 1, [0, 1], [0.0, -0.1], text=text, rewards={"correct": 1.0}, finish_reason="stop")


def test_after_a_kill_at_any_byte_the_file_becomes_the_same(tmp_path):
    batches = make_batches(3, 2, size=2)
    path = tmp_path / "completions.jsonl"

    def add_missing() -> int:
        completions = Completions(path, batches)
        kept = completions.num_batches
        for batch in completions.left:
            completions.add([trajectory(f'{row} "\u2028\ufffd') for row in batch])
        return kept

    assert add_missing() == 0
    whole = path.read_bytes()
    assert len(list(Completions(path, batches))) == 9
    ends = [0, *itertools.accumulate(map(len, whole.splitlines(keepends=True)))]
    found = set()
    for cut in range(0, len(whole) + 1, 3):
        path.write_bytes(whole[:cut] + b"\0" * (cut % 3))  # as a file system can leave it
        complete = sum(end <= cut for end in (ends[2], ends[3], ends[5], ends[7], ends[9]))
        assert Completions(path, batches).num_batches == complete
        if cut % 331 == 0:
            assert add_missing() == complete
            assert path.read_bytes() == whole
        found.add(complete)
    assert found == {0, 1, 2, 3, 4, 5}


# Evaluations ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config_class(load_script):
    return load_script("evaluate.py").Config


@pytest.fixture
def make_config(config_class, tmp_path):
    """Settings of an evaluation of `SOME_ROWS`, as the command line would resolve them."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SOME_ROWS))
    (tmp_path / "lengths.py").write_text(LENGTHS)
    plain = {"task": str(tmp_path / "lengths.py"), "data": str(tmp_path / "rows.jsonl"), "system_prompt": ""}
    plain |= {"device": "cpu", "dtype": "float32", "max_new_tokens": 12, "num_samples": 4}
    return lambda **changes: config_class(**(plain | changes))


def test_batches_of_1_and_of_64_give_the_same_completions(make_config, make_policy, tokenizer, tmp_path):
    ids, pages = {"end_of_turn_ids": (tokenizer.eos_token_id,), "pad_id": tokenizer.pad_token_id}, []
    policy = make_policy(1024, **ids, tokenizer=tokenizer)
    for size in (1, 64):
        directory = tmp_path / str(size)
        evaluate(make_config(generation_batch_size=size), directory, lambda: policy)
        pages.append((directory / "completions.jsonl").read_text())
    assert pages[0] == pages[1]
    texts = {json.loads(line)["text"] for line in pages[0].splitlines()}
    assert len(texts) > 10


def test_the_figures_are_those_of_a_runs_own_evaluation(make_config, load_script, tmp_path):
    flags = {"max_new_tokens": 16, "system_prompt": "", "eval_prompts": 16, "seed": 5}
    run = load_script("experiment_base/train.py").Config(device="cpu", **flags)
    policy = load_policy(run)
    theirs = evaluate_held_out(run, load_task(run), policy, num_samples=4).metrics
    config = make_config(task="arithmetic", data=None, limit=16, max_new_tokens=16, seed=5)
    ours = evaluate(config, tmp_path / "out", lambda: policy)
    assert 0 < theirs["greedy/accuracy"] < 1
    for mode in ("greedy", "sampled"):
        found = ours[mode]
        assert found["accuracy"]["value"] == pytest.approx(theirs[f"{mode}/accuracy"])
        assert found["length"]["mean"] == pytest.approx(theirs[f"{mode}/length"])
        assert found["cut_off"] == pytest.approx(1 - theirs[f"{mode}/stopped"])
        assert found["means"]["reasoned"] == pytest.approx(theirs[f"{mode}/reasoned"])
    assert ours["sampled"]["accuracy_if"]["reasoned"] == pytest.approx(theirs["sampled/accuracy_reasoned"])
    assert ours["sampled"]["pass@k"]["4"]["value"] == pytest.approx(theirs["sampled/pass@4"])


@pytest.fixture
def begun(make_config, tmp_path):
    """An evaluation that has begun and continues with other settings: begun(config)."""

    def begun(config) -> None:
        begin(tmp_path / "out", config, load_questions(config))

    (tmp_path / "out").mkdir()
    begun(make_config())
    return begun


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"num_samples": 2}, "--num-samples 2 differs from 4 in "),
    ({"limit": 3}, "--limit 3 differs from null in "),
    ({"stop": ("#",)}, r'--stop \["#"\] differs from \[\] in '),
    ({"completion_prefix": "<think>"}, '--completion-prefix "<think>" differs from null in '),
])  # fmt: skip
def test_other_settings_in_the_same_directory_are_refused(make_config, begun, changes, sentence):
    begun(make_config(output="elsewhere", compare="x"))  # settings that may change
    with pytest.raises(UserError, match=f"^{sentence}"):
        begun(make_config(**changes))


@pytest.mark.parametrize("name", ["lengths.py", "rows.jsonl"])
def test_other_contents_in_the_same_directory_are_refused(make_config, begun, tmp_path, name):
    (tmp_path / name).write_text((tmp_path / name).read_text() + "\n")
    with pytest.raises(UserError, match=f"{name} has changed since "):
        begun(make_config())


# Comparisons ---------------------------------------------------------------------------------------------------------


def results_of(greedy: list[float], right: list[int], n: int = 4, first: int = 0, **settings) -> dict:
    questions = [
        {"row": f"row{first + index}", "question": f"question {first + index}", "greedy": g, "mean": c / n, "right": c}
        for index, (g, c) in enumerate(zip(greedy, right, strict=True))
    ]
    return {"path": "there", "sampled": {"n": n}, "questions": questions, **settings}


def test_a_comparison_names_the_questions_that_changed():
    found = compare(results_of([0, 1, 1, 0], [0, 4, 2, 1]), results_of([1, 1, 0, 0], [4, 4, 2, 0]), seed=0)
    assert found["became_right"] == ["question 0"]
    assert found["became_wrong"] == ["question 2"]
    values = {name: estimate["value"] for name, estimate in found["differences"].items()}
    assert values == {"greedy accuracy": 0, "mean@4": (1 - 1 / 4) / 4, "pass@4": 0}
    assert (found["questions"], found["only_here"], found["only_there"]) == (4, 0, 0)


def test_of_two_sets_of_questions_the_shared_ones_are_compared():
    there, here = results_of([0, 0, 0], [0, 0, 0], n=8, seed=0), results_of([1, 1], [2, 2], n=2, first=1, seed=1)
    found = compare(there, here, seed=0)
    assert (found["questions"], found["only_here"], found["only_there"]) == (2, 0, 1)
    assert list(found["differences"]) == ["greedy accuracy", "mean@2 - mean@8", "pass@2"]
    assert found["other_settings"] == {"seed": [0, 1]}
    unequal = results_of([0, 0], [2, 2], n=8), results_of([0, 0], [1, 1], n=2)
    passed = compare(*unequal, seed=0)["differences"]["pass@2"]["value"]
    assert passed == pytest.approx(1 - (1 - 6 * 5 / (8 * 7)))  # with two of the eight samples, not all eight


def test_equal_rows_are_compared_one_by_one():
    there, here = results_of([0, 1], [0, 4]), results_of([1, 1], [4, 4])
    for side in (there, here):
        for entry in side["questions"]:
            entry["row"] = "the same"
    assert compare(there, here, seed=0)["differences"]["greedy accuracy"]["value"] == 0.5


def test_what_is_no_evaluation_or_of_other_questions_cannot_be_compared_with(tmp_path):
    with pytest.raises(UserError, match=r"^--compare .*/nowhere: there is no results\.json"):
        read_results(str(tmp_path / "nowhere"), [])
    for content in ("", "[]", '{"questions": []}'):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(UserError, match=r"^--compare "):
            read_results(str(tmp_path), [])
    (tmp_path / "results.json").write_text(json.dumps(results_of([0, 0, 0], [0, 0, 0])))
    assert read_results(str(tmp_path), ["row1"])["path"] == str(tmp_path / "results.json")
    with pytest.raises(UserError, match=r"it asked 3 other questions, none of these 2"):
        read_results(str(tmp_path), ["row7", "row8"])


# Failures and suites -------------------------------------------------------------------------------------------------


def test_the_page_of_failures_is_plain_text_whatever_was_written():
    hostile = "\x1b]0;title\x07 <answer>\u202e1</answer>\r\n" + "x" * 9000
    row = Row({"question": "What\x1b[31m is 1+1?", "answer": "2\x07"})
    row.question, row.place = row["question"], "rows\x1b.jsonl:1"
    task = SimpleNamespace(eval_rows=[row] * 4, file=SimpleNamespace(right_answer=lambda row: row["answer"]))
    greedy = [Answer(0.5, "\x1b1", 9, False, {}), Answer(1.0, "2", 9, False, {}), Answer(0.0, None, 9, True, {})]
    greedy.append(Answer(0.0, None, 9, False, {}))
    page = failures(task, Answers(greedy, [hostile, "", "", ""], [[greedy[1], greedy[0]], [], [], []]))
    assert all(character.isprintable() or character == "\n" for character in page)
    assert page.startswith("3 of 4 questions: the greedy answer is wrong\n")
    kinds = [line.split(": ")[1] for line in page.splitlines() if line.startswith("question ")]
    assert kinds == ["wrong answer", "cut off", "no answer"]
    assert "samples: 1 of 2 right; 2 (1), \ufffd1 (1)" in page
    assert "characters ..." in page  # a long completion is cut in its middle
    assert len(page) < 6000
    assert "     1  of them with a right answer among the samples" in page


def test_a_suite_reads_its_files_or_the_hub(make_config, tmp_path):
    (tmp_path / "data").mkdir()
    config = make_config(suite="math", data=str(tmp_path / "data"), task="arithmetic", compare="before")
    assert config.task == "math"
    for name in ("math500", "aime24", "amc", "minerva", "olympiad_bench"):
        (tmp_path / "data" / f"{name}.jsonl").write_text("")
    found = parts(config, tmp_path / "out")
    assert found[2].config.data == str(tmp_path / "data/amc.jsonl")
    assert (found[2].directory, found[2].config.compare, found[2].read) == (tmp_path / "out/amc", "before/amc", None)
    hub = parts(dataclasses.replace(config, data=None), tmp_path / "out")
    assert hub[4].config.data == "Hothan/OlympiadBench:OE_TO_maths_en_COMP:train"
    for row in ({"question": "1+1", "final_answer": "2"}, {"problem": "1+1", "answer": "2"}):
        assert found[4].read(row)
        assert row == {"problem": "1+1", "answer": "2"}


def test_fields_of_published_data_are_renamed(make_config, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"asked": "What is 1+1?", "final": "2"}\n')
    config = make_config(task="arithmetic")
    task = load_questions(config, renamed(question="asked", answer="final"))
    assert task.eval_rows == [{"question": "What is 1+1?", "answer": "2"}]
    with pytest.raises(UserError, match=r"rows.jsonl:1: .*'?answer'?"):
        load_questions(config, renamed(question="asked"))
