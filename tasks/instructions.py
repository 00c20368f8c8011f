r"""Instructions that a program can check: the 25 kinds of IFEval (Zhou et al. 2023, arXiv 2311.07911).

A row is as published: a `prompt`, the ids of its instructions in `instruction_id_list`, and the arguments of each in
`kwargs`; null arguments are ignored. The whole completion is the answer. It is right if it follows all instructions
("prompt-level strict"). The table has texts near the border, with ~ between them, and escapes for odd characters:

| kind | arguments | follows | does not | does not (but does for the published checker) |
|---|---|---|---|---|
| number_words | num_words=3, relation="less than" | warm bread ~ well-known | bread is warm | |
| number_words | num_words=3 | bread is warm ~ a a a | well-known | |
| number_sentences | num_sentences=2, relation="less than" | It is. ~ Dr. Lee has 3.5... | It is. So ~ Is it? No! | |
| number_sentences | num_sentences=2 | It is. So | It is ~ - a\n- b | |
| number_paragraphs | num_paragraphs=2 | a *** b ~ a\n***\nb\n*** | a ~ a\n\nb ~ a *** *** b | a *** . |
| nth_paragraph_first_word | num_paragraphs=2, nth_paragraph=2, first_word="so" | a\n\nSo, b | a\n\nb so ~ a\n\nsoap | |
| existence | keywords=["warm", "art"] | Warm art ~ the warmth at the start | warm ~ w\u0430rm art | |
| frequency | keyword="art", frequency=2 | art, Art ~ start of art | art ~ art \u0430rt | |
| frequency | keyword="art", frequency=2, relation="less than" | art | art, Art | art \u0430rt |
| forbidden_words | forbidden_words=["art"] | the start ~ arts | Art ~ art-work | \u0430rt ~ a\u200brt |
| letter_frequency | letter="t", let_frequency=2 | Tart | art | |
| letter_frequency | letter="t", let_frequency=2, let_relation="less than" | art | Tart | a \uff54\uff54 |
| response_language | language="de" | Das Brot ist warm. | Bread is warm. ~ \u0425\u043b\u0435\u0431 | 7 |
| english_capital | | BREAD IS SO GOOD | BREAD IS So ~ DAS BROT IST NICHT WARM | |
| english_lowercase | | bread is so good | Bread is ~ das brot ist nicht warm | |
| capital_word_frequency | capital_frequency=2 | NASA said OK ~ I'M | NASA said ~ I'm | |
| no_comma | | bread; butter | bread, butter | bread\uff0c butter ~ ... |
| number_placeholders | num_placeholders=2 | [name] of [a b] | [name] | [name] of [] |
| number_bullet_lists | num_bullets=2 | - a\n- b ~ * a\n  - b | - a ~ - a\n- b\n- c ~ 1. a\n2. b | - a\n- ~ - a\n--- |
| number_highlighted_sections | num_highlights=2 | *a* or **b** | *a* ~ * a\n* b | ***a*** |
| multiple_sections | section_spliter="Day", num_sections=2 | Day 1 a Day 2 b | Day 1 a ~ Day a Day b | Day 1 Day 2 |
| json_format | | {"a": 1} ~ ```json\n["a"]\n``` | {"a": 1} so ~ {'a': 1} | {} ~ "a" ~ 7 |
| title | | <<a>> b | <a> b ~ << >> b ~ <<a\nb>> | <<.>> b |
| constrained_response | | So: My answer is no. | My answer is no | My answer is no. My answer is yes. |
| postscript | postscript_marker="P.S." | a\np. s. b | a PS b | a P.S. |
| postscript | postscript_marker="P.P.S" | a P.P.S b | a P.S. b | a P.P.S |
| two_responses | | a ****** b | a ****** a ~ a *** b ~ a ****** b ****** c | a ****** . |
| repeat_prompt | prompt_to_repeat="Name a food." | name a food. b | b. Name a food. ~ Name food. b | Name a food. |
| end_checker | end_phrase="That is all." | "a. That is all." ~ a THAT IS ALL. | a that is all | That is all. |
| quotation | | "a" | "a ~ a "b" ~ \u201ca\u201d | "" |

The last column has texts that only the published checker (google-research/instruction_following_eval, and
lm-evaluation-harness) accepts, without reason; `.` stands for any text without a letter or digit. Such a text, like the
empty text, follows no instruction. Otherwise only two verdicts differ: languages are told apart by script and frequent
words instead of by langdetect, and sentences by a few rules instead of NLTK's Punkt model. Nothing checks whether a
text makes sense: a list of the required words earns as much as a sentence. `on_topic`, and the values that `describe`
logs, show how a policy exploits that.
"""

import json
from pathlib import Path

from tasks.verdicts.instruction_feedback import complaints
from tasks.verdicts.instruction_kinds import OPTIONS, WORD, check

_DATA = Path(__file__).resolve().parents[1] / "data"
TRAIN_DATA = _DATA / "instructions.jsonl"
EVAL_DATA = _DATA / "instructions_heldout.jsonl"
FIELDS = {"prompt": str, "instruction_id_list": list, "kwargs": list}  # every row must have these
KIND_FIELDS = ("kind",)  # questions that agree in these are of one kind
REWARD_WEIGHTS = {"correct": 1.0, "followed": 0.0, "loose": 0.0, "on_topic": 0.0}

_SINGULARS = (("s", ""), ("es", ""), ("ies", "y"), ("ves", "f"), ("ves", "fe"))
_FILLERS = ("so it is good.", "we can run up.", "dogs bark at her.", "my big box.")
_FORMS = {  # the texts that kinds require, in order, each as often as its number says: with *, once less
    "repeat_prompt": "{prompt_to_repeat}\n",
    "nth_paragraph_first_word": "{first_word}",
    "title": "<<so>>",
    "existence": "{keywords}",
    "frequency": "{keyword}",
    "letter_frequency": "{letter}",
    "capital_word_frequency": "OK",
    "number_placeholders": "[name]",
    "number_highlighted_sections": "so *so*",
    "number_words": "so",
    "filler": "",
    "*number_sentences": "{filler}",
    "multiple_sections": "{section_spliter} {number} {filler}",
    "number_bullet_lists": "\n- {filler}",
    "*number_paragraphs": "\n***\n{filler}",
    "*nth_paragraph_first_word": "\n\n{first_word} {filler}",
    "two_responses": "\n******\nso {filler}",
    "constrained_response": OPTIONS[0],
    "postscript": "{postscript_marker} {filler}",
    "end_checker": "{end_phrase}",
}


def messages(row: dict, system_prompt: str = "") -> list[dict]:
    """The conversation that asks the prompt of a row, with a system turn unless `system_prompt` is empty.

    >>> messages({"prompt": "Write one sentence about bread."})
    [{'role': 'user', 'content': 'Write one sentence about bread.'}]
    """
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": row["prompt"]}]


def reward(row: dict, text: str) -> dict[str, float]:
    """Reward one completion, by named components; only `correct` has a weight unless `--reward-weight` gives more.

    - `correct`: the text follows all instructions ("strict");
    - `followed`: the share of instructions that it follows;
    - `loose`: each instruction is followed by one of the eight `variants` of the text;
    - `on_topic`: the text names the topic of the row, as given or in the singular; 0 for rows without the field
      `topic`.

    >>> ids = ["change_case:english_lowercase", "punctuation:no_comma"]
    >>> row = {"prompt": "", "topic": "breads", "instruction_id_list": ids, "kwargs": [{}, {}]}
    >>> reward(row, "Sure:\\nbread is warm.")
    {'correct': 0.0, 'followed': 0.5, 'loose': 1.0, 'on_topic': 1.0}
    """
    found = tally(row, text)
    strict, loose = found["inst_level_strict_acc"], found["inst_level_loose_acc"]
    topic = row.get("topic") or ""
    names = {topic} | {topic[: -len(end)] + singular for end, singular in _SINGULARS if topic.endswith(end)}
    return {
        "correct": float(all(strict)),
        "followed": sum(strict) / len(strict),
        "loose": float(all(loose)),
        "on_topic": float(not names.isdisjoint(WORD.findall(text.lower()))),
    }


def tally(row: dict, text: str) -> dict[str, list[bool]]:
    """Optional: verdicts, whose shares over all completions are IFEval's four figures and a strict figure per kind.

    >>> row = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
    >>> list(tally(row, "*bread*").values())
    [[False], [True, False], [False], [True, False], [True], [False]]
    """
    asked = instructions(row)
    strict = [check(*one, text) for one in asked]
    others = variants(text)[1:]
    loose = [follows or any(check(*one, other) for other in others) for follows, one in zip(strict, asked, strict=True)]
    found = {"prompt_level_strict_acc": [all(strict)], "inst_level_strict_acc": strict}
    found |= {"prompt_level_loose_acc": [all(loose)], "inst_level_loose_acc": loose}
    for (kind, _), follows in zip(asked, strict, strict=True):
        found.setdefault(kind.partition(":")[2], []).append(follows)
    return found


def describe(row: dict, text: str) -> dict[str, float]:
    """More values to log, which show whether a policy follows instructions cheaply.

    - `words`: how many words the text has;
    - `distinct`: the share of different words; small for a text that repeats itself.

    >>> describe({}, "A city is a city.")
    {'words': 5.0, 'distinct': 0.6}
    """
    words = WORD.findall(text.lower())
    return {"words": float(len(words)), "distinct": len(set(words)) / max(1, len(words))}


def solution(row: dict) -> str | None:
    """A text that follows all instructions, if filling in a form gives one: for every bundled row, and for most others.

    >>> kwargs = [{"relation": "less than", "num_words": 6}, {"keywords": ["warm"]}]
    >>> ids = ["length_constraints:number_words", "keywords:existence"]
    >>> solution({"topic": "bread", "instruction_id_list": ids, "kwargs": kwargs})
    'warm bread is good.'
    """
    asked = instructions(row)
    own = [f"{row['topic']} is good."] if row.get("topic") else []
    texts = (_fill_in(asked, filler) for filler in (*own, *_FILLERS))
    return next((text for text in texts if all(check(kind, kwargs, text) for kind, kwargs in asked)), None)


def feedback(row: dict, text: str) -> str:
    """Optional: which instructions a completion breaks, in words; empty if it follows all.

    >>> ids = ["length_constraints:number_words", "startend:quotation"]
    >>> feedback({"instruction_id_list": ids, "kwargs": [{"num_words": 5}, {}]}, "warm bread")
    'It has 2 words, but must have at least 5. It must be between double quotation marks.'
    """
    return " ".join(complaints(instructions(row), text))


def vote(row: dict, text: str) -> str:
    """Optional: the answer of a completion; two texts are one answer if only spaces differ."""
    return " ".join(text.split())


def instructions(row: dict) -> list[tuple[str, dict]]:
    """The instructions of a row, each as its id and arguments."""
    asked = list(zip(row["instruction_id_list"], row["kwargs"], strict=True))
    if not asked:
        raise ValueError("instruction_id_list is empty")
    return asked


def variants(text: str) -> list[str]:
    r"""The texts that loose accuracy accepts: without asterisks, and without the first line, the last one, or both.

    >>> variants("So:\n*warm*\nBye")
    ['So:\n*warm*\nBye', '*warm*\nBye', 'So:\n*warm*', '*warm*', 'So:\nwarm\nBye', 'warm\nBye', 'So:\nwarm', 'warm']
    """
    lines = text.split("\n")
    parts = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return parts + [part.replace("*", "") for part in parts]


def _fill_in(asked: list[tuple[str, dict]], filler: str) -> str:
    """The texts that the instructions require, one after the other, with a sentence in between."""
    pieces = []
    for name, form in _FORMS.items():
        for kind, kwargs in asked:
            if kind.partition(":")[2] == name.strip("*") and "less than" not in kwargs.values():
                times = max((value for value in kwargs.values() if isinstance(value, int)), default=1)
                named = kwargs | {"keywords": " ".join(kwargs.get("keywords") or ()), "filler": filler}
                pieces += [form.format(**named, number=number) for number in range(1 + (name[0] == "*"), times + 1)]
        if name == "filler":
            pieces.append(filler)
    text, kinds = " ".join(pieces), {kind.partition(":")[2] for kind, _ in asked}
    text = json.dumps({"answer": text}) if "json_format" in kinds else text
    text = text.upper() if "english_capital" in kinds else text.lower() if "english_lowercase" in kinds else text
    return f'"{text}"' if "quotation" in kinds else text
