"""The task of questions about documents: SQuAD's exact match and F1, and the bundled documents and questions.

Its invented worlds: names that can be copied, documents, questions whose answers are in them, and disjoint pools.
"""

import json
import random
import re
import string
from collections import Counter
from pathlib import Path

import pytest
from world_grammar import names

from tasks import qa

DATA = Path(qa.TRAIN_DATA).parent


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def files() -> dict[str, list[dict]]:
    return {name: rows_of(DATA / f"{name}.jsonl") for name in ("qa_documents", "qa_tasks", "qa_tasks_heldout")}


def slow_normalize(text: str) -> str:
    """Letter by letter and word by word, as section 6.1 of the SQuAD paper describes it."""
    letters = [letter for letter in text.lower() if letter not in string.punctuation]
    return " ".join(word for word in "".join(letters).split() if word not in ("a", "an", "the"))


def slow_f1(answer: str, wanted: str) -> float:
    given, gold = slow_normalize(answer).split(), slow_normalize(wanted).split()
    in_both = (Counter(given) & Counter(gold)).total()
    precision, recall = in_both / len(given), in_both / len(gold)
    return 2 * precision * recall / (precision + recall) if in_both else 0.0


def test_f1_and_exact_match_equal_a_slow_version():
    rng, drawn = random.Random(0), Counter()
    words = ["the", "The", "a", "an", "ship", "Ship.", "1,846", "1846", "U.S.", "us", "Fardil's", "of", "of", "theatre"]
    for _ in range(1000):
        answer, wanted = (" ".join(rng.choices(words, k=rng.randint(1, 5))) for _ in range(2))
        if slow_normalize(answer) and slow_normalize(wanted):
            is_match = slow_normalize(answer) == slow_normalize(wanted)
            assert qa.exact_match(answer, wanted) == is_match
            assert qa.f1(answer, wanted) == pytest.approx(1 if is_match else slow_f1(answer, wanted))
            drawn[is_match] += 1
    assert min(drawn.values()) > 10


EQUAL = [
    ("15", "the 15."), ("US", "U.S."), ("1846", "1,846"), ("1000000", "1,000,000"), ("5", "$5"),
    ("5%", "5"), ("-$5", "$-5"), ("-5 degrees", "\u2212 5 degrees"), ("$1.5 million", "1.5 million"),
    ("v1.2.3", "v.1.2.3"), ("O\u2019Brien", "O'Brien"), ("Beyonc\xe9", "Beyonce\u0301"),
    ("\u201cJarce\u201d", "jarce!"), ("10 km", "10\xa0km"), ("1990-91", "1990\u201391"),
    ("24/7", "24/7."), ("1/2", "1\u20442"),
    ("co-operate", "cooperate"), ("COVID-19", "Covid\u201119"), ("1st", "1st."), ("F-16", "F16"),
    ("St. John\u2019s", "St Johns"), ("1990s", "1990's"), ("10:30 am", "10:30 a.m."), ("AC/DC", "ACDC"),
    ("2:1", "2 : 1"), ("1/2", "1 / 2"), ("#1", "1"), ("5,000-6,000", "5000-6000"),
    ("zero\xadwidth", "zerowidth"), ("3-2", "3 \u2013 2"), ("Paris 2024", "Paris \u2013 2024"),
]  # fmt: skip
DIFFERENT = [
    ("$1.5 million", "$15 million"), ("10.5 km", "105 km"), ("-5 degrees", "5 degrees"), ("1/2", "12"), ("3:4", "34"),
    ("10:30", "1030"), ("3-2", "32"), ("1990-91", "199091"), ("24/7", "247"), ("1.2.3", "123"), ("9/11", "911"),
    ("1,5", "15"), ("1846", "1.846"), (".5", "5"), ("$.50", "$50"), ("3+2", "32"), ("10^6", "106"), ("50", "50+"),
    ("12(3)", "123"), ("1/2", "1-2"), ("2:1", "2-1"), ("1,2,3", "123"), ("5%-10%", "510"), ("$5-$6", "$56"),
    ("5$6", "56"), ("(-5, 3)", "(5, 3)"), ("1914-1918", "19141918"), ("192.168.1.1", "19216811"), ("x=-5", "x=5"),
    ("5", "- 5"), ("5", "<5"), ("vitamin", "vitamin-a"), ("1/2", "\xbd2"), ("6'2", "62"), ("#-5", "#5"),
    ("1e-6", "1e6"), ("-\u20ac5", "\u20ac5"), ("- 5 degrees", "5 degrees"), ("10:30", "10.30"), ("1990/91", "1990-91"),
]  # fmt: skip


def test_numbers_are_kept_and_unicode_is_brought_to_one_form():
    for are_equal, pairs in ((True, EQUAL), (False, DIFFERENT)):
        both = [*pairs, *((answer, wanted) for wanted, answer in pairs)]
        assert [pair for pair in both if qa.exact_match(*pair) is not are_equal] == []
        assert [pair for pair in both if (qa.f1(*pair) == 1) is not are_equal] == []
    assert qa.f1("$15 million", "$1.5 million") == 0.5


def test_the_published_exact_match_is_a_component_of_its_own():
    for wanted, answer, correct, squad in (
        ("$1.5 million", "$15 million", 0, 1), ("O\u2019Brien", "O'Brien", 1, 0), ("The", "a", 0, 1), ("5", "5", 1, 1),
    ):  # fmt: skip
        rewards = qa.reward({"answer": wanted}, f"<answer>{answer}</answer>")
        assert (rewards["correct"], rewards["squad"]) == (correct, squad)
    texts = [" The U.S.  Navy's", "a\u2019s \u2013 1,5", "an-a", string.printable, "THE A\u0130", "\uff0ea.b"]
    letters = string.ascii_lowercase
    published = ["us navys", "\u2019s \u2013 15", "ana", string.digits + 2 * letters, "ai\u0307", "\uff0eab"]
    assert list(map(qa.squad, texts)) == published


@pytest.mark.parametrize(("text", "correct", "f1", "well_formed"), [
    ("<answer>1846</answer>", 1, 1, 1),
    ("\n\n<answer> the 1,846. </answer>", 1, 1, 1),  # the calls of two turns are removed
    ("<think>a</think>\n<answer>In 1846</answer>", 0, 2 / 3, 1), ("It is <answer>1846</answer>", 1, 1, 0),
    ("<answer>1846</answer>\n<answer>1846</answer>", 0, 0, 0), ("<think><answer>1846</answer></think>", 0, 0, 0),
    ("1846", 0, 0, 0), ("<answer></answer>", 0, 0, 1), ("<answer>the</answer>", 0, 0, 1), ("<answer>1846", 0, 0, 0),
    ("<answer>-1846</answer>", 0, 0, 1), ("<answer>184.6</answer>", 0, 0, 1),
])  # fmt: skip
def test_rewards(text, correct, f1, well_formed):
    for answer in ("1846", 1846, ["never", "1846"]):
        found = qa.reward({"question": "?", "answer": answer}, text)
        assert found.pop("squad") == (correct or "-1846" in text or "184.6" in text)
        assert found == {"correct": correct, "f1": pytest.approx(f1), "format": well_formed}


@pytest.mark.parametrize("answer", [[], [""], "", "a\nb", ["</answer>"], [None], [True], [["a"]], [{}]])
def test_an_answer_that_cannot_be_given_is_never_right(answer):
    row = {"question": "?", "answer": answer}
    assert qa.reward(row, qa.solution(row))["correct"] == 0


def test_an_answer_of_articles_or_signs_is_compared_as_it_is():
    assert qa.reward({"answer": "The"}, "<answer>the</answer>")["correct"] == 1
    assert qa.reward({"answer": "The"}, "<answer>a</answer>")["correct"] == 0
    assert qa.reward({"answer": "?!"}, "<answer></answer>") == {"correct": 0, "squad": 1, "f1": 0, "format": 1}


def test_the_bundled_files_are_what_the_script_writes(files, load_script):
    script = load_script("imitation/tiny_policy/make_qa_tasks.py")
    worlds = script.make_worlds()
    training, held_out = script.make_questions(worlds)
    written = {"qa_documents": script.make_documents(worlds), "qa_tasks": training, "qa_tasks_heldout": held_out}
    assert written == files


def test_every_answer_is_told_by_its_documents(files):
    texts = {row["id"]: row["text"] for row in files["qa_documents"]}
    assert len(texts) == len(files["qa_documents"]) == 2000
    for row in files["qa_tasks"] + files["qa_tasks_heldout"]:
        first, last = row["supporting"][0], row["supporting"][-1]
        assert re.search(rf"\b{row['answer']}\b", texts[last])
        assert first in row["question"]
        assert first == last or (last in texts[first] and last not in row["question"])
        assert qa.reward(row, qa.solution(row)) == {"correct": 1, "squad": 1, "f1": 1, "format": 1}


def test_new_documents_have_names_that_training_never_shows(files):
    unseen, told = set(names("heldout")), set(re.findall(r"\w+", json.dumps(files["qa_tasks"])))
    new = [row for row in files["qa_documents"] if row["id"] in unseen]
    assert len(new) == 400
    assert not any(row["id"] in told for row in new)
    assert not {row["question"] for row in files["qa_tasks"]} & {row["question"] for row in files["qa_tasks_heldout"]}
    for row in files["qa_tasks"] + files["qa_tasks_heldout"]:
        assert {name in unseen for name in row["supporting"]} == {row["documents"] == "new"}
    assert not set(names("warm_start")) & {row["id"] for row in files["qa_documents"]}


def test_the_first_held_out_questions_are_of_all_kinds(files):
    """The number that an evaluation asks by default; it takes the first ones."""
    kinds = Counter((row["difficulty"], row["documents"]) for row in files["qa_tasks_heldout"][:256])
    assert len(kinds) == 4
    assert min(kinds.values()) > 35
    assert all(sum(qa.describe(row, "").values()) == 1 for row in files["qa_tasks_heldout"])
    assert sum(qa.describe({"answer": 1}, "").values()) == 0


# Invented worlds ------------------------------------------------------------------------------------------------------
