"""The longer sums are what their script makes and shares no sum with others; their thoughts are read as they are."""

import doctest
import json
import random
import re
from pathlib import Path

import pytest

from common.datagen.arithmetic_grammar import MAX_TOTAL, Question, Term, draw_question, pool, render
from common.tasks.arithmetic import reward

ROOT = Path(__file__).resolve().parents[2]
FILES = {"long_sums": "train", "long_sums_heldout": "heldout"}


@pytest.fixture(autouse=True)
def beside_scripts(monkeypatch):
    """Some scripts import what is beside them."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (ROOT / "data" / f"{name}.jsonl").read_text("utf-8").splitlines()]


def question_of(text: str) -> Question:
    """A sum as it is asked, without products; parsed here by other means than in benchmarks/thoughts.py."""
    words = re.findall(r"\d+|[-+]|plus|minus", text)
    numbers = [int(word) for word in words[::2]]
    signs = [1, *(1 if word in ("+", "plus") else -1 for word in words[1::2])]
    return Question(tuple(Term(sign, (number,)) for sign, number in zip(signs, numbers, strict=True)))


@pytest.mark.parametrize("name", FILES)
def test_long_sums_are_what_their_script_makes(load_script, name):
    script = load_script("data/make_long_sums.py")
    only_pool, num_rows = script.FILES[name]
    rows = read(name)
    part = script.make_rows(only_pool, min(num_rows, 128))  # the beginning of a larger file
    assert part == rows[: len(part)]
    assert len(rows) == 6 * num_rows
    lengths = [row["num_terms"] for row in rows]
    assert lengths == [*range(5, 11)] * (len(rows) // 6)


def test_long_sums_are_right_and_in_no_other_pool():
    """A key is in one pool only: no sum is in two files, or in the warm start, whose pool is a third one."""
    for name, own in FILES.items():
        questions = [question_of(row["question"]) for row in read(name)]
        assert {pool(question) for question in questions} == {own}
        assert len({question.key for question in questions}) == len(questions)
        for row, question in zip(read(name), questions, strict=True):
            values = [term.value * term.sign for term in question.terms]
            totals = [sum(values[:end]) for end in range(1, len(values) + 1)]
            assert (str(totals[-1]), len(values)) == (row["answer"], row["num_terms"])
            assert 0 <= min(totals) <= max(totals) <= MAX_TOTAL
    assert max(row["num_terms"] for name in ("math_tasks", "math_tasks_heldout") for row in read(name)) < 5


def test_right_thoughts_have_a_style_and_no_mistake(load_script):
    """Those of the warm start's lessons; with one digit of the thought changed there is a mistake, or a wrong check."""
    thoughts, lessons = load_script("benchmarks/thoughts.py"), load_script("experiment_sft/warm_start.py")
    rng = random.Random(0)
    for _ in range(200):
        question = draw_question(rng, (rng.randint(5, 10), 2, False), "warm_start")
        terms = thoughts.terms_of(render(question))
        assert terms == [term.sign * term.value for term in question.terms]
        for style, thought in (
            ("step by step", lessons.step_by_step(question)),
            ("careful", lessons.careful(question, rng)),
        ):
            text = f"<think>{thought}</think><answer>{question.answer}</answer>"
            steps = thoughts.steps_of(text)
            assert not any(step.is_wrong for step in steps)
            assert sum(step.is_check for step in steps) == thought.count("check")
            assert thoughts.first_mistake(text, terms) == "none"
            assert thoughts.keeps_order(text, terms)
            has_parts = any(term.value > 10 and term.value % 10 for term in question.terms[1:])
            assert thoughts.style_of(steps, terms) == (style if has_parts else "neither")
            work = thought.partition(" check")[0]
            place = rng.choice([at for at, character in enumerate(work) if character.isdigit()])
            changed = work[:place] + str((int(work[place]) + rng.randint(1, 9)) % 10) + work[place + 1 :]
            assert (
                thoughts.first_mistake(f"<think>{changed}</think><answer>{question.answer}</answer>", terms) != "none"
            )


def test_a_thought_without_a_mistake_earns_the_reward(load_script):
    """Of texts with all kinds of faults, those without a mistake are right, and what is wrong has one."""
    thoughts = load_script("benchmarks/thoughts.py")
    row, terms = {"answer": "58"}, [47, 29, -18]
    texts = {
        "<think>47+29=76 76-18=58</think><answer>58</answer>": "none",
        "<think>47+20=67 67+9=76 76-18=58</think><answer>58</answer>": "none",
        "<think>47+29=76 76-18=58</think><answer>59</answer>": "answer",
        "<think>47+29=76 76-18=58</think>": "form",
        "<think>47+29=76 76-18=58</think><answer>58</answer><answer>58</answer>": "form",
        "<think>47-18=29 29+20=49 49+9=58</think><answer>58</answer>": "none",
        "<think>29+47=76 76-10=66 66-8=58</think><answer>58</answer>": "none",
        "<think>47+9=56 56+20=76 76-18=58</think><answer>58</answer>": "operand",
        "<think>47+29=76 76-18=58 58+1=59</think><answer>58</answer>": "operand",
        "<think>47-29=18</think><answer>58</answer>": "operand",
        "<think>18+29=47</think><answer>58</answer>": "operand",
        "<think>47*29=76</think><answer>58</answer>": "operand",
        "<think>47+29=76 76-18=58 58-18=40</think><answer>58</answer>": "operand",
        "<think>47+20=67 67-18=49</think><answer>58</answer>": "left out",
        "<think>47+20=67</think><answer>58</answer>": "left out",
        "<answer>58</answer>": "left out",
        "": "left out",
    }
    for text, mistake in texts.items():
        assert thoughts.first_mistake(text, terms) == mistake, text
        assert mistake != "none" or reward(row, text)["correct"] == 1


def test_the_examples_of_the_benchmark_are_right(load_script):
    for name in ("thoughts", "teaches_page"):
        result = doctest.testmod(load_script(f"benchmarks/{name}.py"))
        assert result.attempted > 0
        assert result.failed == 0


def test_the_tables_of_the_page_are_those_of_its_data(load_script):
    page_of = load_script("benchmarks/teaches_page.py")
    page = (ROOT / "docs" / "what_rl_teaches.md").read_text(encoding="utf-8")
    made = page_of.tables(page_of.read_results())
    assert len(made) > 6
    for name, table in made.items():
        assert table in page, name
