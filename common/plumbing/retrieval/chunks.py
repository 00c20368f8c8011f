"""Long texts, cut into chunks of some words; Markdown, cut at its headings. Time and memory are linear in the text."""

import io
import itertools
import re
from collections.abc import Iterator

from common.plumbing.terminal import printable

# The scripts that put no spaces between words: Thai, Lao, Burmese, Khmer, kana and Han characters, for a class of `re`.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
# What counts as a word, and is never cut: 100 characters without a space are one at the most
_WORD = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]{{1,100}}")
_SENTENCE_END = re.compile("[.!?\u2026\u3002\uff01\uff1f][\"'\u201d\u2019)\\]]*$")  # also Chinese and typographic ones
MAX_HEADING = 200  # characters of the headings in front of a chunk


def split(text: str, num_words: int, overlap: int) -> Iterator[str]:
    """Chunks of at most `num_words` words, each of which begins with the last `overlap` words of the one before.

    A chunk ends with a sentence or a paragraph, if one ends in the second half of its words that are new.

    >>> list(split("One two. Three four five six seven.", num_words=4, overlap=1))
    ['One two. Three four', 'four five six seven.']
    >>> list(split("One two three. Four five six seven.", num_words=4, overlap=0))
    ['One two three.', 'Four five six seven.']
    """
    if len(text) <= num_words:  # characters: most documents are short
        yield from filter(None, [_tidy(text.strip())])
        return
    words, window = _WORD.finditer(text), []
    while True:
        window += itertools.islice(words, num_words + 1 - len(window))
        if len(window) <= num_words:
            break
        first = overlap + (num_words - overlap + 1) // 2
        ends = (end for end in range(num_words, first - 1, -1) if _is_end(text, window[end - 1], window[end]))
        end = next(ends, num_words)
        yield _tidy(text[window[0].start() : window[end - 1].end()])
        window = window[end - overlap :]
    if window:
        yield _tidy(text[window[0].start() : window[-1].end()])


def _is_end(text: str, word: re.Match, following: re.Match) -> bool:
    """Whether a sentence or a paragraph ends between two words."""
    return bool(_SENTENCE_END.search(word[0])) or text.count("\n", word.end(), following.start()) > 1


def _tidy(text: str) -> str:
    """The text with every run of white space as one space, or as one line break if it holds one."""
    return re.sub(r"\s\s+|[^\S\n ]", lambda space: "\n" if "\n" in space[0] else " ", text)


def sections(text: str) -> Iterator[tuple[str, str]]:
    """The headings that lead to each part of a Markdown text, as "Guide > Install", and the part's text without them.

    Headings with other headings right below them are no part of their own.

    >>> list(sections("# Guide\\n## Install\\nRun it.\\n## Use\\n"))
    [('Guide > Install', 'Run it.\\n'), ('Guide > Use', '')]
    """
    start, titles = 0, []  # where the present part begins; level and text of the headings that are open
    for begin, end, level, title in itertools.chain(_headings(text), [(len(text), len(text), 0, "")]):
        body = text[start:begin]
        if body.strip() or (titles and level <= titles[-1][0]):
            yield printable(" > ".join(title for _, title in titles if title), MAX_HEADING), body
        start, titles = end, [*(entry for entry in titles if entry[0] < level), (level, title)]


def _headings(text: str) -> Iterator[tuple[int, int, int, str]]:
    """Where each heading of a Markdown text begins and ends, its level, and what it says. Code has no headings."""
    fence, previous, is_paragraph = "", "", False  # paragraph: the previous line is the first one of a paragraph
    begin = position = 0  # of the previous line, and of this one
    for line in io.StringIO(text):
        end, stripped = position + len(line), line.strip()
        mark = re.match(r" {0,3}(#{1,6}(?=\s)|`{3,}(?=[^`]*$)|~{3,}|=+\s*$|-+\s*$)", line)
        kind = mark[1].strip() if mark else ""
        if fence:
            if kind.startswith(fence) and not kind.strip(fence[0]) and stripped == kind:
                fence = ""
        elif kind[:1] in ("`", "~") and kind:
            fence = kind
        elif kind[:1] == "#":
            words, _, closing = stripped.rpartition(" ")
            yield position, end, len(kind), (words if not closing.strip("#") else stripped).lstrip("#").strip()
        elif kind and is_paragraph:  # underlined
            yield begin, end, 1 if kind[0] == "=" else 2, previous
        is_first = not previous and not fence and not kind and bool(re.match(r" {0,3}[^\s>|*+-]", line))
        begin, position, previous, is_paragraph = position, end, stripped, is_first
