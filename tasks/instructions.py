r"""Instructions whose following a program can check: the 25 kinds of IFEval (Zhou et al. 2023, arXiv 2311.07911).

A row is as published: a `prompt`, the ids of its instructions in `instruction_id_list`, and their arguments in `kwargs`,
one dict each; arguments that are null are left out. The whole completion is the answer. It is right if it follows all
instructions ("prompt-level strict accuracy"). Texts that follow an instruction and texts that do not, divided by ~:

TABLE

Where the published checker (google-research/instruction_following_eval, or lm-evaluation-harness) pays for nothing, this
one is stricter: the rows say "stricter". Nothing here asks whether a text makes sense, so that a list of the required
words earns as much as a sentence; `describe` logs what such a policy does. Words are counted as there.
"""

import json
from pathlib import Path

from tasks.verdicts.instruction_kinds import OPTIONS, WORD, check

_DATA = Path(__file__).resolve().parents[1] / "data"
TRAIN_DATA = _DATA / "instructions.jsonl"
EVAL_DATA = _DATA / "instructions_heldout.jsonl"
FIELDS = {"prompt": str, "instruction_id_list": list, "kwargs": list}  # what every row must have
KIND_FIELDS = ("kind",)  # questions that agree in these are of one kind
REWARD_WEIGHTS = {"correct": 1.0, "followed": 0.0, "loose": 0.0}

_FILLERS = ("so it is good.", "we can run up.", "dogs bark at her.", "my big box.")


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
    - `loose`: each instruction is followed by one of the eight `variants` of the text.

    >>> ids = ["change_case:english_lowercase", "punctuation:no_comma"]
    >>> reward({"prompt": "", "instruction_id_list": ids, "kwargs": [{}, {}]}, "Sure:\\nbread is warm.")
    {'correct': 0.0, 'followed': 0.5, 'loose': 1.0}
    """
    asked = instructions(row)
    followed = [check(kind, kwargs, text) for kind, kwargs in asked]
    is_loose = all(
        strict or any(check(*instruction, other) for other in variants(text)[1:])
        for strict, instruction in zip(followed, asked, strict=True)
    )
    return {"correct": float(all(followed)), "followed": sum(followed) / len(followed), "loose": float(is_loose)}


def describe(row: dict, text: str) -> dict[str, float]:
    """What else to log: what a policy does to follow instructions cheaply.

    - `words`: how many words the text has;
    - `distinct`: how many of them differ, as a share; small for one that repeats itself;
    - `on_topic`: the topic of the row is named, in singular or plural; 0 for rows without the field `topic`.

    >>> describe({"topic": "rivers"}, "A river is a river.")
    {'words': 5.0, 'distinct': 0.6, 'on_topic': 1.0}
    """
    words = WORD.findall(text.lower())
    topic = row.get("topic")
    return {
        "words": float(len(words)),
        "distinct": len(set(words)) / max(1, len(words)),
        "on_topic": float(bool(topic) and topic.lower().removesuffix("s") in " ".join(words)),
    }


def solution(row: dict) -> str | None:
    """A text that follows all instructions, if filling in a form makes one: of every bundled row, and of most others.

    >>> kwargs = [{"relation": "less than", "num_words": 6}, {"keywords": ["warm"]}]
    >>> ids = ["length_constraints:number_words", "keywords:existence"]
    >>> solution({"topic": "bread", "instruction_id_list": ids, "kwargs": kwargs})
    'warm bread is good.'
    """
    asked = instructions(row)
    own = [f"{row['topic']} is good."] if row.get("topic") else []
    texts = (_fill_in(asked, filler) for filler in (*own, *_FILLERS))
    return next((text for text in texts if all(check(kind, kwargs, text) for kind, kwargs in asked)), None)


def vote(row: dict, text: str) -> str:
    """Optional: what a completion answers; two texts are one answer if only spaces differ."""
    return " ".join(text.split())


def instructions(row: dict) -> list[tuple[str, dict]]:
    """The instructions of a row: id and arguments of each."""
    asked = list(zip(row["instruction_id_list"], row["kwargs"], strict=True))
    if not asked:
        raise ValueError("instruction_id_list is empty")
    return asked


def variants(text: str) -> list[str]:
    r"""The texts that loose accuracy accepts: without asterisks, and without the first line, the last one, or both.

    >>> variants("Sure:\n*warm*\nBye")
    ['Sure:\n*warm*\nBye', '*warm*\nBye', 'Sure:\n*warm*', '*warm*', 'Sure:\nwarm\nBye', 'warm\nBye', 'Sure:\nwarm', 'warm']
    """  # noqa: E501
    lines = text.split("\n")
    parts = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return parts + [part.replace("*", "") for part in parts]


def _fill_in(asked: list[tuple[str, dict]], filler: str) -> str:
    """A form with what the instructions require, filled up with a sentence."""
    words, lines, ends, fillers = [], [], [], 1
    for kind, kwargs in asked:
        match kind.partition(":")[2], kwargs:
            case "existence", {"keywords": keywords}:
                words += keywords
            case "frequency", {"keyword": word, "frequency": count, "relation": "at least"}:
                words += [word] * count
            case "letter_frequency", {"letter": letter, "let_frequency": count, "let_relation": "at least"}:
                words += [letter] * count
            case "capital_word_frequency", {"capital_frequency": count, "capital_relation": "at least"}:
                words += ["OK"] * count
            case "number_placeholders", {"num_placeholders": count}:
                words += ["[name]"] * count
            case "number_highlighted_sections", {"num_highlights": count}:
                words += ["*so*"] * count
            case "multiple_sections", {"section_spliter": word, "num_sections": count}:
                lines += [f"{word} {number} {filler}" for number in range(1, count + 1)]
            case "number_bullet_lists", {"num_bullets": count}:
                lines += [f"- {filler}"] * count
            case "number_words", {"num_words": count, "relation": "at least"}:
                fillers = max(fillers, count // 3 + 1)
            case "number_sentences", {"num_sentences": count, "relation": "at least"}:
                fillers = max(fillers, count)
            case "constrained_response", _:
                ends.append(OPTIONS[0])
            case "postscript", {"postscript_marker": marker}:
                ends.append(f"{marker} {filler}")
            case "end_checker", {"end_phrase": phrase}:
                ends.append(phrase)
    given = {kind.partition(":")[2]: kwargs for kind, kwargs in asked}
    title = ["<<so>>"] if "title" in given else []
    text = "\n".join([*title, *lines, " ".join([*words, *[filler] * (fillers if not lines or words else 0)])]).strip()
    if "number_paragraphs" in given:
        text = "\n***\n".join([*[filler] * (given["number_paragraphs"]["num_paragraphs"] - 1), text])
    if "nth_paragraph_first_word" in given:
        where = given["nth_paragraph_first_word"]
        parts = [*[filler] * (where["num_paragraphs"] - 1), text]
        parts[where["nth_paragraph"] - 1] = f"{where['first_word']} {parts[where['nth_paragraph'] - 1]}"
        text = "\n\n".join(parts)
    if "two_responses" in given:
        text = f"{text}\n******\n{text} {filler}"
    text = "\n".join([text, *ends])
    if "repeat_prompt" in given:
        text = f"{given['repeat_prompt']['prompt_to_repeat']}\n{text}"
    if "json_format" in given:
        text = json.dumps({"answer": text})
    if "english_capital" in given:
        text = text.upper()
    if "english_lowercase" in given:
        text = text.lower()
    return f'"{text}"' if "quotation" in given else text
