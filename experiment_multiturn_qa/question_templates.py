"""Questions from templates, for use when no model writes the questions about documents.

Four kinds, each with one short answer that occurs in the document part:

- acronym:  What does "FSF" stand for?
- term:     What is defined as follows: "the copyright owner that is granting the License"?
- default:  What is the default of `highWaterMark`?
- cloze:    Complete the sentence: Covered Software is provided under this License on an ____ basis.

Questions with several right answers are left out (a sentence that occurs in several parts, a term that is defined
twice). So are questions that read badly: fragments, code, tables, and sentences that begin with "This", for example.
"""

import re
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from harness.search.documents import Document

MAX_ANSWER_WORDS, MAX_ANSWER = 6, 80  # words, characters
MIN_QUESTION, MAX_QUESTION = 10, 400  # characters
KINDS = ("acronym", "term", "default", "cloze")  # the first kinds are rarer, and read better
BLANK = "____"
MAX_SHARE = 0.01  # the largest share of parts that may contain an asked-for word; five parts always may
MEANS = r"(?:shall mean|means|mean|refers to|refer to|is defined as|are defined as)"
QUOTED_TERM = re.compile(rf"[\"“]([^\"“”]{{2,50}})[\"”] {MEANS} (.+)$")
NAMED_TERM = re.compile(r"(?:The )?((?:`[^`]{2,40}`)|(?:[A-Z][\w.+-]+(?: [A-Z][\w.+-]*){0,3})) (?:is|are) (an? .+)$")
DEFAULT = re.compile(
    r"^(?:[-*+] )?`([^`\s]{2,40})`(?=[^`\n]*(?:`[^`\n]*`[^`\n]*)*?\*{0,2}\b[Dd]efaults?(?: is| to|:|:\*\*| value is)"
    r"\*{0,2} `([^`\n]{1,40})`)"
)
ACRONYM = re.compile(r"\(([\"“]?)([A-Z]{2,6})([\"”]?)\)")
NUMBERED = re.compile(r"(?:[Ss]ections?|[Aa]rticles?|[Vv]ersions?|[Cc]hapters?|[Pp]ages?|[Ll]ines?) (?:\S+ and )?$")
NUMBER = re.compile(r"(?<![\w.§#-])(?:v?\d+(?:[.,:]\d+)+|\d{2,})(?![\w-]|\.\d)")
CODE = re.compile(r"`([^`\s]{2,40})`")
NAME = re.compile(r"(?<=[a-z,;] )[A-Z][A-Za-z]+(?: (?:of |for |the )?[A-Z][A-Za-z]+){1,4}(?![\w-])")
WORD = re.compile(r"(?<![\w`/.'\u2019-])[a-z]{5,18}(?<!ly)(?![\w`/'\u2019(-]|\.\w)")
# too plain to ask for, however few documents there are
PLAIN = re.compile(
    "about|above|after|again|against|along|already|also|although|always|among|another|because|becomes?|been|before|being|"
    "below|between|beyond|cannot|could|does|doing|done|during|either|else|enough|even|every|first|given|hence|hereby|"
    "herein|hereof|itself|just|least|less|like|made|makes?|many|might|more|most|much|must|neither|never|next|once|only|"
    "others?|otherwise|rather|same|second|several|shall|should|since|some|still|such|than|that|their|them|then|there|"
    "therefore|these|they|those|though|through|together|towards?|under|unless|until|upon|using|whatever|when|where|"
    "whether|which|while|whose|will|within|without|would|yours?"
)
MARKDOWN_PART = re.compile(r"\.md#\d+$", re.IGNORECASE)
HEADINGS = re.compile(r"((?:[^\n]{0,190} > )?[^\n]{1,200}?(?:: `[^`\n]*`)?): ")  # a heading can be "Class: `Buffer`"
MIN_WORDS, MAX_WORDS = 8, 32  # of a sentence
PASSAGE = 5  # words after a blank, or before it at the end of a sentence, that no other sentence may have
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


class Draft(NamedTuple):
    """A proposed question about a document part; `kind` is how it was made."""

    question: str
    answer: str
    kind: str


def normalise(text: str) -> str:
    """A text as the literature compares answers (SQuAD): without case, punctuation and articles.

    >>> normalise("The  “Licensor”, v2.0")
    'licensor v20'
    """
    text = "".join(letter for letter in text.lower() if letter.isalnum() or letter.isspace())
    return " ".join(word for word in text.split() if word not in ("a", "an", "the"))


def contains(text: str, words: str) -> bool:
    """Whether `words` occur in a text, as whole words; spaces and line breaks are the same.

    >>> contains("The ship\\nFardil was built", "ship Fardil"), contains("The shipyard", "ship")
    (True, False)
    """
    pattern = r"\s+".join(map(re.escape, words.split()))
    return bool(pattern) and re.search(rf"(?<!\w){pattern}(?!\w)", text) is not None


def find_fault(draft: Draft, text: str) -> str | None:
    """The reason why a question about a document part with this text is useless; None if it is useful.

    >>> find_fault(Draft("Where was the Fardil built?", "Tinhur", "written"), "Fardil was built in Tinhur.")
    >>> find_fault(Draft("Who built the Fardil?", "Jarce", "written"), "Fardil was built in Tinhur.")
    'the answer is not in the part'
    """
    if not MIN_QUESTION <= len(draft.question) <= MAX_QUESTION:
        return f"the question has not {MIN_QUESTION} to {MAX_QUESTION} characters"
    if not normalise(draft.answer) or len(draft.answer.split()) > MAX_ANSWER_WORDS or len(draft.answer) > MAX_ANSWER:
        return f"the answer has not 1 to {MAX_ANSWER_WORDS} words"
    if not contains(text, draft.answer):
        return "the answer is not in the part"
    if contains(normalise(draft.question), normalise(draft.answer)):
        return "the question gives the answer away"
    return None


class Templates:
    """Makes questions from documents, all parts in the order of the corpus; `overlap`: words shared with the part
    before.

    Whether a text is unique or rare depends on all documents, so they are read twice.
    """

    def __init__(self, documents: list[Document], overlap: int):
        self._num_parts, self._parts_with = len(documents), Counter()  # the latter by word
        self._continued = {part.id for before, part in pairwise(documents) if continues(part, before, overlap)}
        self._sentences: Counter[str] = Counter()
        self._repeated: set[int] = set()  # checksums of passages that occur in several places
        passages: set[int] = set()
        for document in documents:
            self._parts_with.update(set(re.findall(r"[^\W\d_]+", document.text)))
            sentences = {normalise(sentence) for sentence in self._sentences_in(document)}
            self._sentences.update(sentences)
            for sentence in sentences:
                around = set(passages_of(sentence.split()))
                self._repeated |= around & passages
                passages |= around
        drafts = (draft for document in documents for draft in self._proposals(document))
        self._asked = Counter(normalise(draft.question) for draft in drafts)

    def drafts(self, document: Document) -> list[Draft]:
        """The questions about a part that have one answer, the best first; each sentence is asked about once."""
        drafts = [
            draft
            for draft in self._proposals(document)
            if self._asked[normalise(draft.question)] == 1 and find_fault(draft, document.text) is None
        ]
        return sorted(drafts, key=lambda draft: KINDS.index(draft.kind))

    def _sentences_in(self, document: Document) -> list[str]:
        return sentences_of(headings_and_body(document)[1], is_beginning=document.id not in self._continued)

    def _proposals(self, document: Document) -> Iterator[Draft]:
        headings, body = headings_and_body(document)
        section = headings.rpartition(" > ")[2]
        for block in blocks_of(body):
            if match := DEFAULT.match(block):
                where = f' in the section "{section}"' if section else ""
                yield Draft(f"What is the default of `{match[1]}`{where}?", match[2], "default")
        for sentence in self._sentences_in(document):
            if self._sentences[normalise(sentence)] > 1:
                continue
            drafts = [*self._acronyms(sentence), *self._terms(sentence)]
            yield from drafts or self._cloze(sentence)

    def _acronyms(self, sentence: str) -> Iterator[Draft]:
        for match in ACRONYM.finditer(sentence):
            words = sentence[: match.start()].split()
            for length in range(len(match[2]), min(len(words), len(match[2]) + 2, MAX_ANSWER_WORDS) + 1):
                long = [word.strip('"“”,') for word in words[-length:]]
                initials = "".join(word[0] for word in long if word not in ("of", "for", "the", "and", "in", "to"))
                if initials.upper() == match[2]:
                    yield Draft(f'What does "{match[2]}" stand for?', " ".join(long), "acronym")
                    break

    def _terms(self, sentence: str) -> Iterator[Draft]:
        match = QUOTED_TERM.match(sentence) or NAMED_TERM.match(sentence)
        if match is None:
            return
        term, meaning = match[1].strip("`"), match[2].rstrip(".! ")
        is_term = match.re is QUOTED_TERM or "`" in match[1] or self._is_name(term)
        if is_term and len(term.split()) <= 4 and 5 <= len(meaning.split()) <= MAX_WORDS:
            verb = "defined" if match.re is QUOTED_TERM else "described"
            yield Draft(f'What is {verb} as follows: "{meaning.replace(chr(34), chr(39))}"?', term, "term")

    def _is_name(self, words: str) -> bool:
        """Whether none of the words occurs in lower case: every sentence begins with a capital."""
        return not any(self._parts_with[word.lower()] for word in re.findall(r"[^\W\d_]+", words))

    def _cloze(self, sentence: str) -> Iterator[Draft]:
        """Ask for a word of the best pattern that matches: a rare word, and a noun rather than a possible verb."""
        for pattern in (NUMBER, CODE, NAME, WORD):
            choices = []
            for match in pattern.finditer(sentence):
                answer, (start, end) = match[match.lastindex or 0], match.span(match.lastindex or 0)
                if self._is_worth_asking(pattern, answer, sentence, sentence[: match.start()]):
                    may_be_verb = answer.endswith(("ed", "ing"))
                    choices.append((may_be_verb, self._parts_with[answer], -len(answer), start, end))
            if choices:
                *_, start, end = min(choices)
                before, after = normalise(sentence[:start]).split(), normalise(sentence[end:]).split()
                around = passages_of(after[:PASSAGE]) or passages_of(before[-PASSAGE:])
                if self._repeated.isdisjoint(around):
                    question = f"Complete the sentence: {sentence[:start]}{BLANK}{sentence[end:]}"
                    yield Draft(question, sentence[start:end], "cloze")
                return

    def _is_worth_asking(self, pattern: re.Pattern, answer: str, sentence: str, before: str) -> bool:
        if len(re.findall(re.escape(answer), sentence, re.IGNORECASE)) > 1 or len(before.split()) < 2:
            return False
        if pattern is NUMBER:
            return not NUMBERED.search(before)
        is_rare = self._parts_with[answer] <= max(5, MAX_SHARE * self._num_parts)
        return pattern is not WORD or (is_rare and PLAIN.fullmatch(answer) is None)


# Reading a part -------------------------------------------------------------------------------------------------------


def headings_and_body(document: Document) -> tuple[str, str]:
    """The headings that `read_corpus` puts before a part of a Markdown file, "Guide > Install", and the bare part.

    >>> headings_and_body(Document("guide.md#3", "Guide > Install: Type `pip install`."))
    ('Guide > Install', 'Type `pip install`.')
    """
    match = HEADINGS.match(document.text) if MARKDOWN_PART.search(document.id) else None
    return (match[1], document.text[match.end() :]) if match else ("", document.text)


def continues(document: Document, before: Document, overlap: int) -> bool:
    """Whether a part continues the part before it in the same section, mostly within a sentence."""
    if document.id.rpartition("#")[0] != before.id.rpartition("#")[0] or "#" not in document.id:
        return False
    shared = before.text.split()[-overlap:] if overlap else []
    return not shared or headings_and_body(document)[1].split()[: len(shared)] == shared


def blocks_of(text: str) -> Iterator[str]:
    """The paragraphs and list items of plain text or Markdown, each in one line; no code, tables or headings."""
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
        is_beginning: the part begins where its document begins, so not within a sentence.
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
