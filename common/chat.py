"""Messages to ids, by the model's chat template, and ids back to text."""

import functools
import json
import re
from contextlib import suppress
from os.path import commonprefix

from common.chat_template import ANSWER, QUESTION, apply_template, control_tokens_of, encode_rendered, render
from common.errors import UserError
from common.messages import THOUGHTS, normal_row, parts


def encode_prompt(tokenizer, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    """The ids of a conversation, up to the point where the assistant's turn begins.

    Args:
        tools: JSON schemas of the tools that the template presents, as `common.tools.schemas` makes them.

    Raises:
        UserError: the chat template refuses the messages or leaves out a turn: some know no system turn.
    """
    try:
        messages, tools = normal_row(messages, tools)
        check_besides(tokenizer, messages, tools)
        prompt = render(tokenizer, messages, add_generation_prompt=True, tools=tools)
        for position, message in enumerate(messages):
            if message.get("role", "user") not in ("user", "assistant"):  # every template knows these
                check_said(tokenizer, messages, tools, position, prompt)
        return encode_rendered(tokenizer, prompt)
    except ValueError as error:
        first = messages[0] if messages and isinstance(messages[0], dict) else {}
        hint = "; if it knows no system turn: --system-prompt ''" if first.get("role") == "system" else ""
        raise UserError(f"{error}{hint}") from error


def decode(tokenizer, ids: list[int]) -> str:
    """The text of a turn, for rewards and for people; it is never tokenised again.

    It begins with the part of the answer that the template has written, such as the `<think>` of DeepSeek-R1's
    template.
    """
    return opening(tokenizer) + tokenizer.decode(ids, skip_special_tokens=True)


_THOUGHT_TAG = r"(?:think|thought|reason)\w*"  # below: a thought that a generation prompt opens, and may close
_THOUGHT_OPENING = re.compile(rf"(?:<({_THOUGHT_TAG})>\s*)?(</{_THOUGHT_TAG}>\s*)?\Z")


def answer_of(tokenizer, messages: list[dict], tools: list[dict] | None = None) -> tuple[str, str]:
    """The prompt that the last message answers, and the text that continues it, up to its end of turn and beyond."""
    prompt, whole = render(tokenizer, messages[:-1], True, tools), render(tokenizer, messages, False, tools)
    header = _header(tokenizer)
    if whole.startswith(prompt):
        if not prompt.endswith(header) and whole.startswith(prompt + header):  # Gemma 4's, after the turn of a tool
            prompt += header
        return prompt, whole[len(prompt) :]
    before, opening = _without_opening(tokenizer, prompt)
    if whole.startswith(before):
        turn = whole[len(before) :]
    else:  # earlier turns are rewritten; another answer shows where the last one begins
        other = render(tokenizer, [*messages[:-1], ANSWER], False, tools)
        start = commonprefix([whole, other]).rfind(header)  # noqa: RUF071
        if not header or start < 0 or not before.endswith(header):
            raise ValueError(f"the chat template rewrites what precedes message {len(messages) - 1} (assistant)")
        turn = whole[start + len(header) :]
    if turn.startswith(opening):
        return prompt, turn[len(opening) :]
    tag, is_closed = _THOUGHT_OPENING.search(opening).groups()
    thought, closed, _ = (messages[-1].get("content") or "").rpartition(f"</{tag}>")
    if tag and not is_closed and closed and closed not in turn:  # the template drops the thought that its prompt opens
        thought = thought.lstrip().removeprefix(f"<{tag}>").removeprefix(opening.partition(">")[2])
        return prompt, control_tokens_of(tokenizer).mark(thought) + closed + turn
    return before, turn


@functools.lru_cache
def _header(tokenizer) -> str:
    """What the template begins every answer with: its generation prompt, without a thought that it opens."""
    try:
        asked, prompt = (render(tokenizer, [QUESTION], is_prompt) for is_prompt in (False, True))
    except ValueError:  # it wants other messages
        return ""
    return _without_opening(tokenizer, prompt)[0].removeprefix(asked) if prompt.startswith(asked) else ""


def _without_opening(tokenizer, prompt: str) -> tuple[str, str]:
    """A prompt up to the header of the answer, and what follows it: a thought that is opened, or a given prefix."""
    before = prompt.removesuffix(_given_prefix(tokenizer))
    before = before[: _THOUGHT_OPENING.search(before).start()]
    return before, prompt[len(before) :]


def check_besides(tokenizer, messages: list[dict], tools: list[dict] | None, learned: list[int] | tuple = ()) -> None:
    """Check that what answers say beside their contents is rendered, as long as no later turn removes it."""
    for position, message in enumerate(messages):
        has_more = message.get("role") == "assistant" and any(map(message.get, (*THOUGHTS, "tool_calls")))
        if has_more and position not in learned:
            turns = messages[: position + 1]
            check_said(tokenizer, turns, tools, position, answer_of(tokenizer, turns, tools)[1])


def check_said(tokenizer, messages: list[dict], tools: list[dict] | None, position: int, text: str) -> None:
    """Check that `text`, the prompt, holds all that a message says; or the turn of the last message, an answer."""
    said, role, start = list(parts(messages[position])), messages[position]["role"], 0
    is_answer = role == "assistant"
    for _, part, _ in said:  # all of them, in order: hardly by chance, and much faster than rendering again
        found = text.find(part, start) if is_answer or len(part) > 20 else -1
        start = found + len(part) if found >= 0 else len(text) + 1
    if start <= len(text):
        return
    for name, _, changed in said:
        turns = [*messages[:position], changed, *messages[position + 1 :]]
        again = answer_of(tokenizer, turns, tools)[1] if is_answer else render(tokenizer, turns, True, tools)
        if not again.startswith(text):
            continue
        if not is_answer:
            raise ValueError(f"the chat template leaves out message {position} ({role})")
        remedy = "put it into the content, between <think> and </think>, or give" if name in THOUGHTS else "give"
        raise ValueError(
            f"the chat template leaves out the {name} of message {position} (assistant): {remedy} --chat-template one "
            "that renders it"
        )


@functools.lru_cache
def opening(tokenizer) -> str:
    """The text that the template opens a new answer with: the end of the prompt, without the header of all answers."""
    prefix, begun = _given_prefix(tokenizer), ""
    with suppress(ValueError):  # it wants other messages
        asked, prompt = (render(tokenizer, [QUESTION], is_prompt) for is_prompt in (False, True))
        header = render(tokenizer, [QUESTION, ANSWER, QUESTION], False).partition(ANSWER["content"])[0]
        prompt = prompt.removesuffix(prefix)
        if header.startswith(asked) and prompt.startswith(header):
            begun = prompt.removeprefix(header)
    # without control tokens, as in a decoded completion
    begun, prefix = (control_tokens_of(tokenizer).pattern.sub("", text) for text in (begun, prefix))
    return (begun if begun.strip() else "") + prefix


def begin_completions(tokenizer, prefix: str) -> None:
    """Let the chat template write `prefix` after the header of an answer, as DeepSeek-R1's writes `<think>`.

    The prefix is then a part of every prompt, and of every text that `decode` returns. The policy is saved with this
    template, so that later prompts look as in training; another prefix replaces the saved prefix, an empty prefix
    removes it. A template that writes the prefix by itself stays as it is.
    """
    if tokenizer.chat_template is None:
        return
    if _given_prefix(tokenizer):
        tokenizer.chat_template = tokenizer.chat_template.rpartition(_PREFIX_START)[0]
    opening.cache_clear()
    _header.cache_clear()
    if not prefix:
        return
    with suppress(Exception):  # whatever a template raises: it may want other messages
        prompt = apply_template(tokenizer, [QUESTION], add_generation_prompt=True)
        if prefix.strip() and prompt.rstrip().endswith(prefix.rstrip()):
            return
    addition = _PREFIX_START + json.dumps(prefix, ensure_ascii=False) + _PREFIX_END
    template = tokenizer.get_chat_template()
    tokenizer.chat_template = template.removesuffix("\n") + addition  # Jinja drops a line break at a template's end


_PREFIX_START = "{%+ if add_generation_prompt %}{{ "  # "+": spaces before it are the template's
_PREFIX_END = " }}{% endif %}{# given, not sampled #}"


def _given_prefix(tokenizer) -> str:
    """The prefix that `begin_completions` has added to the template."""
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    start = template.rfind(_PREFIX_START)
    if start < 0 or not template.endswith(_PREFIX_END):
        return ""
    return json.loads(template[start + len(_PREFIX_START) : -len(_PREFIX_END)])
