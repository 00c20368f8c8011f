"""Tools: Python functions that the policy calls by writing JSON.

The policy is told a tool's docstring and types. The tool's answer is a text; if it begins with "error:", the call has
failed, and the policy reads it like any other answer. Nothing that a policy writes raises an exception here.

>>> from common.calculator_tool import calculator
>>> text = 'So <tool_call>{"name": "calculator", "arguments": {"expression": "17*23"}}</tool_call>'
>>> calls, rest = parse_calls(text, "hermes")
>>> rest, calls[0].name, calls[0].arguments
('So ', 'calculator', {'expression': '17*23'})
>>> call_tool({"calculator": calculator}, calls[0])
('391', True)
"""

import inspect
import json
import math
import re
from collections.abc import Callable, Iterator
from itertools import accumulate
from os.path import commonprefix
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from common.calculator_tool import calculator
from common.chat_template import apply_template
from common.errors import UserError

MAX_CALL = 10_000  # characters
MAX_DEPTH = 100  # of objects and lists inside each other; Python's own limit can be moved by any package
MAX_DIGITS = 1000  # of a whole number; Python converts 4,300 at most


class ToolCall(NamedTuple):
    """A call that the policy writes. If it is malformed, `error` says why in one line, and the call has no name."""

    name: str
    arguments: dict
    error: str | None = None


_THOUGHT = r"<think>.*?(?:</think>|\Z)"
_BLOCK = re.compile(rf"<tool_call>(.*?)(</tool_call>|\Z)|{_THOUGHT}", re.DOTALL)
_END = re.compile(r"\Z")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)  # of JSON
_SEPARATOR = re.compile(r"\s*(?:[;\n]\s*|\Z)")


def parse_calls(text: str, form: str) -> tuple[list[ToolCall], str]:
    """The calls in the assistant's text, and the text without them. A call inside `<think>` is a thought.

    "hermes": each `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` is a call; a block that is never closed is
    a malformed call. "llama3": the whole text is `{"name": ..., "parameters": {...}}`, or several of these, separated
    by ";" or new lines; a text that only begins like a call is a malformed call, any other text is no call. Both forms
    take either key. The time is linear in the length of the text, whatever it contains.
    """
    if form == "hermes":
        blocks = [block for block in _BLOCK.finditer(text) if block[1] is not None]
        calls = [_read(block[1], _END)[0] if block[2] else _malformed("it is not closed") for block in blocks]
        return calls, _BLOCK.sub(lambda block: block[0] if block[1] is None else "", text)
    if form != "llama3":
        raise ValueError(f"unknown form of calls: {form}")
    said = re.sub(_THOUGHT, "", text, flags=re.DOTALL).strip().removeprefix("<|python_tag|>").strip()
    calls = _read(said, _SEPARATOR)
    if calls[0].error and not re.match(r'\{\s*"name"', said):
        return [], text
    return calls, "".join(re.findall(_THOUGHT, text, flags=re.DOTALL))


def _malformed(reason: str) -> ToolCall:
    return ToolCall("", {}, reason)


def _read(text: str, separator: re.Pattern) -> list[ToolCall]:
    """The calls that a text consists of; one malformed call if it does not consist of calls."""
    text, calls, end = text.strip(), [], 0
    try:
        if len(text) > MAX_CALL:
            raise ValueError(f"it has more than {MAX_CALL} characters")
        _check_depth(text)
        while not calls or end < len(text):
            value, end = _DECODER.raw_decode(text, end)
            calls.append(_call(value))
            match = separator.match(text, end)
            if match is None:
                raise ValueError("something follows its JSON")
            end = match.end()
    except json.JSONDecodeError:
        return [_malformed("it is not valid JSON")]
    except ValueError as error:
        return [_malformed(str(error))]
    return calls


def _call(value: object) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("it is not a JSON object with a name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # an object inside a string, as OpenAI writes it
        _check_depth(arguments)
        arguments = _DECODER.decode(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("its arguments are not a JSON object")
    return ToolCall(value["name"], arguments)


def _check_depth(text: str) -> None:
    brackets = re.findall(r"[][{}]", _STRING.sub("", text))
    if max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0) > MAX_DEPTH:
        raise ValueError("it is nested too deeply")


def _object(pairs: list[tuple[str, object]]) -> dict:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key appears twice")
    return dict(pairs)


def _float(text: str) -> float:
    """Python's reader takes NaN and Infinity, too, and makes an infinity of 1e999."""
    if not math.isfinite(float(text)):
        raise ValueError("a number is not finite")
    return float(text)


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return int(text)


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_int=_int, parse_constant=_float)

MAX_RESULT = 4000  # characters
_CUT = " ... (cut)"
_JSON_TYPES = {kind: (kind,) for kind in (int, str, bool, list, dict, type(None))} | {float: (int, float)}


def call_tool(tools: dict[str, Callable], call: ToolCall) -> tuple[str, bool]:
    """The tool's answer, and whether the call succeeded: an answer that begins with "error:" is a failure.

    A malformed call, an unknown tool, arguments that do not fit and an exception of the tool give such answers; only
    `KeyboardInterrupt` and `UserError` are raised. Lists and objects become JSON; a long answer is cut to `MAX_RESULT`
    characters.
    """
    text = _answer(tools, call).encode("utf-8", "replace").decode("utf-8")  # a tokenizer refuses half a character
    text = text if len(text) <= MAX_RESULT else text[: MAX_RESULT - len(_CUT)] + _CUT
    return text, not text.startswith("error:")


def _answer(tools: dict[str, Callable], call: ToolCall) -> str:
    if call.error is not None:
        return f"error: malformed call: {call.error}"
    if call.name not in tools:
        return f"error: unknown tool {call.name[:40]!r}; known tools: {', '.join(tools)}"
    tool = tools[call.name]
    try:
        inspect.signature(tool).bind(**call.arguments)
        hints = get_type_hints(tool)
    except Exception as error:
        return f"error: {call.name}: {error}"
    for name, value in call.arguments.items():
        if not _fits(value, hints.get(name, Any)):
            return f"error: {call.name}: {name} must be {inspect.formatannotation(hints[name])}"
    try:
        result = tool(**call.arguments)
        return json.dumps(result, ensure_ascii=False) if isinstance(result, dict | list | tuple) else str(result)
    except UserError:  # for people: the tool could not even be tried
        raise
    except (Exception, SystemExit) as error:
        return f"error: {type(error).__name__}: {error}"


def _fits(value: object, hint: object) -> bool:
    """Whether a value from JSON has the type of a parameter; true and 1 are not the same here."""
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    kinds = _JSON_TYPES.get(get_origin(hint) or hint)
    return kinds is None or type(value) in kinds


def json_schema(tool: Callable) -> dict:
    """A tool's JSON schema, from its docstring and types; an error of one of several kinds if they do not suffice.

    Some versions of transformers describe every class that they do not know as an object, and a bare `list` too. The
    policy would be told the wrong type, so that is a TypeError.
    """
    from transformers.utils import get_json_schema

    def probe(value) -> None: ...

    schema, hints = get_json_schema(tool), get_type_hints(tool)
    for name in schema["function"]["parameters"]["properties"]:
        for kind in set(_leaves(hints[name])) - {dict}:
            probe.__annotations__["value"], probe.__doc__ = kind, "Probe.\n\nArgs:\n    value: a value"
            if get_json_schema(probe)["function"]["parameters"]["properties"]["value"].get("type") == "object":
                shown = inspect.formatannotation(kind)
                raise TypeError(f"transformers has no JSON type for {shown} in {name}: use int, str, list[int], ...")
    return schema


def _leaves(hint: object) -> Iterator[object]:
    """The types that a hint consists of: int and str of `dict[str, int]`."""
    if get_origin(hint) is Literal or not get_args(hint):
        yield hint
    else:
        for part in get_args(hint):
            yield from _leaves(part)


def schemas(tools: dict[str, Callable]) -> list[dict]:
    """The JSON schemas of the tools, as a chat template takes them, from their docstrings and types.

    Raises:
        UserError: a function lacks either.
    """
    found = []
    for name, tool in tools.items():
        try:
            schema = json_schema(tool)
        except Exception as error:  # of several kinds
            raise UserError(
                f"no JSON schema can be made of the tool {name} ({' '.join(str(error).split())}): give it a docstring "
                "with a section 'Args:' that describes every parameter, and every parameter a type"
            ) from error
        schema["function"]["name"] = name
        found.append(schema)
    return found


def call_form(tokenizer) -> str:
    """The form of calls in a tokenizer's chat template, which the policy should use: "hermes" or "llama3".

    Raises:
        UserError: the template refuses calls, omits them, or writes them in another form.
    """
    expected = ToolCall("calculator", {"expression": "17*23"})
    function = {"name": expected.name, "arguments": expected.arguments}  # and an id of the nine letters that some want
    turns = (
        {"content": "(an answer)"},
        {"content": "", "tool_calls": [{"id": "call00000", "type": "function", "function": function}]},
    )
    offered = schemas({"calculator": calculator})

    conversations = [[{"role": "user", "content": "?"}, {"role": "assistant", **turn}] for turn in turns]
    try:
        answered, called = (apply_template(tokenizer, messages, False, offered) for messages in conversations)
    except Exception as error:  # whatever a template raises
        raise UserError(f"the chat template refuses tool calls ({error}): take a model made for tools") from error
    call = called.removeprefix(commonprefix([answered, called]))  # noqa: RUF071
    if expected.name not in call:
        raise UserError("the chat template leaves tool calls out: take a model made for tools")
    text = tokenizer.decode(tokenizer.encode(call, add_special_tokens=False), skip_special_tokens=True)
    for form in ("hermes", "llama3"):
        if parse_calls(text, form)[0] == [expected]:
            return form
    raise UserError(
        f"the chat template writes a tool call as {text.strip()[:100]!r}, which is not known here: take a model "
        "whose calls are in the Hermes form or in Llama 3's"
    )
