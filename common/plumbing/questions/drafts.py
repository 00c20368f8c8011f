"""A proposed question, and whether it is of use: its answer is short, stands in the part, and not in the question."""

import re
from typing import NamedTuple

from common.plumbing.retrieval.documents import Document

MAX_ANSWER_WORDS, MAX_ANSWER = 6, 80  # words, characters
MIN_QUESTION, MAX_QUESTION = 10, 400  # characters


class Draft(NamedTuple):
    """A question that somebody has proposed about a document part; `kind` is how it was made."""

    question: str
    answer: str
    kind: str


Unit = tuple[Document, int]  # a document part, and how often it has been asked about before
Outcome = Draft | str  # a question, or why there is none


def normalise(text: str) -> str:
    """As the literature compares answers (SQuAD): without case, punctuation and articles.

    >>> normalise("The  “Licensor”, v2.0")
    'licensor v20'
    """
    text = "".join(letter for letter in text.lower() if letter.isalnum() or letter.isspace())
    return " ".join(word for word in text.split() if word not in ("a", "an", "the"))


def contains(text: str, words: str) -> bool:
    """Whether `words` stand in a text, as words of their own; spaces and line breaks are the same.

    >>> contains("The ship\\nFardil was built", "ship Fardil"), contains("The shipyard", "ship")
    (True, False)
    """
    pattern = r"\s+".join(map(re.escape, words.split()))
    return bool(pattern) and re.search(rf"(?<!\w){pattern}(?!\w)", text) is not None


def find_fault(draft: Draft, text: str) -> str | None:
    """Why a question about a document part with this text is of no use; None if it is.

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
