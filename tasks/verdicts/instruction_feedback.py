"""What is wrong with a text, in words: a sentence for each broken instruction of `instruction_kinds`."""

from collections.abc import Callable

from tasks.verdicts.instruction_kinds import (
    KINDS,
    OPTIONS,
    WORD,
    bullets,
    check,
    count_capital_words,
    count_highlights,
    count_occurrences,
    count_placeholders,
    count_sections,
    count_sentences,
    paragraphs,
    plain,
)

Instruction = tuple[str, dict]  # its id and arguments

# What a kind counts, as words after a number, and how; other kinds have one sentence each, in RULES
_COUNTED: dict[str, tuple[str, Callable[..., int]]] = {
    "keywords:frequency": ('occurrence{s} of "{keyword}"', lambda text, keyword: count_occurrences(keyword, text)),
    "keywords:letter_frequency": ('letter{s} "{letter}"', lambda text, letter: count_occurrences(letter, text)),
    "length_constraints:number_words": ("word{s}", lambda text: len(WORD.findall(text))),
    "length_constraints:number_sentences": ("sentence{s}", count_sentences),
    "length_constraints:number_paragraphs": ("paragraph{s} divided by ***", lambda text: len(paragraphs(text))),
    "detectable_content:number_placeholders": ("placeholder{s} such as [name]", count_placeholders),
    "detectable_format:number_bullet_lists": ("bullet{s}", lambda text: len(bullets(text))),
    "detectable_format:number_highlighted_sections": ("highlighted part{s} such as *this*", count_highlights),
    "detectable_format:multiple_sections": ('section{s} "{section_spliter}" with a number', count_sections),
    "change_case:capital_word_frequency": ("word{s} in capitals", count_capital_words),
}
_EXACT = ("length_constraints:number_paragraphs", "detectable_format:number_bullet_lists")
_RULES = {
    "keywords:existence": "must have {missing}",
    "keywords:forbidden_words": "must not have {found}",
    "language:response_language": 'must be in the language "{language}"',
    "length_constraints:nth_paragraph_first_word": (
        "must have {num_paragraphs} paragraphs divided by empty lines, and the first word of paragraph {nth_paragraph} "
        'must be "{first_word}"'
    ),
    "detectable_content:postscript": 'must have a postscript after "{postscript_marker}"',
    "detectable_format:constrained_response": "must have exactly one of these: "
    + ", ".join(f'"{option}"' for option in OPTIONS),
    "detectable_format:json_format": "must be JSON and nothing else",
    "detectable_format:title": "must have a title between << and >>",
    "combination:two_responses": "must be two different answers divided by ******",
    "combination:repeat_prompt": 'must first repeat "{prompt_to_repeat}"',
    "startend:end_checker": 'must end with "{end_phrase}"',
    "startend:quotation": "must be between double quotation marks",
    "change_case:english_capital": "must be in English and in capital letters only",
    "change_case:english_lowercase": "must be in English and in lower case only",
    "punctuation:no_comma": "must have no commas",
}


def complaints(asked: list[Instruction], text: str) -> list[str]:
    """A sentence for each instruction that a text does not follow; the limits of what is counted twice make one.

    >>> kind = "length_constraints:number_words"
    >>> asked = [(kind, {"num_words": 5}), (kind, {"num_words": 10, "relation": "less than"})]
    >>> complaints([*asked, ("startend:end_checker", {"end_phrase": "Bye."})], "warm bread")
    ['It has 2 words, but must have 5 to 9.', 'It must end with "Bye.".']
    """
    if not any(map(str.isalnum, text)):
        return ["It has no words."]
    asked = [(kind, {name: value for name, value in kwargs.items() if value is not None}) for kind, kwargs in asked]
    broken = [one for one in asked if not check(*one, text)]
    return list(dict.fromkeys(_complaint(one, asked, text) for one in broken))  # each once


def _complaint(broken: Instruction, asked: list[Instruction], text: str) -> str:
    kind, kwargs = broken
    if kind not in _COUNTED:
        named = {"missing": [word for word in kwargs.get("keywords", ()) if not count_occurrences(word, text)]}
        named["found"] = [
            word for word in kwargs.get("forbidden_words", ()) if not KINDS[kind](text, forbidden_words=[word])
        ]
        quoted = {name: ", ".join(f'"{word}"' for word in words) for name, words in named.items()}
        return f"It {_RULES[kind].format(**kwargs, **quoted)}."
    things, count = _COUNTED[kind]
    (relation, _), subject = _limit(kwargs)
    is_plain = relation == "less than" and kind.startswith("keywords")  # as it is counted there
    number = count(plain(text) if is_plain else text, **subject)
    things = things.format(s="s" * (number != 1), **subject)
    limits = [_limit(other)[0] for name, other in asked if name == kind and _limit(other)[1] == subject]
    low = max((value for relation, value in limits if relation != "less than"), default=0)
    high = min((value - 1 for relation, value in limits if relation == "less than"), default=None)
    if kind in _EXACT:
        if number == low:
            return f"Each of its {things} must have text."
        high = low
    wanted = f"at least {low}" if high is None else f"at most {high}" if low == 0 else f"{low} to {high}"
    return f"It has {number} {things}, but must have {low if low == high else wanted}."


def _limit(kwargs: dict) -> tuple[tuple[str, int], dict]:
    """The arguments of a kind that counts: how many and in which relation, and what else they name."""
    (number,) = (value for value in kwargs.values() if isinstance(value, int))
    relation = next((value for name, value in kwargs.items() if name.endswith("relation")), "at least")
    subject = {n: value for n, value in kwargs.items() if not isinstance(value, int) and not n.endswith("relation")}
    return (relation, number), subject
