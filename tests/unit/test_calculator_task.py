"""The calculator's task: its questions, that no two pools share one, its rewards, and its bundled files."""

import json
import random

import pytest

from common.datagen.arithmetic_grammar import pool
from common.datagen.calculator_grammar import KINDS, MAX_RESULT, draw_calculator_question
from common.tasks import calculator

pytestmark = pytest.mark.all_questions


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def files() -> dict[str, list[dict]]:
    return {"train": rows_of(calculator.TRAIN_DATA), "heldout": rows_of(calculator.EVAL_DATA)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("only_pool", ["train", "heldout", "warm_start"])
def test_questions_are_of_their_kind_and_pool(kind, only_pool):
    rng = random.Random(1)
    for _ in range(50):
        question = draw_calculator_question(rng, kind, only_pool)
        numbers = [number for term in question.terms for number in term.factors]
        assert pool(question) == only_pool
        assert 0 <= question.answer <= MAX_RESULT
        assert (len(question.terms) == 1) == (kind == "product")
        assert (max(numbers) < 100) == (kind == "easy")


def test_the_bundled_files_are_what_the_script_writes(files, load_script):
    make_rows = load_script("data/make_calculator_tasks.py").make_rows
    for only_pool, rows in files.items():
        assert make_rows(only_pool, len(rows)) == rows
        assert {row["kind"] for row in rows} == set(KINDS)
        assert 0.2 < sum(row["kind"] == "easy" for row in rows) / len(rows) < 0.3


def numbers_in(question: str) -> tuple[int, ...]:
    digits = "".join(letter if letter.isdigit() else " " for letter in question)
    return tuple(sorted(map(int, digits.split())))


def test_training_and_held_out_questions_share_no_hard_sum(files):
    """By the numbers in their texts, so independently of the grammar's own keys."""
    asked = [{numbers_in(row["question"]) for row in rows if row["kind"] != "easy"} for rows in files.values()]
    assert len(asked[0]) > 2000
    assert not asked[0] & asked[1]


def test_every_answer_is_what_python_computes(files):
    words = {" plus ": "+", " minus ": "-", " times ": "*"}
    computed = 0
    for row in files["heldout"]:
        text = row["question"]
        for word, symbol in words.items():
            text = text.replace(word, symbol)
        expression = "".join(letter for letter in text if letter in "0123456789+-*")
        if "+" in expression or "*" in expression or "-" in expression:
            assert str(eval(expression)) == row["answer"]  # of our own file
            computed += 1
        assert calculator.reward(row, calculator.solution(row)) == {"correct": 1.0, "format": 1.0}
    assert computed > 400


@pytest.mark.parametrize(
    ("text", "correct", "well_formed"),
    [
        ("<answer>21330</answer>", 1, 1),
        ("\n<answer>21,330</answer>", 1, 1),  # the call of the first turn is removed
        ("<think>a</think>\n<think>b</think>\n<answer>21330</answer>", 1, 1),
        ("<think>a</think>\nIt is\n<answer>21330</answer>", 1, 0),
        ("<answer>21330</answer>\n<answer>21330</answer>", 0, 0),
        ("<answer>1</answer>\n<answer>21330</answer>", 0, 0),
        ("<think><answer>21330</answer></think>", 0, 0),
        ("<answer>21331</answer>", 0, 1),
        ("<answer>21330", 0, 0),
        ("<think>" * 1000, 0, 0),
        ("", 0, 0),
    ],
)  # fmt: skip
def test_the_reward_of_what_was_said_in_all_turns(text, correct, well_formed):
    row = {"question": "What is 347 times 58 plus 1204?", "answer": "21330", "kind": "chain"}
    assert calculator.reward(row, text) == {"correct": correct, "format": well_formed}


def test_reasoning_is_described():
    assert calculator.describe({}, "<think>2+3=5</think>\n<answer>5</answer>") == {"reasoned": 1.0}
    assert calculator.describe({}, "\n<answer>5</answer>") == {"reasoned": 0.0}
