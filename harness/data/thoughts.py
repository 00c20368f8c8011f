"""The answer after a thought: the part of a completion that a judge sees."""

import json
from pathlib import Path
from typing import NamedTuple

from common.chat import opening
from common.errors import UserError
from common.trajectory import Trajectory

from harness.base.terminal import say


class ThoughtFormat(NamedTuple):
    """The tags of a completion: `<think>...</think>` and then the answer, which can have its own tags.

    `thought_begins` can be missing in a completion, because some templates write it. Without `answer_begins` and
    `answer_ends`, the answer is the rest of the text.
    """

    thought_begins: str = "<think>"
    thought_ends: str = "</think>"
    answer_begins: str = ""
    answer_ends: str = ""


def read_format(given: str) -> ThoughtFormat:
    """`--answer-begins`: the tag that ends the thought, `</think>` for example, or a JSON file with all tags.

    >>> read_format("</think>")
    ThoughtFormat(thought_begins='<think>', thought_ends='</think>', answer_begins='', answer_ends='')

    Raises:
        UserError: the file does not hold an object with names and texts of `ThoughtFormat`, or a tag is missing.
    """
    names, fields = ThoughtFormat._fields, {"thought_begins": given.replace("/", "", 1), "thought_ends": given}
    if given.endswith(".json"):
        try:
            fields = json.loads(Path(given).expanduser().read_text(encoding="utf-8"))
            if others := {*fields} - {*names} if isinstance(fields, dict) else {type(fields).__name__}:
                raise ValueError(f"not {min(others)}")
        except (OSError, ValueError) as error:
            raise UserError(
                f"--answer-begins {given}: it must be a JSON object of {', '.join(names)} ({error})"
            ) from error
    found = ThoughtFormat(**fields)
    if not all(isinstance(tag, str) for tag in found) or not found.thought_ends:
        raise UserError(f"--answer-begins {given}: thought_ends must be text, and so must the other tags")
    if bool(found.answer_begins) != bool(found.answer_ends):
        raise UserError(f"--answer-begins {given}: give both answer_begins and answer_ends, or neither")
    return found


def answer_of(text: str, tags: ThoughtFormat, strict: bool = False) -> str | None:
    """The answer in a completion, without its thought; None if there is no answer that a judge could score.

    A completion without tags is its own answer. After several thoughts, the answer is the text after the last one.
    `strict` accepts one form only: a thought that begins the text and is closed once, then an answer that is not empty,
    between its tags if it has any, and nothing else.

    >>> tags = ThoughtFormat()
    >>> answer_of("<think>20+38=58</think> It is 58.", tags), answer_of("It is 58.", tags)
    ('It is 58.', 'It is 58.')
    >>> answer_of("<think>20+38", tags)  # not closed
    >>> answer_of("It is 58.", tags, strict=True)  # no thought
    """
    if strict and not _is_well_formed(text, tags):
        return None
    answer = text.rpartition(tags.thought_ends)[2]
    if tags.thought_begins:
        answer = answer.partition(tags.thought_begins)[0]  # a thought that is not closed never ends
    if tags.answer_begins:
        _, begun, inner = answer.partition(tags.answer_begins)
        if begun:
            answer = inner.partition(tags.answer_ends)[0]
    return answer.strip() or None


def tell_of_openings(tokenizer, rows: list[Trajectory]) -> None:
    """Say how many answers do not begin where the policy will, since the chat template opens a thought for it."""
    begun = opening(tokenizer)
    prompts = (tokenizer.decode(row.ids[: row.prompt_length][-64:]) for row in rows)
    if count := sum(not prompt.endswith(begun) for prompt in prompts):
        say(
            f"{count} of {len(rows)} rows do not continue {begun!r}, which ends the prompt when the policy samples: "
            "they are learned as the chat template renders them. --chat-template takes one that does not write it"
        )


def _is_well_formed(text: str, tags: ThoughtFormat) -> bool:
    parts = text.strip().split(tags.thought_ends)
    if len(parts) != 2:
        return False
    thought, answer = parts[0].removeprefix(tags.thought_begins), parts[1].strip()
    if tags.answer_begins:
        inner = answer.removeprefix(tags.answer_begins).removesuffix(tags.answer_ends)
        if answer != f"{tags.answer_begins}{inner}{tags.answer_ends}":
            return False
        answer = inner
    return bool(answer.strip()) and not any(tag in thought or tag in answer for tag in tags if tag)
