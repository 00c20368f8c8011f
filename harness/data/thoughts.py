"""The answer after a thought: the part of a completion that a judge sees."""

import json
import os
from pathlib import Path
from typing import NamedTuple

from common.chat import opening
from common.errors import UserError
from common.trajectory import Trajectory

from harness.base.config import shown
from harness.base.terminal import say

LONGCOT = "longcot_config.json"  # beside a model's weights
KNOWN_TAGS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<reasoning>", "</reasoning>"))
RESPONSE_TAGS = ("<response>", "</response>")  # around an answer, after the thought
ROWS_READ = 256  # of a data set, to find its tags
LONGCOT_TEXTS = ("longcot_delimiter", "end_delimiter", "start_think_marker")


class ThoughtFormat(NamedTuple):
    """The tags of a completion: `<think>...</think>` and then the answer, which can have its own tags.

    `thought_begins` can be missing in a completion, because some templates write it. Without `answer_begins` and
    `answer_ends`, the answer is the rest of the text; with `answer_ends` alone, the rest of the text up to it.
    """

    thought_begins: str = "<think>"
    thought_ends: str = "</think>"
    answer_begins: str = ""
    answer_ends: str = ""


def read_format(given: str) -> ThoughtFormat | None:
    """`--answer-begins`: the tag that ends the thought, `</think>` for example, or a JSON file with all tags.

    Such a file is also a `longcot_config.json`, or that of a model's directory. None: it says that there is no thought.

    >>> read_format("</think>")
    ThoughtFormat(thought_begins='<think>', thought_ends='</think>', answer_begins='', answer_ends='')

    Raises:
        UserError: the file does not hold an object with names and texts of `ThoughtFormat`, or a tag is missing; or the
            directory does not exist, or has no longcot_config.json.
    """
    path = os.path.expanduser(given)
    if os.path.isdir(path) or Path(path).name == LONGCOT:
        return _read_longcot(given, Path(path, LONGCOT) if os.path.isdir(path) else Path(path))
    if names_file(given) and not given.endswith(".json"):
        raise UserError(
            f"--answer-begins {shown(given)}: there is no such directory; a tag like this can be given in a JSON file"
        )
    names, fields = ThoughtFormat._fields, {"thought_begins": given.replace("/", "", 1), "thought_ends": given}
    if given.endswith(".json"):
        try:
            fields = json.loads(Path(given).expanduser().read_text(encoding="utf-8"))
            if others := {*fields} - {*names} if isinstance(fields, dict) else {type(fields).__name__}:
                raise ValueError(f"not {min(others)}")
        except (OSError, ValueError) as error:
            raise UserError(
                f"--answer-begins {shown(given)}: it must be a JSON object of {', '.join(names)} ({error})"
            ) from error
    found = ThoughtFormat(**fields)
    if not all(isinstance(tag, str) for tag in found) or not found.thought_ends:
        raise UserError(f"--answer-begins {shown(given)}: thought_ends must be text, and so must the other tags")
    if bool(found.answer_begins) != bool(found.answer_ends):
        raise UserError(f"--answer-begins {shown(given)}: give both answer_begins and answer_ends, or neither")
    return found


def names_file(given: str) -> bool:
    """Whether `--answer-begins` names a file or a directory, which need not exist, and not a tag.

    >>> names_file("</think>"), names_file("[/THINK]"), names_file("tags.json"), names_file("runs/sft/a/final")
    (False, False, True, True)
    """
    is_like_path = "/" in given and not any(mark in given for mark in "<>[]|\n")
    return given.endswith(".json") or is_like_path or os.path.isdir(os.path.expanduser(given))


def _read_longcot(given: str, path: Path) -> ThoughtFormat | None:
    """The tags in a longcot_config.json; its other keys are about prompts, and are not read."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            raise ValueError(f"not {type(fields).__name__}")
        if not isinstance(fields.get("longcot"), bool):
            raise ValueError("longcot must be true or false")
        for name in LONGCOT_TEXTS:
            if not isinstance(fields.get(name), str | None):
                raise ValueError(f"{name} must be text")
        if fields["longcot"] and not fields.get("longcot_delimiter"):
            raise ValueError("longcot_delimiter is missing")
    except (OSError, ValueError) as error:
        names = ", ".join(["longcot", *LONGCOT_TEXTS])
        raise UserError(
            f"--answer-begins {shown(given)}: {LONGCOT} must be a JSON object of {names} ({error})"
        ) from error
    if not fields["longcot"]:
        return None
    thought_ends, answer_ends, thought_begins = (fields.get(name) or "" for name in LONGCOT_TEXTS)
    if thought_ends == "<response>":
        answer_ends = answer_ends or "</response>"  # RLMT's prompted models do not name it, its reward worker adds it
    return ThoughtFormat(thought_begins.strip(), thought_ends, answer_ends=answer_ends)  # some markers end with "\n"


def write_longcot(tokenizer, rows: list[Trajectory], run: Path) -> None:
    """Write longcot_config.json beside a policy that has learned these rows, if most have a thought in known tags.

    The marker of its beginning is null if the chat template writes it, so that nothing writes it a second time. If most
    answers are in `<response>`, these tags delimit them.
    """
    texts = [tokenizer.decode(row.completion_ids, skip_special_tokens=True).strip() for row in rows[:ROWS_READ]]
    for begins, ends in KNOWN_TAGS:
        thoughts = [text.partition(ends)[0] for text in texts if ends in text]
        if sum(bool(thought.removeprefix(begins).strip()) for thought in thoughts) * 2 > len(texts):
            is_written = sum(thought.startswith(begins) for thought in thoughts) * 2 > len(thoughts)
            answers = [text.partition(ends)[2].strip() for text in texts]
            has_tags = sum(answer.startswith(RESPONSE_TAGS[0]) for answer in answers) * 2 > len(texts)
            values = (*(RESPONSE_TAGS if has_tags else (ends, None)), begins if is_written else None)
            config = json.dumps({"longcot": True, **dict(zip(LONGCOT_TEXTS, values, strict=True))}, indent=2)
            for place in (run / "final", run / "final_merged"):
                if place.is_dir():
                    (place / LONGCOT).write_text(f"{config}\n", encoding="utf-8")
            return


def check_is_shown(tokenizer, given: str | None) -> None:
    """Refuse an end of thoughts that no judge would see, since a completion's text has no special tokens."""
    tags = read_format(given) if given else None
    hidden = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    if tags is not None and any(token in tags.thought_ends for token in hidden):
        raise UserError(
            f"--answer-begins {shown(given)}: {tags.thought_ends} is a special token of the model, which the text of a "
            "completion leaves out, so that a thought could not be told from an answer"
        )


def answer_of(text: str, tags: ThoughtFormat | None, strict: bool = False) -> str | None:
    """The answer in a completion, without its thought; None if there is no answer that a judge could score.

    If `tags` is None, there are no thoughts. A completion without tags is its own answer. After several thoughts, the
    answer is the text after the last one.
    `strict` accepts one form only: a thought that begins the text and is closed once, then an answer that is not empty,
    between its tags if it has any, and nothing else.

    >>> tags = ThoughtFormat()
    >>> answer_of("<think>20+38=58</think> It is 58.", tags), answer_of("It is 58.", tags)
    ('It is 58.', 'It is 58.')
    >>> answer_of("<think>20+38", tags)  # not closed
    >>> answer_of("It is 58.", tags, strict=True)  # no thought
    """
    if tags is None:
        return text.strip() or None
    if strict and not _is_well_formed(text, tags):
        return None
    answer = text.rpartition(tags.thought_ends)[2]
    if tags.thought_begins:
        answer = answer.partition(tags.thought_begins)[0]  # a thought that is not closed never ends
    if tags.answer_begins:
        _, begun, inner = answer.partition(tags.answer_begins)
        if begun:
            answer = inner.partition(tags.answer_ends)[0]
    elif tags.answer_ends:
        answer = answer.partition(tags.answer_ends)[0]
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
    else:
        answer = answer.removesuffix(tags.answer_ends)  # a server may leave it out
    return bool(answer.strip()) and not any(tag in thought or tag in answer for tag in tags if tag)
