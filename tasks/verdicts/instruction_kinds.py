"""The 25 kinds of instructions of IFEval (Zhou et al. 2023, arXiv 2311.07911), and whether a text follows one.

`KINDS` has a short function for each kind; the table at the beginning of tasks/instructions.py has examples. Three
rules hold for all of them:

- a text without any letter or digit follows nothing;
- required things are counted in the text as written, limited or forbidden things in `plain(text)`, without invisible
  characters and with look-alike letters replaced by Latin letters;
- words are searched for as plain text, in any case, also inside longer words, except for forbidden words.
"""
# ruff: noqa: RUF001

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable

WORD = re.compile(r"\w+")
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

_LOOK_ALIKES = str.maketrans(  # of Cyrillic and Greek letters, and commas
    "авеікмнорстухѕјԁԛԝАВЕІКМНОРСТУХЅЈαινορτυχΑΒΕΖΗΙΚΜΝΟΡΤΥΧ،、",
    "abeikmhopctyxsjdqwABEIKMHOPCTYXSJaivoptuxABEZHIKMNOPTYX,,",
)
_SENTENCE_END = re.compile(r"(?<!\S)(\S*)([.!?])[\"'\u201d\u2019)\]}*_]*\s+(?=(\w*))")
_ABBREVIATIONS = (
    "mr mrs ms dr prof st gen sen rep lt col vs inc ltd co corp jr sr p.m a.m u.s u.k u.n n.y d.c ph.d ft ave"
)
_STARTERS = (
    "the a in it if he she we they this that these there so but and when i you my his her thus since some most many"
)
_STARTERS += " however then what why how who where to as for with on at by is are do not our its their no yes now"
_CONTRACTION = re.compile(r"(?i)(?<=\w)(n't|'(?:s|m|d|ll|re|ve))(?!\w)")
_TOKEN = re.compile(r"[^\s\"“”(),!?:;\[\]{}<>*`]+")

# A script, a language, and, if several languages share the script, frequent words and, after |, letters of each.
_LANGUAGES = """\
LATIN en the of and to is in it that for with was are this as on not you we they have a i my so do be by
LATIN de der die das und ist nicht ein eine zu den mit ich sie es auf für von im dem wir | äöüß
LATIN es el la los las de que y en un una es por con no se para del su lo más muy | ñ¿¡
LATIN pt o a os as de que e em um uma é por com não para do da no na mais são | ãõ
LATIN fr le la les des et est un une que dans pour qui pas sur avec du au ce il elle nous je | êœ
LATIN it il la di che e un una è per non con sono gli del della le si nel i lo molto | ò
LATIN fi ja on ei se että hän oli ovat mutta kun myös ole voi joka tai niin mitä kuin minä | äö
LATIN pl i w nie na się z do jest to że jak o ale po są tak przez od | łżąęśź
LATIN sw na ya wa kwa ni katika za la kuwa hii yake cha pia sana watu kama lakini yangu
LATIN vi và là của có không được một cho những các trong người để với này đã | đơưạảấầểễệộớ
CYRILLIC ru и в не на что с он как это но из у по я мы | ыэё
CYRILLIC bg и на да се е за от с не в са че като ще ми | ъ
CYRILLIC uk і в не на що з та є як до це у за від | їіє
ARABIC ar في من على إلى أن هذا التي عن مع كان هذه ما | ةىيك
ARABIC fa و در به از که این را با است برای آن می | یک
ARABIC ur کے میں کی ہے اور سے کا کو ہیں نے پر | ٹڈڑںےہیک
DEVANAGARI hi है के में की और से का को हैं नहीं यह पर
DEVANAGARI mr आहे आणि च्या या मध्ये ते हे आहेत नाही तो एक | ळ
DEVANAGARI ne छ र मा छन् यो हुन्छ लागि पनि भएको गर्न हो हामी
BENGALI bn; GURMUKHI pa; GUJARATI gu; TAMIL ta; TELUGU te; KANNADA kn; MALAYALAM ml; THAI th; HANGUL ko; HEBREW he
HIRAGANA ja; KATAKANA ja"""


def check(kind: str, kwargs: dict, text: str) -> bool:
    """Whether a text follows an instruction; entries of `kwargs` that are None count as absent.

    >>> check("length_constraints:number_words", {"relation": "less than", "num_words": 4}, "Bread is warm.")
    True
    >>> check("punctuation:no_comma", {"num_words": None}, "Bread, butter and jam.")
    False
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is none of the {len(KINDS)} kinds of instructions")
    return _says(text) and bool(KINDS[kind](text, **{k: value for k, value in kwargs.items() if value is not None}))


def plain(text: str) -> str:
    """A text without invisible characters, and with look-alikes of Latin letters and of commas replaced.

    >>> plain("br\\u0435ad\\uff0c but\\u200bter")
    'bread, butter'
    """
    text = re.sub("[\ufe00-\ufe0f]", "", unicodedata.normalize("NFKC", text))
    return "".join(letter for letter in text if unicodedata.category(letter) != "Cf").translate(_LOOK_ALIKES)


def count_sentences(text: str) -> int:
    """The number of sentences: a `.`, `!` or `?`, with closing marks after it, ends a sentence if a space follows.

    A line end is only a space, so a list without full stops is one sentence. The published checker uses NLTK's Punkt
    model; here there is a short list of abbreviations instead.

    >>> [count_sentences(text) for text in ("Dr. Lee naps. So do I", "3.5 loaves...", 'He said "No!" and left.')]
    [2, 1, 2]
    """
    text = text.rstrip(" \t\n\"')]}\u201d")
    return bool(text) + sum(_ends_sentence(*match.groups()) for match in _SENTENCE_END.finditer(text))


def _ends_sentence(word: str, sign: str, following: str) -> bool:
    word = word.lower().lstrip("\"'([*\u201c\u2018")
    starts = following[:1].isupper() and following.lower() in _STARTERS.split()
    if sign != "." or starts:
        return True
    if re.fullmatch(r"\d[\d.,]*", word):  # the number of a list, or a date
        return not following[:1].islower()
    if re.fullmatch(r"[^\W\d]", word):  # an initial
        return not following[:1].isalpha()
    return not (word in _ABBREVIATIONS.split() or word.endswith("."))


def language_of(text: str) -> str | None:
    """The language of a text, by the script of most letters and by frequent words; None if it has no letters.

    The published checker uses langdetect, which often mistakes a few words for another language, and not the same
    language each time. Here the first language of a script is the default, English for Latin letters.

    >>> [language_of(text) for text in ("warm bread", "Das Brot ist warm.", "Хлеб и масло", "123")]
    ['en', 'de', 'ru', None]
    """
    scripts: Counter[str] = Counter()
    for letter, count in Counter(filter(str.isalpha, text)).items():
        scripts[unicodedata.name(letter, "?").split()[0]] += count
    if not scripts:
        return None
    words = Counter(re.findall(r"[^\s\d.,;:!?()\"'।،؟«»*<>-]+", text.lower()))
    letters, hits = Counter(text.lower()), {}
    for line in re.split(r"\n|; ", _LANGUAGES):
        script, code, *frequent = line.partition("|")[0].split()
        if script == scripts.most_common(1)[0][0]:
            typical = line.partition("| ")[2]
            hits[code] = sum(words[word] for word in set(frequent)) + sum(letters[letter] for letter in typical)
    return max(hits, key=hits.get, default=None)


def _says(text: str) -> bool:
    return any(map(str.isalnum, text))


def _keeps(count: int, limit: int, relation: str = "at least") -> bool:
    return count < limit if relation == "less than" else count >= limit


def count_occurrences(part: str, text: str, relation: str = "at least") -> int:
    if relation == "less than":
        text, part = plain(text), plain(part)
    return text.lower().count(part.strip().lower())


def _occurs(part: str, text: str, limit: int, relation: str = "at least") -> bool:
    return _keeps(count_occurrences(part, text, relation), limit, relation)


def paragraphs(text: str) -> list[str]:
    """Paragraphs are divided by ***; only a divider at the beginning or end may have nothing beside it."""
    first, *others = re.split(r"\s?\*\*\*\s?", text)
    return [part for part in (first, *others[-1:]) if part.strip()] + others[:-1]


def _are(parts: list[str], number: int) -> bool:
    return len(parts) == number and all(map(_says, parts))


def _has_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are divided by empty lines; the word ends at a space or one of . , ? ! ' "."""
    paragraphs = text.split("\n\n")
    if sum(map(bool, map(str.strip, paragraphs))) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    words = paragraphs[nth_paragraph - 1].split()
    return bool(words) and re.match(r"'*\"*([^.,?!'\"]*)", words[0].lower())[1] == first_word.lower()


def _avoids(text: str, forbidden_words: list[str]) -> bool:
    text, words = plain(text), map(re.escape, map(plain, forbidden_words))
    return not any(re.search(rf"(?<!\w){word}(?!\w)", text, re.IGNORECASE) for word in words)


def count_capital_words(text: str) -> int:
    """A contraction is two words, as in NLTK: in I'M both are capital, in I'm only the first."""
    words = _TOKEN.findall(_CONTRACTION.sub(r" \1", text.replace("--", " ")))
    return sum(map(str.isupper, words))


def bullets(text: str) -> list[str]:
    """Lines that begin with - or with one *; each needs a word."""
    return re.findall(r"^[^\S\n]*(?:-|\*(?!\*))(.*)$", text, re.MULTILINE)


def count_highlights(text: str) -> int:
    return sum(map(_says, re.findall(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*", text)))


def count_placeholders(text: str) -> int:
    return sum(map(_says, re.findall(r"\[([^\n\[\]]*)\]", text)))


def count_sections(text: str, section_spliter: str) -> int:
    """Different numbers after the word, and text after each number."""
    parts = re.split(rf"{re.escape(section_spliter.strip())}\s?(\d+)", text)
    return len({number for number, body in zip(parts[1::2], parts[2::2], strict=True) if _says(body)})


def _is_json(text: str) -> bool:
    """An object or a list, not empty, with or without a code fence."""
    text = re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict | list) and bool(found)


def _has_postscript(text: str, postscript_marker: str) -> bool:
    """The marker, in any case and with or without spaces, and words after it."""
    marker = r"\.\s?".join(map(re.escape, postscript_marker.strip().split(".")))
    match = re.search(marker, text, re.IGNORECASE)
    return match is not None and _says(text[match.end() :])


def _has_two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.strip().removeprefix("******").removesuffix("******").split("******")]
    return len(parts) == 2 and all(map(_says, parts)) and parts[0] != parts[1]


def _repeats(text: str, prompt_to_repeat: str) -> bool:
    """Begins with the request, in any case, and answers it after that."""
    text, request = text.strip().lower(), prompt_to_repeat.strip().lower()
    return text.startswith(request) and _says(text[len(request) :])


def _ends_with(text: str, end_phrase: str) -> bool:
    """Ends with the phrase, in any case, but the phrase is not the whole text."""
    text, phrase = text.strip().strip('"').lower(), end_phrase.strip().lower()
    return text.endswith(phrase) and _says(text.removesuffix(phrase))


KINDS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(_occurs(word, text, 1) for word in keywords),
    "keywords:frequency": lambda text, keyword, frequency, **how: _occurs(keyword, text, frequency, **how),
    "keywords:forbidden_words": _avoids,
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation="at least": _occurs(
        letter, text, let_frequency, let_relation
    ),
    "language:response_language": lambda text, language: language_of(text) == language,
    "length_constraints:number_words": lambda text, num_words, **how: _keeps(len(WORD.findall(text)), num_words, **how),
    "length_constraints:number_sentences": lambda text, num_sentences, **how: _keeps(
        count_sentences(text), num_sentences, **how
    ),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: _are(paragraphs(text), num_paragraphs),
    "length_constraints:nth_paragraph_first_word": _has_first_word,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        count_placeholders(text) >= num_placeholders
    ),
    "detectable_content:postscript": _has_postscript,
    "detectable_format:number_bullet_lists": lambda text, num_bullets: _are(bullets(text), num_bullets),
    "detectable_format:constrained_response": lambda text: sum(option in text for option in OPTIONS) == 1,
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: (
        count_highlights(text) >= num_highlights
    ),
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        count_sections(text, section_spliter) >= num_sections
    ),
    "detectable_format:json_format": _is_json,
    "detectable_format:title": lambda text: any(map(_says, re.findall(r"<<([^\n]+)>>", text))),
    "combination:two_responses": _has_two_responses,
    "combination:repeat_prompt": _repeats,
    "startend:end_checker": _ends_with,
    "startend:quotation": lambda text: text.strip()[0] == text.strip()[-1] == '"',
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation="at least": _keeps(
        count_capital_words(text), capital_frequency, capital_relation
    ),
    "change_case:english_capital": lambda text: text.isupper() and language_of(text) == "en",
    "change_case:english_lowercase": lambda text: text.islower() and language_of(text) == "en",
    "punctuation:no_comma": lambda text: "," not in plain(text),
}
