"""The words of documents and of queries, for an index by words."""

import itertools
import re
import unicodedata

from common.plumbing.retrieval.chunks import UNSPACED

MAX_QUERY = 100_000  # characters of a query that are read
MAX_TERMS = 64  # distinct terms of a query that are searched for, the first ones
_UNSPACED = re.compile(f"[{UNSPACED}]")
_PIECES = re.compile(f"[{UNSPACED}]+|[^ {UNSPACED}]+")


def query_phrases(query: str) -> dict[str, tuple[str, ...]]:
    """What a query searches for, in the syntax of FTS5, and the words of each: single words, quoted.

    Where there are no spaces, every two neighbouring characters are a phrase.

    >>> query_phrases('Who built "Fardil" AND -Jarce*?')
    {'"who"': ('who',), '"built"': ('built',), '"fardil"': ('fardil',), '"and"': ('and',), '"jarce"': ('jarce',)}
    >>> list(query_phrases("東京都"))
    ['"東 京"', '"京 都"']
    """
    # cut again: NFKC makes up to 18 characters of one
    text = unicodedata.normalize("NFKC", query[:MAX_QUERY])[:MAX_QUERY].lower()
    if text.isascii():
        text = re.sub("[^a-z0-9]", " ", text)
    else:
        text = "".join(character if _is_part_of_word(character) else " " for character in text)
    phrases: dict[str, tuple[str, ...]] = {}
    for piece in _PIECES.finditer(text):
        characters = piece[0]
        is_pairs = len(characters) > 1 and _UNSPACED.match(characters)
        for words in itertools.pairwise(characters) if is_pairs else [(characters,)]:
            phrases[f'"{" ".join(words)}"'] = words
            if len(phrases) == MAX_TERMS:
                return phrases
    return phrases


def _is_part_of_word(character: str) -> bool:
    return character.isalnum() or unicodedata.category(character)[0] == "M"


def fold(text: str) -> str:
    """A text as it is indexed: in one of Unicode's forms of writing it, and with spaces where its script has none."""
    return text if text.isascii() else _UNSPACED.sub(r" \g<0> ", unicodedata.normalize("NFKC", text))
