"""Every solution passes, every wrong answer fails with a sentence that helps, and right answers of another style pass.

answers/NN_name/ has them: wrong_*.py begin with `# says: ` and a part of the sentence; right_*.py must pass.
"""

from pathlib import Path

import pytest

from dojo.child import result_of
from dojo.exercise import KINDS, NUM_HINTS, Exercise, all_exercises
from dojo.judge import Call, judge, load

ANSWERS = Path(__file__).parent / "answers"
EXERCISES = all_exercises()
WRITTEN = [exercise for exercise in EXERCISES if exercise.kind != "predict"]
TRAINED_QUICKLY = 23  # the one bug whose check is in the first tier; the others train for about a second each


def call_here(answer: Path, calls: list[Call]) -> list:
    """In this process: an import of torch less for each answer."""
    module = load(answer)
    return [result_of(module, call) for call in calls]


def answers(prefix: str) -> list:
    found = [
        (exercise, path) for exercise in WRITTEN for path in sorted((ANSWERS / exercise.name).glob(f"{prefix}_*.py"))
    ]
    return [case(*pair, id=f"{pair[0].number:02}-{pair[1].stem}") for pair in found]


def case(exercise: Exercise, *more: Path, id: str = ""):
    is_slow = exercise.kind == "find the bug" and exercise.number != TRAINED_QUICKLY
    return pytest.param(exercise, *more, id=id or exercise.name, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_an_exercise_is_complete(exercise: Exercise):
    assert {*exercise.facts} == {"title", "chapter", "kind", "minutes"}
    assert exercise.kind in KINDS
    assert int(exercise.facts["minutes"]) > 0
    assert len(exercise.hints) == NUM_HINTS
    assert exercise.read("reason.md").strip()
    num_wrong = len([*(ANSWERS / exercise.name).glob("wrong_*.py")])
    num_right = len([*(ANSWERS / exercise.name).glob("right_*.py")])
    assert exercise.kind == "predict" or num_wrong >= 3
    assert exercise.kind != "implement" or num_right >= 2


@pytest.mark.parametrize("exercise", [*map(case, WRITTEN)])
def test_the_solution_passes_and_the_start_does_not(exercise, tmp_path):
    assert judge(exercise, exercise.folder / "solution.py", call_here).sentence == ""
    (tmp_path / "start.py").write_text(exercise.start)
    assert not judge(exercise, tmp_path / "start.py", call_here).is_right


@pytest.mark.parametrize(("exercise", "answer"), answers("wrong"))
def test_a_wrong_answer_fails_with_a_sentence_that_helps(exercise, answer):
    says = answer.read_text().splitlines()[0].removeprefix("# says: ")
    assert says in judge(exercise, answer, call_here).sentence


@pytest.mark.parametrize(("exercise", "answer"), answers("right"))
def test_a_right_answer_of_another_style_passes(exercise, answer):
    assert judge(exercise, answer, call_here).sentence == ""


@pytest.mark.parametrize("exercise", [each for each in EXERCISES if each.kind == "predict"], ids=lambda each: each.name)
def test_a_prediction_has_one_right_letter_and_a_sentence_for_each_other(exercise, tmp_path):
    check, path = load(exercise.folder / "check.py"), tmp_path / "answer.txt"
    for letter in (check.ANSWER, *check.CHOICES, "", "no letter"):
        path.write_text(f" {letter.upper()}\n")
        verdict = judge(exercise, path)
        assert verdict.is_right == (letter == check.ANSWER)
        assert verdict.is_right or verdict.sentence == check.CHOICES.get(letter, verdict.sentence)
    assert len(check.CHOICES) >= 2
