"""Write conversations with thoughts in one of four forms, to compare policies that think with policies that do not.

    python imitation/sft/format_chats.py --data thoughts.jsonl --form think --output runs/think.jsonl
    python imitation/sft/format_chats.py --data thoughts.jsonl --form answer --output runs/answer.jsonl
    python imitation/sft/train.py --data runs/think.jsonl

A thought is beside the content (`reasoning_content`, `thinking`, ...), or in it, before `</think>`, `</thinking>` or
`</reasoning>`. A row is {"messages": [...]}, and "tools" if it has them.

All forms have the same rows, so that nothing but the form differs: a row is left out, and counted, unless each of its
answers has one thought. An earlier answer with "weight": 0 may be without one, and then stays as it is.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
import json
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal

from common.errors import UserError
from common.messages import THOUGHTS

from harness.base.checks import local_path
from harness.base.config import ROOT, InputPath, LocalPath, shown
from harness.base.files import replace_file
from harness.base.terminal import say
from harness.cli.parse import parse_plain
from harness.data.data import read_rows
from harness.data.thoughts import KNOWN_TAGS, RESPONSE_TAGS
from harness.run.start import run_main

# The bytes of github.com/princeton-pli/RLMT (arXiv 2509.20357), training/sft_dpo/utils/src: `think` and `answer` of
# build_sft_dataset.py, the others of build_dpo_dataset.py, for prompted models
FORMS = {
    "think": "<think>\n{thought}\n</think>\n\n{answer}",
    "think-response": "<think> {thought} </think>\n<response> {answer} </response>",
    "answer": "{answer}",
    "response": "<response> {answer} </response>",
}
TAGS = (*chain(*KNOWN_TAGS), *RESPONSE_TAGS)


@dataclass(frozen=True, kw_only=True)
class Config:
    FIRST_GROUP: ClassVar[str] = "conversations"

    # a file or hub dataset (docs/data.md) of conversations with thoughts
    data: InputPath = str(ROOT / "data" / "reasoned_sums.jsonl")
    form: Literal["think", "think-response", "answer", "response"] = "think"  # of every answer
    output: LocalPath = "runs/formatted.jsonl"  # a JSONL file for train.py


def main(argv: list[str] | None = None) -> None:
    config = parse_plain(Config(), argv, __doc__)
    rows = read_rows(config.data, {"messages": list})
    written = [formatted(row, config.form) for row in rows]
    left_out = Counter(row for row in written if isinstance(row, str))
    reasons = ", ".join(f"{reason} {count}" for reason, count in left_out.items()) or "none"
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in written if isinstance(row, dict)]
    if not lines:
        raise UserError(f"{shown(config.data)}: no row is left to write; left out: {reasons}")
    path = local_path(config.output, "--output")
    if path.resolve() == local_path(config.data, "--data").resolve():
        raise UserError(f"--output {shown(path)} is --data, whose thoughts would be lost: choose another")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, "".join(lines).encode())
    except OSError as error:
        raise UserError(f"--output {shown(path)} cannot be written ({error.strerror})") from error
    say(f"{shown(path)}: {len(lines)} of {len(rows)} rows; left out: {reasons}")


def formatted(row: dict, form: str) -> dict | str:
    """A row with its answers in a form of `FORMS`; or the reason why it is left out."""
    messages, outcome = [], "no answer"
    for message in row["messages"]:
        if message["role"] == "assistant":
            outcome = parts_of(message)
            if isinstance(outcome, tuple):
                thought, answer = outcome
                others = {name: value for name, value in message.items() if name not in THOUGHTS}
                message = others | {"content": FORMS[form].format(thought=thought, answer=answer)}
            elif message.get("weight") != 0:
                return outcome
        messages.append(message)
    if isinstance(outcome, str):  # of the last answer
        return outcome
    return {"messages": messages} | ({"tools": row["tools"]} if row.get("tools") else {})


def parts_of(message: dict) -> tuple[str, str] | str:
    """Thought and answer of an assistant's message, without their tags; or what is missing.

    >>> parts_of({"content": "<think>2+2</think><response>4</response>"}), parts_of({"content": "4", "thinking": "2+2"})
    (('2+2', '4'), ('2+2', '4'))
    >>> parts_of({"content": "4"}), parts_of({"content": "4", "thinking": ""})
    ('no thought', 'no thought')
    >>> parts_of({"content": "<think>a</think>b<think>c</think>d"}), parts_of({"content": "<think>a</think>"})
    ('several thoughts or stray tags', 'no answer')
    """
    answer = message.get("content") or ""
    thoughts = {str(message[name]).strip() for name in THOUGHTS if message.get(name)}  # several names of the same text
    for begins, ends in KNOWN_TAGS:
        if ends in answer:
            thought, _, answer = answer.partition(ends)
            thoughts.add(thought.strip().removeprefix(begins).strip())
    begins, ends = RESPONSE_TAGS
    answer = answer.strip().removeprefix(begins).removesuffix(ends).strip()
    thoughts -= {""}
    if not thoughts:
        return "no thought"
    if len(thoughts) > 1 or any(tag in text for tag in TAGS for text in (*thoughts, answer)):
        return "several thoughts or stray tags"
    return (*thoughts, answer) if answer else "no answer"


if __name__ == "__main__":
    run_main(main)
