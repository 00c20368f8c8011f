"""From what was proposed to the rows of the output: which questions are kept, and how hard they are."""

from collections import Counter

from common.errors import UserError
from common.search import Index

from common.plumbing.questions.drafts import Draft, Outcome, find_fault, normalise
from common.plumbing.retrieval.documents import Document

DEPTH = 10  # of the search that measures the difficulty


def choose(
    asked: list[Document], outcomes: list[Outcome], known: set[str], most: int
) -> tuple[list[tuple[Document, Draft]], Counter[str]]:
    """The questions of a batch that can be used, at most `most`, and why the others cannot; `known` grows by them."""
    kept, discarded = [], Counter()
    for document, outcome in zip(asked, outcomes, strict=True):
        if len(kept) == most:
            break
        fault = outcome if isinstance(outcome, str) else find_fault(outcome, document.text)
        if fault is None and normalise(outcome.question) in known:
            fault = "the question has been asked"
        if fault is None:
            known.add(normalise(outcome.question))
            kept.append((document, outcome))
        else:
            discarded[fault] += 1
    return kept, discarded


def to_rows(kept: list[tuple[Document, Draft]], index: Index) -> list[dict]:
    rows, found = [], index.search_all([draft.question for _, draft in kept], DEPTH)
    for (document, draft), hits in zip(kept, found, strict=True):
        if isinstance(hits, Exception):
            raise UserError(f"the difficulty of a question could not be measured ({hits})")
        ids = [hit.document for hit in hits]
        difficulty = "hard" if document.id not in ids else "easy" if ids[0] == document.id else "medium"
        rows.append(
            {"question": draft.question, "answer": draft.answer, "supporting": [document.id], "difficulty": difficulty}
        )
    return rows
