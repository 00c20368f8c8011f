"""The instructions task: which texts follow an instruction, solutions, data and figures."""

import json
import time
from collections import Counter
from pathlib import Path

import data_files
import pytest

from tasks import instructions
from tasks.verdicts.instruction_kinds import KINDS, check, language_of
from viewer.table import wilson

from harness.data.rows import Row
from harness.evaluation.figures import mean_with_interval, shares
from harness.task.row_checks import try_solutions
from harness.task.scorer import Scorer
from harness.task.task_file import TaskFile

LIMITS = ("punctuation:no_comma", "keywords:forbidden_words")
ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT.parent / "shared" / "data" / "ifeval" / "ifeval.jsonl"


def decisions() -> list[tuple[str, dict, str, int]]:
    """The table of the task's docstring: kind, arguments, text, and whether it follows."""
    found, ids = [], {kind.partition(":")[2]: kind for kind in KINDS}
    for line in instructions.__doc__.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 7 and cells[1] in ids:
            kind, arguments, *columns = cells[1:-1]
            for texts, follows in zip(columns, (1, 0, 0), strict=True):
                for text in filter(None, texts.split(" ~ ")):
                    text = text.replace("\\n", "\n")
                    text = text.encode("ascii").decode("unicode_escape") if "\\u" in text else text
                    found.append((ids[kind], eval(f"dict({arguments})"), text, follows))
    return found


@pytest.mark.parametrize(("kind", "kwargs", "text", "follows"), decisions())
def test_the_table_of_decisions_holds(kind, kwargs, text, follows):
    assert check(kind, kwargs, text) == follows
    row = {"prompt": "", "instruction_id_list": [kind, kind], "kwargs": [kwargs, kwargs | {"num_sections": None}]}
    if kind != "detectable_format:multiple_sections":
        assert (instructions.feedback(row, text) == "") == follows
        assert instructions.reward(row, text)["correct"] == instructions.reward(row, text)["followed"] == follows


def test_feedback_has_the_measured_numbers_and_each_sentence_once():
    words, letters = "length_constraints:number_words", "keywords:letter_frequency"
    asked = [
        (words, {"num_words": 4}),
        (words, {"num_words": 7, "relation": "less than"}),
        ("punctuation:no_comma", {}),
    ]
    asked += [(letters, {"letter": letter, "let_frequency": 3, "let_relation": how, "num_words": None})
              for letter, how in (("t", "at least"), ("a", "less than"))]  # fmt: skip
    row = dict(zip(("instruction_id_list", "kwargs"), zip(*asked, strict=True), strict=True))
    assert instructions.feedback(row, "tea, at \u0430 spa") == (
        'It must have no commas. It has 2 letters "t", but must have at least 3. It has 4 letters "a", but must '
        "have at most 2."
    )
    assert instructions.feedback(row, "one two to three tatters in all").startswith(
        "It has 7 words, but must have 4 to 6."
    )
    assert instructions.feedback(row, "...") == "It has no words."


def test_the_table_was_read():
    assert len(decisions()) > 95
    for kind in KINDS:
        assert {follows for other, *_, follows in decisions() if other == kind} == {0, 1}


@pytest.mark.parametrize("text", ["", " \n", ".", "***", '""', "<<>>", "[]", "\u200b", "!?", "- \n- "])
def test_a_text_without_letters_or_digits_follows_nothing(text):
    for kind, kwargs, *_ in decisions():
        assert not check(kind, kwargs, text)


def test_words_of_other_scripts_are_found():
    word = "\u0440\u0435\u043a\u0430"
    assert not check("keywords:forbidden_words", {"forbidden_words": [word]}, f"{word} 1")
    assert not check("keywords:frequency", {"keyword": word, "frequency": 1, "relation": "less than"}, f"{word} 1")
    assert check("keywords:existence", {"keywords": [word]}, f"{word} 1")
    assert not check("keywords:forbidden_words", {"forbidden_words": ["art"]}, "a\ufe0frt")


@pytest.mark.parametrize(("text", "rewards"), [
    ("bread is warm", (1, 1, 1)),
    ("Sure\nbread is warm", (0, 0.5, 1)),
    ("bread is warm\nBye, then", (0, 0, 1)),
    ("Sure,\nbread is warm\nBye", (0, 0, 1)),
    ("Bread is warm\nbread, warm", (0, 0, 1)),  # each instruction by another variant
    ("bread, Bread", (0, 0, 0)),
    ("", (0, 0, 0)),
])  # fmt: skip
def test_loose_accuracy_leaves_out_the_first_and_the_last_line(text, rewards):
    ids = ["change_case:english_lowercase", "punctuation:no_comma"]
    found = instructions.reward({"instruction_id_list": ids, "kwargs": [{}, {}]}, text)
    assert (found["correct"], found["followed"], found["loose"]) == rewards


def test_loose_accuracy_leaves_out_asterisks():
    row = {"instruction_id_list": ["startend:end_checker"], "kwargs": [{"end_phrase": "the end"}]}
    assert instructions.reward(row, "So: **the end**") == {"correct": 0, "followed": 0, "loose": 1, "on_topic": 0}


def test_a_description_shows_a_list_of_words():
    assert instructions.describe({}, "warm warm warm warm") == {"words": 4, "distinct": 0.25}
    assert instructions.describe({}, "Warm bread is good.") == {"words": 4, "distinct": 1}
    assert instructions.describe({}, "") == {"words": 0, "distinct": 0}


@pytest.mark.parametrize(("topic", "text", "names_it"), [
    ("bread", "Warm BREAD.", 1), ("breads", "Warm bread is good.", 1), ("knives", "A knife.", 1), ("bread", "", 0),
    ("bread", "breadth", 0), (None, "Warm bread is good.", 0), ("", "so", 0),
])  # fmt: skip
def test_a_text_that_names_its_topic_is_on_topic(topic, text, names_it):
    row = {"topic": topic, "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    assert instructions.reward(row, text)["on_topic"] == names_it


@pytest.mark.parametrize(("ids", "kwargs", "problem"), [
    (["keywords:nothing"], [{}], "none of the 25 kinds"),
    ([], [], "instruction_id_list is empty"),
    (["punctuation:no_comma"], [], "shorter"),
])  # fmt: skip
def test_what_is_no_row_is_refused(ids, kwargs, problem):
    with pytest.raises(ValueError, match=problem):
        instructions.reward({"prompt": "", "instruction_id_list": ids, "kwargs": kwargs}, "bread")


def test_degenerate_texts_take_little_time():
    began = time.monotonic()
    for piece in ("a", "[", "<<", "*", "<<a>", ". ", ".", "((", "\n- ", "a\n\n", "{", "[1,", "P.P.", "Day 1"):
        for kind, kwargs, *_ in decisions():
            check(kind, kwargs, piece * (4000 // len(piece)))
    assert time.monotonic() - began < 60


# Rows -----------------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict]:
    return [Row(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_bundled_rows_have_solutions_and_share_neither_topics_nor_kinds():
    train, heldout = read(instructions.TRAIN_DATA), read(instructions.EVAL_DATA)
    assert Counter(row["split"] for row in train + heldout) == {"train": 1024, "topics": 128, "kinds": 128}
    for row in train + heldout:
        text = instructions.solution(row)
        rewards = instructions.reward(row, text)
        assert rewards["correct"] == rewards["followed"] == rewards["loose"] == 1
        assert row["topic"] in row["prompt"]
        assert row["instruction_id_list"][0].endswith(row["kind"])
    assert not {row["topic"] for row in train} & {row["topic"] for row in heldout}
    kinds = {
        split: {kind for row in train + heldout if row["split"] == split for kind in row["instruction_id_list"]}
        for split in ("train", "topics", "kinds")
    }
    assert kinds["topics"] == kinds["train"]
    assert not kinds["train"] & kinds["kinds"]
    assert (len(kinds["train"]), len(kinds["kinds"])) == (9, 6)
    assert instructions.TRAIN_DATA.stat().st_size + instructions.EVAL_DATA.stat().st_size < 600_000


def test_the_bundled_rows_are_made_byte_for_byte(tmp_path, monkeypatch, load_script):
    monkeypatch.setattr(data_files, "DATA", tmp_path)
    load_script("imitation/tiny_policy/make_instructions.py").main()
    for name in ("instructions.jsonl", "instructions_heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (ROOT / "data" / name).read_bytes()


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published prompts are not here")
def test_published_rows_can_be_used():
    rows = read(PUBLISHED)
    names = {name for row in rows for kwargs in row["kwargs"] for name in kwargs}
    texts, impossible = [instructions.solution(row) for row in rows], []
    assert (len(rows), sum(text is not None for text in texts)) == (541, 504)
    for row, text in zip(rows, texts, strict=True):
        full = row | {"kwargs": [dict.fromkeys(names) | kwargs for kwargs in row["kwargs"]]}
        assert instructions.reward(full, text or "") == instructions.reward(row, text or "")
        assert instructions.solution(full) == text
        row.place = "ifeval.jsonl"
        repeated = [kwargs["prompt_to_repeat"] for kwargs in row["kwargs"] if "prompt_to_repeat" in kwargs]
        limits = [one for one in instructions.instructions(row) if one[0] in LIMITS or "less than" in one[1].values()]
        impossible += [row["key"]] if repeated and not all(check(*limit, repeated[0]) for limit in limits) else []
    assert impossible == [1627, 3369, 3371, 3718, 374]  # the request to repeat breaks another instruction
    try_solutions(Scorer(TaskFile(instructions, "instructions")), rows)


# Figures --------------------------------------------------------------------------------------------------------------

NAMES = ("prompt_level_strict_acc", "inst_level_strict_acc", "prompt_level_loose_acc", "inst_level_loose_acc")


def shares_of(rows: list[dict], texts: list[str]) -> dict[str, dict]:
    return shares(list(map(TaskFile(instructions, "instructions").tally, rows, texts)))


def test_the_four_figures_of_ifeval_are_shares_of_prompts_and_of_instructions():
    lower, comma = "change_case:english_lowercase", "punctuation:no_comma"
    answers = [  # the instructions that are followed, strict and loose
        ([lower, comma], "Sure\nbread is warm"),  # 01, 11
        ([comma], "bread"),  # 1, 1
        ([lower, comma, "startend:quotation"], '"Bread, Bread"'),  # 001, 001
        ([comma], "a, b"),  # 0, 0
    ]
    rows = [{"prompt": "", "instruction_id_list": ids, "kwargs": [{}] * len(ids)} for ids, _ in answers]
    found = shares_of(rows, [text for _, text in answers])
    assert [found[name]["value"] for name in NAMES] == [1 / 4, 3 / 7, 2 / 4, 4 / 7]
    kinds = {name: share["value"] for name, share in found.items() if name not in NAMES}
    assert kinds == {"english_lowercase": 0, "no_comma": 2 / 4, "quotation": 1}
    assert [found[NAMES[0]][bound] for bound in ("low", "high")] == pytest.approx(wilson(1 / 4, 4))
    errors = [1 - 3 / 7 * 2, 1 - 3 / 7, 1 - 3 / 7 * 3, 0 - 3 / 7]  # for a ratio of sums, clustered by prompt
    assert found[NAMES[1]]["standard_error"] == pytest.approx((sum(e * e for e in errors) / 3 / 4) ** 0.5 / (7 / 4))
    none, every = shares_of(rows, [""] * 4), shares_of(rows[1:2] * 4, ["bread"] * 4)
    assert {share["value"] for share in none.values()} == {0.0}
    assert every[NAMES[1]] == mean_with_interval([1.0] * 4)


# Languages ------------------------------------------------------------------------------------------------------------

TONGUES = """en All human beings are born free and equal in dignity and rights.
de Alle Menschen sind frei und gleich an Würde und Rechten geboren.
es Todos los seres humanos nacen libres e iguales en dignidad y derechos.
pt Todos os seres humanos nascem livres e iguais em dignidade e em direitos.
fr Tous les êtres humains naissent libres et égaux en dignité et en droits.
it Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti.
fi Kaikki ihmiset syntyvät vapaina ja tasavertaisina arvoltaan ja oikeuksiltaan.
sw Watu wote wamezaliwa huru, hadhi na haki zao ni sawa.
vi Mọi người sinh ra đều tự do và bình đẳng về nhân phẩm và quyền lợi.
ru Все люди рождаются свободными и равными в своём достоинстве и правах.
uk Всі люди народжуються вільними і рівними у своїй гідності та правах.
ar يولد جميع الناس أحرارا متساوين في الكرامة والحقوق.
ur تمام انسان آزاد اور حقوق و عزت کے اعتبار سے برابر پیدا ہوئے ہیں۔
hi सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।
bn রুটি গরম এবং আমরা এটি মাখন দিয়ে খাই।
ko 빵이 따뜻하고 우리는 버터와 함께 먹습니다."""  # noqa: RUF001


def test_languages_are_told_apart():
    for line in TONGUES.splitlines():
        assert language_of(line[3:]) == line[:2]
