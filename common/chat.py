"""Messages to ids and back: only this file renders the chat template.

Only the template writes control tokens. If the text of a message spells one, `<|im_end|>` for example, it is encoded as
ordinary text: otherwise a row of data could end its turn and answer in the policy's name.
"""

import functools
import json
import re
from contextlib import suppress
from os.path import commonprefix
from typing import NamedTuple

from common.errors import UserError
from common.messages import THOUGHTS, check_message, normal_row, parts, with_reasoning_content, with_text_arguments

# Some templates write today's date into the prompt, so a run would differ after midnight. Llama 3.2's template asks for
# `date_string` first; others call `strftime_now`, which the macro before the template hides.
TEMPLATE_DATE = "26 Jul 2024"
_PINNED_CLOCK = "{%- macro strftime_now(format) -%}" + TEMPLATE_DATE + "{%- endmacro %}"

# Short messages, which show what a template makes of any message.
_QUESTION = {"role": "user", "content": "?"}
_ANSWER = {"role": "assistant", "content": "(an answer)"}
_CALL = {"id": "anycall01", "type": "function", "function": {"name": "a_tool", "arguments": {}}}


def encode_prompt(tokenizer, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    """The ids of a conversation, up to the point where the assistant's turn begins.

    Args:
        tools: JSON schemas of the tools that the template presents, as `common.tools.schemas` makes them.

    Raises:
        UserError: the chat template refuses the messages; some templates refuse every system turn.
    """
    try:
        messages, tools = normal_row(messages, tools)
        _check_besides(tokenizer, messages, tools)
        return _encode(tokenizer, _render(tokenizer, messages, add_generation_prompt=True, tools=tools))
    except ValueError as error:
        first = messages[0] if messages and isinstance(messages[0], dict) else {}
        hint = "; if it knows no system turn: --system-prompt ''" if first.get("role") == "system" else ""
        raise UserError(f"{error}{hint}") from error


def encode_conversation(tokenizer, messages: list[dict]) -> list[int]:
    """The ids of a conversation that ends with an answer, as its template renders it and a reward model reads it.

    Raises:
        UserError: the chat template refuses the messages.
    """
    try:
        messages, _ = normal_row(messages)
        _check_besides(tokenizer, messages, None)
        return _encode(tokenizer, "".join(_answer(tokenizer, messages)))
    except ValueError as error:
        raise UserError(str(error)) from error


def encode_chat(
    tokenizer, messages: list[dict], end_of_turn_ids: list[int], tools: list[dict] | None = None
) -> tuple[list[int], list[int]]:
    """The ids of a conversation up to the last learned answer, and a mask that is 1 on the learned answers.

    The mask covers each answer *including its end-of-turn token*, so that the policy learns to stop, but not the text
    that the template puts around it. An answer with `"weight": 0` is read and not learned: the mask is 0 there. Each
    answer is encoded separately from the text before it, just as the sampler continues a prompt that is already
    encoded. The template may rewrite earlier turns as long as no answer among them is learned.

    A generation prompt may open a thought that the rendered turn lacks, as DeepSeek-R1's does. A thought in the content
    then continues the prompt; an answer without a thought is learned where the template renders it. Messages and tools
    may have any form that `common.messages.normal_row` reads.

    Returns:
        ids and mask, of equal length.

    Raises:
        ValueError: a message has no role, its content is not text, or a call is malformed; or the template leaves out
            a message, a thought, a call or the tools, does not end an answer with an end-of-turn token, or rewrites
            learned answers when a later one is added, so that they have no fixed position.
    """
    for position, message in enumerate(messages):
        check_message(message, position)
    messages, tools = normal_row(messages, tools)
    answers = [position for position, message in enumerate(messages) if message["role"] == "assistant"]
    learned = [position for position in answers if messages[position].get("weight") != 0]
    if 0 in learned:
        raise ValueError('message 0 (assistant) answers nothing: remove it, or give it "weight": 0')
    asked = messages[: min(learned, default=0)]
    if asked and tools and _render(tokenizer, asked, True, tools) == _render(tokenizer, asked, True):
        raise ValueError("the chat template leaves out the tools: give --chat-template one that presents them")
    _check_besides(tokenizer, messages, tools, learned)
    ids, mask, text = [], [], ""
    for index, piece in enumerate(_pieces(tokenizer, messages, tools, learned, tuple(end_of_turn_ids))):
        new = _encode(tokenizer, piece, before=text)
        spoken = next(end for end, i in enumerate(new, 1) if i in end_of_turn_ids) if index else 0
        ids += new
        mask += [1] * spoken + [0] * (len(new) - spoken)
        text += piece
    return ids, mask


def _pieces(
    tokenizer, messages: list[dict], tools: list[dict] | None, learned: list[int], end_of_turn_ids: tuple[int, ...]
) -> list[str]:
    """The rendered conversation, cut where learned answers begin, after checks that each of them can be learned."""
    pieces, text, last = [], "", -1  # the text that is settled ends with the answer `last`
    for position in learned:
        turns = messages[: position + 1]
        prompt, turn = _answer(tokenizer, turns, tools)
        if not prompt.startswith(text):
            raise ValueError(
                f"the chat template rewrites what precedes message {position} (assistant), and answers there are "
                'learned: give those "weight": 0, or give --chat-template one that keeps earlier turns (for many '
                "models TRL has one, such as qwen3_training.jinja)"
            )
        spoken = turn[: _end_of_turn(tokenizer, turn, "", end_of_turn_ids)]
        if not spoken:
            raise ValueError(
                f"the chat template does not end message {position} with an end-of-turn token of the model: give "
                "--chat-template one that does (for a base model recipes/base_model.jinja)"
            )
        _check_said(tokenizer, turns, tools, position, spoken)
        for earlier in range(last + 1, position):
            if messages[earlier]["role"] != "assistant":
                _check_said(tokenizer, turns[:-1], tools, earlier, prompt)
        pieces.append(prompt[sum(map(len, pieces)) :])
        text, last = prompt + spoken, position
    return [*pieces, turn] if learned else []


def with_remedy(error: Exception) -> str:
    """The sentence of an error of `encode_chat`, with a way out if the template is at fault."""
    is_complete = not str(error).startswith("the chat template") or "--chat-template" in str(error)
    return str(error) if is_complete else f"{error}; --chat-template FILE gives another template"


# What a template makes of answers -------------------------------------------------------------------------------------

_THOUGHT_TAG = r"(?:think|thought|reason)\w*"  # below: a thought that a generation prompt opens, and may close
_THOUGHT_OPENING = re.compile(rf"(?:<({_THOUGHT_TAG})>\s*)?(</{_THOUGHT_TAG}>\s*)?\Z")


def _answer(tokenizer, messages: list[dict], tools: list[dict] | None = None) -> tuple[str, str]:
    """The prompt that the last message answers, and the text that continues it, up to its end of turn and beyond."""
    prompt, whole = _render(tokenizer, messages[:-1], True, tools), _render(tokenizer, messages, False, tools)
    header = _header(tokenizer)
    if whole.startswith(prompt):
        if not prompt.endswith(header) and whole.startswith(prompt + header):  # Gemma 4's, after the turn of a tool
            prompt += header
        return prompt, whole[len(prompt) :]
    before, opening = _without_opening(tokenizer, prompt)
    if whole.startswith(before):
        turn = whole[len(before) :]
    else:  # earlier turns are rewritten; another answer shows where the last one begins
        other = _render(tokenizer, [*messages[:-1], _ANSWER], False, tools)
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
        return prompt, _control_tokens(tokenizer).mark(thought) + closed + turn
    return before, turn


@functools.lru_cache
def _header(tokenizer) -> str:
    """What the template begins every answer with: its generation prompt, without a thought that it opens."""
    try:
        asked, prompt = (_render(tokenizer, [_QUESTION], is_prompt) for is_prompt in (False, True))
    except ValueError:  # it wants other messages
        return ""
    return _without_opening(tokenizer, prompt)[0].removeprefix(asked) if prompt.startswith(asked) else ""


def _without_opening(tokenizer, prompt: str) -> tuple[str, str]:
    """A prompt up to the header of the answer, and what follows it: a thought that is opened, or a given prefix."""
    before = prompt.removesuffix(_given_prefix(tokenizer))
    before = before[: _THOUGHT_OPENING.search(before).start()]
    return before, prompt[len(before) :]


def _check_besides(tokenizer, messages: list[dict], tools: list[dict] | None, learned: list[int] | tuple = ()) -> None:
    """Check that what answers say beside their contents is rendered, as long as no later turn removes it."""
    for position, message in enumerate(messages):
        has_more = message.get("role") == "assistant" and any(map(message.get, (*THOUGHTS, "tool_calls")))
        if has_more and position not in learned:
            turns = messages[: position + 1]
            _check_said(tokenizer, turns, tools, position, _answer(tokenizer, turns, tools)[1])


def _check_said(tokenizer, messages: list[dict], tools: list[dict] | None, position: int, text: str) -> None:
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
        again = _answer(tokenizer, turns, tools)[1] if is_answer else _render(tokenizer, turns, True, tools)
        if not again.startswith(text):
            continue
        if not is_answer:
            raise ValueError(f"the chat template leaves out message {position} ({role})")
        remedy = "put it into the content, between <think> and </think>, or give" if name in THOUGHTS else "give"
        raise ValueError(
            f"the chat template leaves out the {name} of message {position} (assistant): {remedy} --chat-template one "
            "that renders it"
        )


# The answers of tools -------------------------------------------------------------------------------------------------


def encode_observation(tokenizer, contents: list[str], end_of_turn_ids: list[int]) -> list[int]:
    """The ids of the tools' answers, to be appended to a row that ends with the policy's end-of-turn token.

    They begin with the template's text after that token, and end where the assistant's next turn begins. Earlier turns
    are not rendered again: a short conversation takes their place, since the row's ids are already known.

    Raises:
        UserError: the chat template has no turns for tools.
    """
    ends = tuple(end_of_turn_ids)
    call, written = _call_before_tools(tokenizer, ends)
    rendered = _render(tokenizer, [_QUESTION, call, *map(_tool_turn, contents)], add_generation_prompt=True)
    start = _end_of_turn(tokenizer, rendered, written, ends)
    return _encode(tokenizer, rendered[start:], before=rendered[:start])


@functools.lru_cache
def _call_before_tools(tokenizer, end_of_turn_ids: tuple[int, ...]) -> tuple[dict, str]:
    """A turn that the template lets tools answer, and a text in it: a turn without a call, else a turn with one."""
    calls = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    refusal = "it leaves out what a tool answers"
    for call, written in ((_ANSWER, _ANSWER["content"]), (calls, _CALL["function"]["name"])):
        try:
            turns = [[_QUESTION, call, _tool_turn(text)] for text in ("first", "second")]
            one, other = (_render(tokenizer, messages, add_generation_prompt=True) for messages in turns)
        except ValueError as error:
            refusal = str(error)
        else:
            if one != other and _end_of_turn(tokenizer, one, written, end_of_turn_ids) > 0:
                return call, written
    raise UserError(f"the chat template has no turns for tools ({refusal}): a model is needed that was made for them")


def _tool_turn(content: str) -> dict:
    return {"role": "tool", "content": content, "name": _CALL["function"]["name"], "tool_call_id": _CALL["id"]}


def _end_of_turn(tokenizer, rendered: str, written: str, end_of_turn_ids: tuple[int, ...]) -> int:
    """The end of the turn that holds the text `written`; 0 if it does not end."""
    start = rendered.find(written) + len(written)
    end = _ends(tokenizer, end_of_turn_ids).search(rendered, start)
    return end.end() if end else 0


@functools.lru_cache
def _ends(tokenizer, end_of_turn_ids: tuple[int, ...]) -> re.Pattern:
    return re.compile("|".join(re.escape(tokenizer.decode([i])) for i in end_of_turn_ids))


def removes_thoughts(tokenizer) -> bool:
    """Whether the template removes the thought of a turn once a tool has answered it and another turn has followed.

    A row keeps every sampled token, so its text then differs from the text that the template would render.
    """
    for calls in ({}, {"tool_calls": [_CALL]}):  # some templates let tools answer nothing but calls
        turn = _ANSWER | {"content": "<think>(a thought)</think>(an answer)"} | calls
        messages = [_QUESTION, turn, _tool_turn("?"), turn | {"content": _ANSWER["content"]}, _tool_turn("?")]
        try:
            return "(a thought)" not in _render(tokenizer, messages, add_generation_prompt=True)
        except ValueError:
            continue
    return False


# Ids to text ----------------------------------------------------------------------------------------------------------


def decode(tokenizer, ids: list[int]) -> str:
    """The text of a turn, for rewards and for people; it is never tokenised again.

    It begins with the part of the answer that the template has written, such as the `<think>` of DeepSeek-R1's
    template.
    """
    return opening(tokenizer) + tokenizer.decode(ids, skip_special_tokens=True)


@functools.lru_cache
def opening(tokenizer) -> str:
    """The text that the template opens a new answer with: the end of the prompt, without the header of all answers."""
    prefix, begun = _given_prefix(tokenizer), ""
    with suppress(ValueError):  # it wants other messages
        asked, prompt = (_render(tokenizer, [_QUESTION], is_prompt) for is_prompt in (False, True))
        header = _render(tokenizer, [_QUESTION, _ANSWER, _QUESTION], False).partition(_ANSWER["content"])[0]
        prompt = prompt.removesuffix(prefix)
        if header.startswith(asked) and prompt.startswith(header):
            begun = prompt.removeprefix(header)
    # without control tokens, as in a decoded completion
    begun, prefix = (_control_tokens(tokenizer).pattern.sub("", text) for text in (begun, prefix))
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
        prompt = apply_template(tokenizer, [_QUESTION], add_generation_prompt=True)
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


# Rendering, with marks in place of control tokens ---------------------------------------------------------------------


def _render(tokenizer, messages: list[dict], add_generation_prompt: bool, tools: list[dict] | None = None) -> str:
    """The conversation as text, with a mark in place of every control token that a message spells.

    Raises:
        ValueError: the template refuses the messages.
    """
    import jinja2

    control_tokens = _control_tokens(tokenizer)
    marked, tools = control_tokens.mark(messages), control_tokens.mark(tools)
    try:
        try:
            return apply_template(tokenizer, marked, add_generation_prompt, tools)
        except TypeError:  # DeepSeek-V3's template joins the arguments of a call to a text
            return apply_template(tokenizer, with_text_arguments(marked), add_generation_prompt, tools)
    except Exception as error:  # whatever a template raises
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        reason = _MARK.sub(lambda mark: control_tokens.texts[int(mark[1])], str(error))
        raise ValueError(f"the chat template refuses the messages: {kind}{reason}") from error


def apply_template(
    tokenizer, messages: list[dict], add_generation_prompt: bool, tools: list[dict] | None = None
) -> str:
    """The conversation as text; control tokens that messages spell remain control tokens."""
    return tokenizer.apply_chat_template(
        with_reasoning_content(messages),
        tools=tools or None,  # templates such as Llama 3's present an empty list as tools
        chat_template=_PINNED_CLOCK + tokenizer.get_chat_template(),
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        date_string=TEMPLATE_DATE,
    )


def _encode(tokenizer, rendered: str, before: str = "") -> list[int]:
    """The ids of a rendered text: in one piece without marks, so that the tokenizer's merges are the usual ones."""
    control_tokens = _control_tokens(tokenizer)
    first, *others = _MARK.split(rendered)  # text, mark, text, mark, ..., text
    if before:
        ids = _continue(tokenizer, first, _MARK.split(before)[-1][-64:])
    else:
        ids = tokenizer.encode(first, add_special_tokens=False)  # the template has written them already
    for mark, text in zip(others[::2], others[1::2], strict=True):
        spelled = control_tokens.texts[int(mark)]
        as_text = _continue(tokenizer, spelled, split_special_tokens=True)
        if not control_tokens.ids.isdisjoint(as_text) or tokenizer.convert_tokens_to_ids(spelled) in as_text:
            # some tokenizers know it as a word, too
            as_text = [i for letter in spelled for i in _continue(tokenizer, letter, split_special_tokens=True)]
        ids += as_text + _continue(tokenizer, text)
    return ids


def _continue(tokenizer, text: str, before: str = "", **settings) -> list[int]:
    """The ids of `text` inside a conversation: without the space that Llama 2's tokenizer puts before every input.

    With such a tokenizer, `text` is encoded after the text before it, or after a letter that it does not merge with.
    """
    encode = functools.partial(tokenizer.encode, add_special_tokens=False, **settings)
    if text and _adds_a_prefix(tokenizer):
        for anchor in (before, "\n", "a", "\ufdd0"):
            start, joined = encode(anchor), encode(anchor + text)
            if start and joined[: len(start)] == start:
                return joined[len(start) :]
    return encode(text)


@functools.lru_cache
def _adds_a_prefix(tokenizer) -> bool:
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    return encode("\n") + encode("x") != encode("\nx")


class _ControlTokens(NamedTuple):
    """The texts of a tokenizer's control tokens ("special" tokens, and tokens that its template marks turns with), and
    how they are marked in messages.
    """

    texts: list[str]  # a mark is the index of a text between two noncharacters, which have no other use in text
    ids: frozenset[int]
    pattern: re.Pattern  # any of them
    beginnings: tuple[str, ...]  # of any of them; at most all but the last letter
    tag: re.Pattern  # any of them, or of the tags that are one token: a tool has no use for them, and may quote a page

    def mark(self, value: object, by_tool: bool = False) -> object:
        """`value`, a message or any part of one, with marks in all of its strings."""
        if isinstance(value, dict):
            by_tool = by_tool or value.get("role") == "tool"
            return {self.mark(key): self.mark(entry, by_tool) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(entry, by_tool) for entry in value]
        if not isinstance(value, str):
            return value
        marked = (self.tag if by_tool else self.pattern).sub(lambda match: self._mark_of(match[0]), value)
        # a template may join this string to the next one, and complete a control token that begins here
        return marked + self._mark_of("") if value.rstrip().endswith(self.beginnings) else marked

    def _mark_of(self, text: str) -> str:
        return f"\ufdd0{self.texts.index(text)}\ufdd1"


_MARK = re.compile("\ufdd0([0-9]+)\ufdd1")


@functools.lru_cache
def _control_tokens(tokenizer) -> _ControlTokens:
    names = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    names |= set(tokenizer.all_special_tokens) | _turn_markers(tokenizer)
    tags = set(filter(_is_marker, (token.content for token in tokenizer.added_tokens_decoder.values()))) | names
    texts, tag_texts = ([*sorted(some, key=len, reverse=True), "\ufdd0", "\ufdd1"] for some in (names, tags))
    beginnings = tuple({text[:end] for text in texts if not text[0].isalnum() for end in range(1, len(text))})
    ids = frozenset(tokenizer.convert_tokens_to_ids(list(names)))
    # the longest match wins
    pattern, tag = (re.compile("|".join(map(re.escape, some))) for some in (texts, tag_texts))
    return _ControlTokens([*tag_texts, ""], ids, pattern, beginnings, tag)


def _turn_markers(tokenizer) -> set[str]:
    """The added tokens that the template writes around any question and answer; DeepSeek-R1's are not "special".

    Tokens that messages may spell are excluded: spaces, words, and pairs of tags, such as the <think> that a template
    opens an answer with and the </think> that it looks for. A tag around a question is a marker, though.
    """
    added = {i: entry.content for i, entry in tokenizer.added_tokens_decoder.items()}

    def written(messages: list[dict], add_generation_prompt: bool) -> set[str]:
        try:
            text = apply_template(tokenizer, messages, add_generation_prompt)
        except Exception:  # whatever a template raises: a run gets the error for its own messages
            return set()
        return {added[i] for i in tokenizer.encode(text, add_special_tokens=False) if i in added}

    names = {text[2:] for text in added.values() if text.startswith("</")}
    tags = {start + name for name in names for start in ("<", "</")}
    turns = [_QUESTION, _ANSWER, _QUESTION]
    markers = written([_QUESTION], False) | ((written(turns, False) | written(turns, True)) - tags)
    return set(filter(_is_marker, markers))


def _is_marker(text: str) -> bool:
    return re.search(r"\w", text) is not None and re.search(r"[^\w\s]", text) is not None
