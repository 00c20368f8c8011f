"""Messages and tools in one form, whatever file they come from; and the parts of a message that a template must write.

Arrow gives every row the keys of all rows, OpenAI writes arguments as JSON text, and some files call a function instead
of a tool: the same conversation then gives the same ids.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress

THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought")  # fields of a message, beside its content
_ARGUMENTS = ("arguments", "args", "parameters", "input")  # names of the same field; the last three are of other tools


def check_message(message: object, position: int) -> None:
    """Raise a ValueError if a message has no role, a weight that is neither 0 nor 1, or a content that is not text."""
    if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
        raise ValueError(f"message {position} is not an object with a role")
    if message.get("weight") not in (None, 0, 1):
        raise ValueError(f"the weight of message {position} is neither 0 nor 1")
    role, content = message["role"], message.get("content")
    calls = role == "assistant" and (message.get("tool_calls") or message.get("function_call"))
    is_known = role in ("system", "user", "assistant", "tool", "function")
    if is_known and not isinstance(content, str) and not (content is None and calls):
        raise ValueError(f"the content of message {position} ({role}) is not text")


def normal_row(messages: list[dict], tools: object = None) -> tuple[list[dict], list[dict] | None]:
    """Messages and tools in the form that is rendered.

    Keys that are null are absent, `arguments`, `tool_calls` and `tools` that are JSON text are decoded, a call without
    arguments has the arguments {}, and every call is an object with a `function`.

    Raises:
        ValueError: a message is no object, or a call or a tool is malformed.
    """
    normal = []
    for position, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"message {position} is not an object with a role")
        try:
            normal.append(_normal_message(message))
        except ValueError as error:
            raise ValueError(f"message {position}: {error}") from error
    tools = _decoded(tools, list, "tools") or []
    return normal, [_without_nulls(_decoded(tool, dict, "a tool")) for tool in tools] or None


def _normal_message(message: dict) -> dict:
    normal = {key: value for key, value in message.items() if value is not None or key == "content"}
    if normal.get("role") == "function":  # the older names of OpenAI
        normal["role"] = "tool"
    calls, call = (normal.pop(name, None) for name in ("tool_calls", "function_call"))
    if calls := _decoded(calls, list, "tool_calls") or [call] * bool(call):
        normal |= {"content": normal.get("content") or "", "tool_calls": [_normal_call(call) for call in calls]}
    return normal


def _normal_call(call: object) -> dict:
    call = _without_nulls(_decoded(call, dict, "a call") or {})
    names = [name for name in ("name", *_ARGUMENTS) if name in call]
    function = call["function"] if "function" in call else {name: call.pop(name) for name in names}
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise ValueError("a call has no name")
    given = next((function[name] for name in _ARGUMENTS if name in function), None)
    arguments = _without_nulls(_decoded(given, dict, f"arguments of {function['name']}") or {})
    rest = {name: value for name, value in function.items() if name not in _ARGUMENTS}
    return {"type": "function"} | call | {"function": rest | {"arguments": arguments}}


def _decoded(value: object, kind: type, name: str) -> object:
    """`value`, or what it spells as JSON; None if it is empty. ValueError if it is of another kind."""
    given = value
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value.strip() or "null")
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name}: {str(given)[:80]!r} is not a JSON {'list' if kind is list else 'object'}")
    return value


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def with_text_arguments(messages: list[dict]) -> list[dict]:
    """Messages in normal form, but with the arguments of calls as JSON text."""

    def text(call: dict) -> dict:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return call | {"function": call["function"] | {"arguments": arguments}}

    return [m | {"tool_calls": [text(call) for call in m["tool_calls"]]} if "tool_calls" in m else m for m in messages]


def with_reasoning_content(messages: list[dict]) -> list[dict]:
    """Messages with their thoughts also under the names that templates read; not all transformers versions do it."""

    def named(message: dict) -> dict:
        thought = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
        return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}

    return list(map(named, messages))


def parts(message: dict) -> Iterator[tuple[str, str, dict]]:
    """The names and texts of what a message in normal form says, each with a message that says something else there."""
    content = message.get("content")
    if message["role"] != "assistant":
        if isinstance(content, str):
            yield "content", content.strip(), message | {"content": content + "x"}
        return
    for name in THOUGHTS:
        if thought := message.get(name):
            yield name, str(thought).strip(), message | {name: f"{thought}x"}
    pieces = re.split("(</?think>)", content) if isinstance(content, str) else []  # text, tag, text, tag, ..., text
    for index in range(0, len(pieces), 2):
        text, is_thought = pieces[index].strip(), pieces[index + 1 : index + 2] == ["</think>"]
        if text:
            changed = "".join([*pieces[:index], pieces[index] + "x", *pieces[index + 1 :]])
            yield "thought" if is_thought else "content", text, message | {"content": changed}
    calls = message.get("tool_calls", [])
    for index, call in enumerate(calls):
        name = call["function"]["name"]
        other = call | {"function": call["function"] | {"name": name + "x"}}
        yield "call", name, message | {"tool_calls": [*calls[:index], other, *calls[index + 1 :]]}
