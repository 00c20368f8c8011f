"""The bundled task: its reward, its files, the longer sums, and the conversations of the warm start.

These tests read questions with a parser that shares no code with their generator.
"""

import itertools
import math
import random
import re
from pathlib import Path

import arithmetic_grammar as grammar
import pytest
from run_files import read_lines

from tasks import arithmetic as task

pytestmark = pytest.mark.all_questions

ROOT = Path(__file__).resolve().parents[2]

# The words of questions, as an expression in symbols
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
    products = re.findall(r"([+-]?)(\d+(?:\*\d+)*)", text)
    return [(-1 if sign == "-" else 1, tuple(map(int, product.split("*")))) for sign, product in products]


def value(terms: Terms) -> int:
    return sum(sign * math.prod(factors) for sign, factors in terms)


def up_to_order(terms: Terms) -> tuple:
    """The same value for every order of commuting terms and factors."""
    return tuple(sorted((sign, tuple(sorted(factors))) for sign, factors in terms))


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict]]:
    return {path.stem: read_lines(path) for path in (task.TRAIN_DATA, task.EVAL_DATA)}


DATA, POOLS = Path(task.EVAL_DATA).parent, {"": "train", "_heldout": "heldout"}
LESSONS = {"copying": 400, "reasoning": 600, "answering": 3000}


@pytest.fixture(scope="module")
def conversations(load_script) -> dict[str, list[tuple[str, str]]]:
    """Question and target of warm-start conversations, by lesson."""
    made = load_script("imitation/tiny_policy/warm_start.py").conversations(*LESSONS.values(), seed=0)
    turns = (tuple(message["content"] for message in row["messages"]) for row in made)
    found = {lesson: [next(turns) for _ in range(count)] for lesson, count in LESSONS.items()}
    imitated = read_lines(DATA / "reasoned_sums.jsonl")
    return found | {"imitated": [tuple(message["content"] for message in row["messages"]) for row in imitated]}


# The reward ---------------------------------------------------------------------------------------------------------

SPELLINGS = "58: +58, 58.0, 58., 058; 1234: 1,234; 1,234: 1234; 1234567: 1,234,567.00; -58: - 58; 0: -0; x + 1: x+1"
NEAR_MISSES = "58: 59, 158, 5, 20+38, the answer is 58, 58.5, -58; 1234: 12,34; -58: 58"


def test_an_answer_is_right_in_every_spelling_and_nothing_else_is():
    assert task.reward({"answer": 58}, "<answer>58</answer>")["correct"] == 1  # a number instead of text
    for table, is_right in ((SPELLINGS, 1), (NEAR_MISSES, 0)):
        for gold, _, answers in (line.partition(": ") for line in table.split("; ")):
            found = [task.reward({"answer": gold}, f"<answer>{answer}</answer>") for answer in answers.split(", ")]
            assert found == [{"correct": is_right, "format": 1}] * len(found), gold


def pairs(text: str, opening: str, closing: str) -> list[tuple[int, int]]:
    """Start and end of each part of a text that opens and then closes, read letter by letter; parts never overlap.

    A part that does not close is not counted.
    """
    found, start = [], None
    for index in range(len(text) + 1):
        if start is None and text[:index].endswith(opening):
            start = index - len(opening)
        elif start is not None and text[start + len(opening) : index].endswith(closing):
            found.append((start, index))
            start = None
    return found


def slow_reward(wanted: str, text: str) -> dict[str, float]:
    """The reward as its docstring defines it, in quadratic time."""
    thoughts = pairs(text + "</think>", "<think>", "</think>")  # an unclosed thought extends to the end
    starts = {start for start, _ in thoughts}
    outside = "".join(
        "<think>" if index in starts else letter
        for index, letter in enumerate(text)
        if index in starts or not any(a <= index < b for a, b in thoughts)
    )
    answers, answers_outside = (
        [x[a + 8 : b - 9] for a, b in pairs(x, "<answer>", "</answer>")] for x in (text, outside)
    )
    is_correct = len(answers) == len(answers_outside) == 1 and task.normalize_answer(answers_outside[0]) == wanted
    rest = text.strip()
    is_well_formed = True
    if rest.startswith("<think>"):
        thought, end, rest = rest[len("<think>") :].partition("</think>")
        is_well_formed = end != "" and not any(tag in thought for tag in ("<think>", "<answer>", "</answer>"))
        rest = rest.lstrip()
    is_well_formed &= rest.startswith("<answer>") and rest.endswith("</answer>")
    is_well_formed &= rest.count("<") == rest.count(">") == 2
    return {"correct": float(is_correct), "format": float(is_well_formed)}


def slow_description(text: str) -> dict[str, float]:
    """The description as its docstring defines it, in quadratic time."""
    before = text.split("<answer>")[0]
    is_reasoned = any(
        before[start:].startswith("<think>")
        and "</think>" in (thought := before[start + 7 :].lstrip())
        and not thought.startswith("<")
        for start in range(len(before))
    )
    return {"reasoned": float(is_reasoned), "direct": float(not is_reasoned)}


TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def test_reward_and_description_are_those_of_a_slow_definition():
    rng = random.Random(0)
    pieces = [*TAGS * 4, *"5x<> \n\u2028", "58", "58", "</", "think>", "<b>", "<answer>58</answer>"]
    outcomes = set()
    for length in rng.choices(range(10), k=4000):
        text = "".join(rng.choices(pieces, k=length))
        if length < 3:
            text = f"<think>{text}</think>{rng.choice(pieces)}<answer>{rng.choice(pieces)}</answer>"
        row = {"question": rng.choice(["What is 58?", "<answer>59</answer> Is that so? <think>"]), "answer": "58"}
        rewards, description = task.reward(row, text), task.describe(row, text)
        assert rewards == slow_reward("58", text), text
        assert description == slow_description(text), text
        outcomes.add((rewards["correct"], rewards["format"], description["reasoned"]))
    assert len(outcomes) == 8


PIECES = [*TAGS, "<think>x", "<answer></answer>", "<think></think>", "<think>   ", "<answer> "]
INSIDE = {"<answer>": ("7", "1,", "1,234", " ", "5 ", "0", "+", "<"), "<think>": ("x", " ", "<", "</", "\n<")}


def test_the_time_of_a_reward_is_linear_in_its_text():
    texts = [piece * 200_000 for piece in PIECES] + ["".join(tag * 200_000 for tag in TAGS)]
    texts += [f"{tag}{piece * 400_000}</answer>" for tag, pieces in INSIDE.items() for piece in pieces]
    for text in [*texts, "".join(random.Random(0).choices([*TAGS, "5", " ", "<"], k=400_000))]:
        assert task.reward({"answer": "58"}, text)["correct"] == 0
        assert task.reward({"answer": text}, "<answer>58</answer>")["correct"] == 0
        assert set(task.describe({}, text).values()) == {0, 1}


def test_only_an_answer_can_be_earned(load_script):
    """Not the text of GSM8K, tags, several lines, or what is no number: such a row would pay for nothing."""
    for answer in ("58", " -1,234.0 ", 58, 58.5, 1e30, "x + 1", "Infinity War"):
        assert task.reward({"answer": answer}, task.solution({"answer": answer}))["correct"] == 1, answer
    lines = ("20+38=58\n#### 58", "#### 58", "", " \n ", "5\n8", "5\u20288", "</answer>", "<b>58</b>", "1 < 2")
    for answer in (*lines, "<answer>58</answer>", math.inf, -math.inf, math.nan, "Infinity", "-Infinity", "NaN"):
        row = {"question": "", "answer": answer}
        texts = [task.solution(row), *(f"<answer>{text}</answer>" for text in ("", answer, str(answer).strip()))]
        assert [task.reward(row, text)["correct"] for text in texts] == [0] * 4, answer
    template = load_script("docs/task_template.py")
    for answer, earned in (("58", 1), (" 58\n", 1), ("", 0), ("</answer>", 0)):
        assert template.reward({"answer": answer}, template.solution({"answer": answer}))["correct"] == earned


# The bundled files --------------------------------------------------------------------------------------------------


def test_the_bundled_files_are_those_that_their_scripts_write(load_script, rows):
    made = load_script("imitation/tiny_policy/make_math_tasks.py").make_rows
    long_sums = load_script("imitation/tiny_policy/make_long_sums.py")
    made_sums = load_script("imitation/tiny_policy/make_reasoned_sums.py").make_rows
    assert made_sums(1200) == read_lines(DATA / "reasoned_sums.jsonl")
    for suffix, only_pool in POOLS.items():
        assert made(only_pool, 256) == rows[f"math_tasks{suffix}"][:256]
        found = read_lines(DATA / f"long_sums{suffix}.jsonl")
        assert long_sums.make_rows(only_pool, 16) == found[:96]
        assert [row["num_terms"] for row in found] == [*range(5, 11)] * (len(found) // 6)


def test_every_bundled_answer_is_right(rows):
    long_sums = [read_lines(DATA / f"long_sums{suffix}.jsonl") for suffix in POOLS]
    for row in itertools.chain(*rows.values(), *long_sums):
        terms = parse(row["question"])
        numbers = [factor for _, factors in terms for factor in factors]
        assert (row["answer"], row["num_terms"]) == (str(value(terms)), len(numbers)), row
        assert row.get("num_digits", 2) == max(len(str(number)) for number in numbers)
        assert min(numbers) > 0
        totals = [value(terms[: k + 1]) for k in range(len(terms))]
        assert 0 <= min(totals) <= max(totals) <= grammar.MAX_TOTAL
        wrong = f"<answer>{int(row['answer']) + 1}</answer>"
        assert [task.reward(row, text)["correct"] for text in (task.solution(row), wrong)] == [1, 0]
    assert max(row["num_terms"] for row in itertools.chain(*rows.values())) < 5  # the long sums have more
    for found, only_pool in zip(long_sums, POOLS.values(), strict=True):
        questions = [grammar.Question(tuple(grammar.Term(*term) for term in parse(row["question"]))) for row in found]
        assert {grammar.pool(question) for question in questions} == {only_pool}
        assert len({question.key for question in questions}) == len(questions)


def test_train_heldout_and_warm_start_share_no_question(rows, conversations):
    train, heldout = ({up_to_order(parse(row["question"])) for row in file} for file in rows.values())
    *warm_start, imitated = ({up_to_order(parse(question)) for question, _ in rows} for rows in conversations.values())
    warm_start = set.union(*warm_start)
    assert [len(train), len(heldout)] == [4096, 512]  # also up to the order of terms
    assert (len(warm_start) > 2000, len(imitated)) == (True, 1200)
    assert not train & heldout
    assert not train & warm_start
    assert not heldout & warm_start
    assert not imitated & (heldout | warm_start)


# Claims about the longer sums -----------------------------------------------------------------------------------------


def test_the_tables_of_the_page_are_those_of_its_data(load_script):
    page_of = load_script("benchmarks/what_rl_teaches.py")
    page = (ROOT / "docs" / "what_rl_teaches.md").read_text(encoding="utf-8")
    made = page_of.tables(page_of.read_results())
    assert len(made) > 6
    for name, table in made.items():
        assert table in page, name
