"""Reading a document part: its headings, its paragraphs, and those of its sentences that are complete prose."""

import re
import zlib
from collections.abc import Iterator

from common.plumbing.retrieval.documents import Document

MARKDOWN_PART = re.compile(r"\.md#\d+$", re.IGNORECASE)
HEADINGS = re.compile(r"((?:[^\n]{0,190} > )?[^\n]{1,200}?(?:: `[^`\n]*`)?): ")  # a heading may be "Class: `Buffer`"
MIN_WORDS, MAX_WORDS = 8, 32  # of a sentence
PASSAGE = 5  # words behind a blank, or at the end of a sentence before it, that no other sentence may have
ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|cf|vs|Mr|Mrs|Dr|Prof|St|No|Inc|Ltd|Co|Corp|Fig|Sec|approx|[A-Z]))\.$")
POINTS_BACK = re.compile(
    r"(?:It|Its|This|These|They|Their|Such|That|Those|He|She|His|Her|Here|There|Then|Thus|So|Also|And|But|Or|However|"
    r"Therefore|Otherwise|Instead|Both|See|Note|Example|The (?:above|following|same|former|latter)|As such|"
    r"For (?:example|instance|more|further|details)|(?:If|In) (?:this|these|that|such))\b"
)
LIST_ITEM = re.compile(r"^(?:[-*+•]|\(?\w{1,2}[.)]|\d+(?:\.\d+)+\.?)\s+")
NO_PROSE = re.compile(
    r"(?:^|\s)[#*+-]+\s|https?:|www\.|@\w|[|{}<>\\=\[\]_]|\.\.\.|\*\*|\b(?:above|below)\b|\((?:[ivx]+|[a-h])\)\s|"
    r"[^\x20-\x7e\xa0-\u024f\u2010-\u201f]"
)


def headings_and_body(document: Document) -> tuple[str, str]:
    """What `read_corpus` has put in front of a part of a Markdown file, "Guide > Install", and the part without it.

    >>> headings_and_body(Document("guide.md#3", "Guide > Install: Type `pip install`."))
    ('Guide > Install', 'Type `pip install`.')
    """
    match = HEADINGS.match(document.text) if MARKDOWN_PART.search(document.id) else None
    return (match[1], document.text[match.end() :]) if match else ("", document.text)


def continues(document: Document, before: Document, overlap: int) -> bool:
    """Whether a part begins where another one of its section goes on, mostly within a sentence."""
    if document.id.rpartition("#")[0] != before.id.rpartition("#")[0] or "#" not in document.id:
        return False
    shared = before.text.split()[-overlap:] if overlap else []
    return not shared or headings_and_body(document)[1].split()[: len(shared)] == shared


def blocks_of(text: str) -> Iterator[str]:
    """The paragraphs and the list items of plain text or Markdown, each in one line; no code, tables or headings."""
    fence, block, was_title = None, [], False
    width = max(map(len, text.splitlines()), default=0)
    for line in [*text.splitlines(), ""]:
        bare = line.strip()
        if mark := re.match(r"(```|~~~)", bare):
            fence = None if fence == mark[1] else fence or mark[1]
            bare = ""
        is_text = bare and fence is None and not re.match(r"[#|>=+~]|(?:[-*_=] ?){3,}$|\[[^\]]+\]:", bare)
        is_new = LIST_ITEM.match(bare) or (was_title and re.match(r"[\"“`(A-Z]", bare))
        if block and (not is_text or is_new):
            yield " ".join(" ".join(block).split())
            block = []
        if is_text:
            block.append(bare)
        was_title = len(bare) < 0.6 * width and re.search(r"[^.,;:!?-]$", bare) is not None


def sentences_of(text: str, is_beginning: bool) -> list[str]:
    """The complete sentences of a part that read like prose.

    Args:
        is_beginning: the part begins where its document does, and not perhaps within a sentence.
    """
    found = []
    for number, block in enumerate(blocks_of(text)):
        block = LIST_ITEM.sub("", block)
        block = re.sub(r"!?\[([^\[\]]+)\](?:\([^()]*\)|\[[^\[\]]*\])", r"\1", block)  # the text of a link
        block = re.sub(r"\*\*(.+?)\*\*|(?<!\w)__(.+?)__(?!\w)", r"\1\2", block)
        pieces: list[str] = []
        for piece in re.split(r"(?<=[.!?])\s+|(?<=[.!?][\"”\u2019')*])\s+", block):
            if pieces and (ABBREVIATION.search(pieces[-1][-10:]) or not re.match(r"[\"“'\u2018(*_]*[A-Z0-9`]", piece)):
                pieces[-1] += " " + piece
            else:
                pieces.append(piece)
        found += pieces[0 if number or is_beginning else 1 :]
    return [sentence for sentence in found if is_prose(sentence)]


def is_prose(sentence: str) -> bool:
    words = sentence.split()
    if not MIN_WORDS <= len(words) <= MAX_WORDS or not re.match(r"[\"“`A-Z]", sentence) or sentence[-1] not in ".!":
        return False
    if NO_PROSE.search(sentence):
        return False
    if any(sentence.count(mark) % 2 for mark in '`"*') or sentence.count("(") != sentence.count(")"):
        return False
    if sentence.count("“") != sentence.count("”") or POINTS_BACK.match(sentence):
        return False
    if sum(word[0].isupper() for word in words) > 0.6 * len(words):  # a title
        return False
    plain = sum(re.fullmatch(r"[\"“(]?[A-Za-z][a-z'\u2019-]*[,.;:)\"”!]*", word) is not None for word in words)
    return plain >= 0.75 * len(words)


def passages_of(words: list[str]) -> list[int]:
    """Checksums of all passages of `PASSAGE` words; none if there are fewer words."""
    return [zlib.crc32(" ".join(words[start : start + PASSAGE]).encode()) for start in range(len(words) - PASSAGE + 1)]
