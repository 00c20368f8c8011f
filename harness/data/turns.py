"""Turns of other people's conversations, brought to role and content."""

import json
import re

from common.messages import check_message

from harness.base.terminal import short

# The speakers of ShareGPT, and their roles
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
ROLES |= {"tool": "tool", "observation": "tool", "function_call": "assistant"}
MORE = "; docs/data.md shows what is read, and how to convert the rest"
_HH = re.compile(r"\s*Human:.*?\n\nAssistant:", re.DOTALL)


def parsed(text: str) -> object:
    """What a text spells as JSON, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def as_turns(value: object, role: str) -> list[dict]:
    """Turns by `plain`, of which a text is one of `role`."""
    value = plain(value)
    return [{"role": role, "content": value}] if isinstance(value, str) else value if isinstance(value, list) else []


def plain(value: object) -> object:
    r"""Turns with role and content, from ShareGPT's, from parts of text, from HH's or JSON's text; other text as it is.

    >>> plain([{"from": "human", "value": "Hi!"}]), plain("Hi!")
    ([{'role': 'user', 'content': 'Hi!'}], 'Hi!')
    >>> plain("\n\nHuman: Hi!\n\nAssistant: Hello.")
    [{'role': 'user', 'content': 'Hi!'}, {'role': 'assistant', 'content': 'Hello.'}]

    Raises:
        ValueError: a speaker is unknown, or a part is no text.
    """
    if isinstance(value, str):
        found = parsed(value) if value.lstrip().startswith("[") else None
        if (
            found
            and isinstance(found, list)
            and all(isinstance(turn, dict) and turn.keys() & {"role", "from"} for turn in found)
        ):
            value = found
        elif _HH.match(value):
            _, *parts = re.split(r"\n\n(Human|Assistant):", "\n\n" + value.lstrip())
            roles = [{"Human": "user", "Assistant": "assistant"}[name] for name in parts[::2]]
            return [{"role": role, "content": text.strip()} for role, text in zip(roles, parts[1::2], strict=True)]
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list) or all(map(_is_plain, value)):
        return value
    turns = [_plain_turn(turn, position) for position, turn in enumerate(value)]
    return value if turns == value else turns


def _is_plain(turn: object) -> bool:
    """Whether there is nothing to do, as for most turns."""
    is_usual = isinstance(turn, dict) and len(turn) == 2 and isinstance(turn.get("content"), str)
    return is_usual and turn.get("role") in ("user", "assistant", "system", "tool")


def _plain_turn(turn: object, position: int) -> dict:
    if not isinstance(turn, dict):
        check_message(turn, position)
    turn = dict(turn)
    speaker = turn.get("role")
    if turn.get("from") is not None:
        speaker, content = turn.pop("from"), turn.pop("value", None)
        if speaker not in list(ROLES):
            raise ValueError(
                f"message {position} is from {short(speaker)}, and not from one of {', '.join(ROLES)}{MORE}"
            )
        turn |= {"role": ROLES[speaker]} | ({"content": content} if content is not None else {})
    elif speaker in ("human", "gpt"):
        turn["role"] = ROLES[speaker]
    if isinstance(turn.get("content"), list):
        turn["content"] = "".join(_text_of(part, position) for part in turn["content"])
    if speaker == "function_call":
        calls = parsed(turn["content"]) if isinstance(turn.get("content"), str) else None
        calls = calls if isinstance(calls, list) else [calls]
        if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
            raise ValueError(f"message {position} is a call that is no JSON with a name")
        turn |= {"content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]}
    check_message(turn, position)
    return turn


def _text_of(part: object, position: int) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
    if not isinstance(text, str):
        raise ValueError(f"message {position} has a part that is no text: only text is read")
    return text
