"""The bundled task: its reward, its files, and the conversations of the warm start.

Questions are read here by a parser that shares no code with what wrote them.
"""

import doctest
import hashlib
import json
import random
import re
from collections import Counter

import pytest

from common.datagen import arithmetic_grammar as grammar
from common.tasks import arithmetic as task

SHA256 = {
    task.TRAIN_DATA: "77c4426450807ab07891a64fcc64b22543ceb8807bc8e6e6570bf7bc40164a0e",
    task.EVAL_DATA: "c00d58637a58bf41aab71d2dea7903a52de9534fa43410322ec2a3ad650fc9d8",
}

# What a question may ask in words, as an expression in symbols
PHRASES = {
    r"Multiply (\d+) by (\d+)\.": r"\1*\2",
    r"What is the product of (\d+) and (\d+)\?": r"\1*\2",
    r"Add (\d+) and (\d+)\.": r"\1+\2",
    r"What is the sum of (\d+) and (\d+)\?": r"\1+\2",
    r"Subtract (\d+) from (\d+)\.": r"\2-\1",
    r"Take (\d+) away from (\d+)\.": r"\2-\1",
}
FRAME = (
    r"(?:What is|Compute|Calculate|Work out|How much is|Find|Solve|Write|Copy|Repeat|Say)? ?"
    r"(\d.*?\d)(?:\?| in symbols\.|\.| = \?)"
)
SYMBOLS = {"plus": "+", "minus": "-", "times": "*"}

Terms = list[tuple[int, tuple[int, ...]]]  # sign and factors of each summand


def parse(text: str) -> Terms:
    """The summands of a question or expression, products before sums; anything else is an error."""
    for phrase, symbols in PHRASES.items():
        if re.fullmatch(phrase, text):
            text = re.sub(phrase, symbols, text)
    if framed := re.fullmatch(FRAME, text):
        text = framed.group(1)
    text = re.sub("plus|minus|times", lambda word: SYMBOLS[word.group()], text).replace(" ", "")
    assert re.fullmatch(r"\d+([+\-*]\d+)*", text), text
    terms: Terms = []
    for sign, product in re.findall(r"([+-]?)(\d+(?:\*\d+)*)", text):
        terms.append((-1 if sign == "-" else 1, tuple(int(number) for number in product.split("*"))))
    return terms


def value(terms: Terms) -> int:
    total = 0
    for sign, factors in terms:
        product = 1
        for factor in factors:
            product *= factor
        total += sign * product
    return total


def up_to_order(terms: Terms) -> tuple:
    """The same for every order of commuting terms and factors."""
    return tuple(sorted((sign, tuple(sorted(factors))) for sign, factors in terms))


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict]]:
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in SHA256}


@pytest.fixture(scope="module")
def conversations(load_script) -> dict[str, list[tuple[str, str]]]:
    """Question and target of 21,000 conversations of the warm start, by lesson."""
    counts = {"copying": 4000, "reasoning": 3000, "answering": 14000}
    warm_start = load_script("experiment_sft/warm_start.py")
    turns = [
        tuple(message["content"] for message in row["messages"])
        for row in warm_start.conversations(*counts.values(), seed=0)
    ]
    assert len(turns) == sum(counts.values())
    lessons = iter(turns)
    return {lesson: [next(lessons) for _ in range(count)] for lesson, count in counts.items()}


# The reward ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gold", "text", "correct", "well_formed"),
    [
        ("58", "<answer>58</answer>", 1, 1),
        ("58", "<think>20+38=58</think><answer>58</answer>", 1, 1),
        ("58", "  <think>20+38=58</think>\n<answer> 58 </answer>\n", 1, 1),
        ("58", "<answer>59</answer>", 0, 1),
        # spellings of a number
        ("1234", "<answer>1,234</answer>", 1, 1),
        ("1,234", "<answer>1234</answer>", 1, 1),
        ("1234567", "<answer>1,234,567.00</answer>", 1, 1),
        ("1234", "<answer>12,34</answer>", 0, 1),
        ("58", "<answer>+58</answer>", 1, 1),
        ("58", "<answer>58.0</answer>", 1, 1),
        ("58", "<answer>58.</answer>", 1, 1),
        ("58", "<answer>058</answer>", 1, 1),
        ("58", "<answer>58.5</answer>", 0, 1),
        ("58", "<answer>-58</answer>", 0, 1),
        ("-58", "<answer>-58</answer>", 1, 1),
        ("-58", "<answer>- 58</answer>", 1, 1),
        ("-58", "<answer>58</answer>", 0, 1),
        ("0", "<answer>-0</answer>", 1, 1),
        (58, "<answer>58</answer>", 1, 1),  # a number instead of a string in the data
        ("x + 1", "<answer>x+1</answer>", 1, 1),
        # no credit for a near miss
        ("58", "<answer>158</answer>", 0, 1),
        ("58", "<answer>5</answer>", 0, 1),
        ("58", "<answer>20+38</answer>", 0, 1),
        ("58", "<answer>the answer is 58</answer>", 0, 1),
        ("58", "<answer></answer>", 0, 1),
        # more than one guess
        ("58", "<answer>58</answer><answer>58</answer>", 0, 0),
        ("58", "<answer>58</answer><answer>59</answer>", 0, 0),
        ("58", "<answer>59</answer><answer>58</answer>", 0, 0),
        ("58", "<think><answer>58</answer></think><answer>58</answer>", 0, 0),
        # an answer inside the thought
        ("58", "<think><answer>58</answer></think>", 0, 0),
        ("58", "<think>20+38=58 <answer>58</answer>", 0, 0),  # the thought never ends
        ("58", "<think><answer>58</think></answer>", 0, 0),
        ("58", "<think>20+38=58</think>", 0, 0),
        # broken tags
        ("58", "58", 0, 0),
        ("58", "", 0, 0),
        ("58", "<answer>58", 0, 0),
        ("58", "58</answer>", 0, 0),
        ("58", "</answer>58<answer>", 0, 0),
        ("58", "<answer><answer>58</answer></answer>", 0, 0),
        ("58", "<answer><b>58</b></answer>", 0, 0),
        ("58", "<ANSWER>58</ANSWER>", 0, 0),
        # right, and not well-formed
        ("58", "It is <answer>58</answer>", 1, 0),
        ("58", "<answer>58</answer> I think.", 1, 0),
        ("58", "<think>a</think><think>b</think><answer>58</answer>", 1, 0),
        ("58", "20+38=58</think><answer>58</answer>", 1, 0),
        ("58", "<answer>58</answer><think>20+38=58</think>", 1, 0),
    ],
)
def test_the_reward_counts_one_answer_outside_the_thought(gold, text, correct, well_formed):
    """The answer must be right for "correct", and the text well-formed for "format"."""
    row = {"question": "What is 20 plus 38?", "answer": gold}
    assert task.reward(row, text) == {"correct": correct, "format": well_formed}


def test_the_question_does_not_affect_the_reward():
    """An answer in the prompt earns nothing, and tags in the prompt cost nothing."""
    for question in ("", "What is 58?", "<answer>59</answer> Is that so? <think>"):
        row = {"question": question, "answer": "58"}
        assert task.reward(row, "<answer>58</answer>")["correct"] == 1
        assert task.reward(row, "")["correct"] == 0


def test_only_the_gold_answer_of_a_bundled_row_is_rewarded(rows):
    """With a thousands comma and a trailing .0; the next integer is not rewarded."""
    for row in [row for file in rows.values() for row in file]:
        answer = int(row["answer"])
        assert task.reward(row, f"<think>so</think><answer>{answer:,}.0</answer>") == {"correct": 1, "format": 1}
        assert task.reward(row, f"<answer>{answer + 1}</answer>") == {"correct": 0, "format": 1}


@pytest.mark.parametrize(
    ("text", "is_reasoned"),
    [
        ("<think>20+38=58</think><answer>58</answer>", True),
        ("<answer>58</answer>", False),
        ("<think></think><answer>58</answer>", False),
        ("<think> \n </think><answer>58</answer>", False),
        ("<think>20+38=58 <answer>58</answer>", False),  # never closed
        ("", False),
    ],
)
def test_an_answer_is_reasoned_after_a_closed_thought(text, is_reasoned):
    """If the thought is not empty; every other answer is direct."""
    assert task.describe({}, text) == {"reasoned": float(is_reasoned), "direct": float(not is_reasoned)}


def test_messages_are_the_question_and_any_system_prompt():
    """The system prompt, if there is one, precedes the question."""
    row = {"question": "What is 2+3?", "answer": "5"}
    user = {"role": "user", "content": "What is 2+3?"}
    assert task.messages(row) == [user]
    assert task.messages(row, "Think.") == [{"role": "system", "content": "Think."}, user]


# The bundled files --------------------------------------------------------------------------------------------------


def test_the_bundled_files_are_those_that_their_script_writes(load_script):
    make_rows = load_script("data/make_math_tasks.py").make_rows
    for path, only_pool, num_rows in ((task.TRAIN_DATA, "train", 4096), (task.EVAL_DATA, "heldout", 512)):
        stored = path.read_bytes()
        assert stored == "".join(json.dumps(row) + "\n" for row in make_rows(only_pool, num_rows)).encode()
        assert stored.count(b"\n") == num_rows
        assert hashlib.sha256(stored).hexdigest() == SHA256[path]


def test_every_bundled_answer_is_right(rows):
    for row in [row for file in rows.values() for row in file]:
        terms = parse(row["question"])
        assert str(value(terms)) == row["answer"], row
        numbers = [factor for _, factors in terms for factor in factors]
        assert row["num_terms"] == len(numbers)
        assert row["num_digits"] == max(len(str(number)) for number in numbers)
        assert min(numbers) > 0
        totals = [value(terms[: k + 1]) for k in range(len(terms))]
        assert min(totals) >= 0
        assert max(totals) <= grammar.MAX_TOTAL


def test_every_wording_asks_for_the_sum_that_it_was_made_from():
    rng = random.Random(0)
    wordings = set()
    for kind in grammar.KINDS:
        for wording in range(60):
            drawn = grammar.draw_question(rng, kind, "warm_start")
            question = grammar.Question(drawn.terms, wording)
            text = grammar.render(question)
            assert parse(text) == [(term.sign, term.factors) for term in question.terms]
            assert value(parse(text)) == question.answer
            wordings.add(re.sub(r"\d+( ?([+\-*]|plus|minus|times) ?\d+)+|\d+", "N", text))
    assert len(wordings) == 8 + len(PHRASES)


def test_no_two_questions_of_a_file_are_the_same_up_to_order(rows):
    for file in rows.values():
        keys = Counter(up_to_order(parse(row["question"])) for row in file)
        assert max(keys.values()) == 1


def test_train_heldout_and_warm_start_share_no_question(rows, conversations):
    """Two questions count as the same if they differ only in the order of terms and factors."""
    train, heldout = ({up_to_order(parse(row["question"])) for row in file} for file in rows.values())
    warm_start = {up_to_order(parse(question)) for lesson in conversations.values() for question, _ in lesson}
    assert len(warm_start) > 10_000
    assert not train & heldout
    assert not train & warm_start
    assert not heldout & warm_start


# The warm start -----------------------------------------------------------------------------------------------------


def check_reasoning(reasoning: str, terms: Terms) -> None:
    """Every equation holds, each step starts from the last total, and the steps lead to the answer."""
    steps, checks = reasoning.partition("check")[::2]
    total = None
    for step in steps.split():
        left, _, right = step.partition("=")
        assert value(parse(left)) == int(right), reasoning
        if "*" not in left:
            start = int(re.match(r"\d+", left).group())
            assert start == (value(terms[:1]) if total is None else total), reasoning
            total = int(right)
    assert value(terms) == (int(right) if total is None else total)
    for check in checks.replace("check", " ").split():
        left, _, right = check.partition("=")
        assert value(parse(left)) == int(right), reasoning
        assert int(re.match(r"\d+", left).group()) == value(terms)


def test_every_copied_sum_is_the_sum_in_question(conversations):
    for question, target in conversations["copying"]:
        assert re.fullmatch(r"[\d+*-]+", target)
        assert parse(target) == parse(question)


@pytest.mark.parametrize("lesson", ["reasoning", "answering"])
def test_all_answers_and_equations_of_the_warm_start_are_right(conversations, lesson):
    styles = Counter()
    for question, target in conversations[lesson]:
        terms = parse(question)
        match = re.fullmatch(r"(?:<think>(.+)</think>)?<answer>(\d+)</answer>", target)
        assert match, target
        assert int(match.group(2)) == value(terms), (question, target)
        assert task.reward({"answer": str(value(terms))}, target) == {"correct": 1, "format": 1}
        if match.group(1):
            check_reasoning(match.group(1), terms)
        styles["reasoned" if match.group(1) else "direct"] += 1
        styles["checked"] += "check" in target
    if lesson == "reasoning":
        assert styles["direct"] == 0
    else:  # the policy should know every style, and prefer direct answers
        assert 0.15 < styles["reasoned"] / len(conversations[lesson]) < 0.25
        assert styles["checked"] > 100


def test_the_warm_start_is_the_same_for_the_same_seed(load_script):
    make = load_script("experiment_sft/warm_start.py").conversations
    assert list(make(20, 20, 20, seed=1)) == list(make(20, 20, 20, seed=1))
    assert list(make(20, 20, 20, seed=1)) != list(make(20, 20, 20, seed=2))


def test_the_examples_in_the_warm_start_hold(load_script):
    """Its doctests; pytest itself collects only those of packages."""
    result = doctest.testmod(load_script("experiment_sft/warm_start.py"))
    assert result.attempted >= 4
    assert result.failed == 0
