"""The chat template: messages become text, with a mark in place of every control token, and text becomes ids.

Only the template writes control tokens. If the text of a message spells one, `<|im_end|>` for example, it is encoded as
ordinary text: otherwise a row of data could end its turn and answer in the policy's name.
"""

import functools
import re
from typing import NamedTuple

from common.messages import with_reasoning_content, with_text_arguments

# Some templates write today's date into the prompt, so a run would differ after midnight. Llama 3.2's template asks for
# `date_string` first; others call `strftime_now`, which the macro before the template hides.
TEMPLATE_DATE = "26 Jul 2024"
_PINNED_CLOCK = "{%- macro strftime_now(format) -%}" + TEMPLATE_DATE + "{%- endmacro %}"

# Short messages, which show what a template makes of any message.
QUESTION = {"role": "user", "content": "?"}
ANSWER = {"role": "assistant", "content": "(an answer)"}


def render(tokenizer, messages: list[dict], add_generation_prompt: bool, tools: list[dict] | None = None) -> str:
    """The conversation as text, with a mark in place of every control token that a message spells.

    Raises:
        ValueError: the template refuses the messages.
    """
    import jinja2

    control_tokens = control_tokens_of(tokenizer)
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


def encode_rendered(tokenizer, rendered: str, before: str = "") -> list[int]:
    """The ids of a rendered text: in one piece without marks, so that the tokenizer's merges are the usual ones."""
    control_tokens = control_tokens_of(tokenizer)
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
def control_tokens_of(tokenizer) -> _ControlTokens:
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
    turns = [QUESTION, ANSWER, QUESTION]
    markers = written([QUESTION], False) | ((written(turns, False) | written(turns, True)) - tags)
    return set(filter(_is_marker, markers))


def _is_marker(text: str) -> bool:
    return re.search(r"\w", text) is not None and re.search(r"[^\w\s]", text) is not None


def end_of_turn(tokenizer, rendered: str, written: str, end_of_turn_ids: tuple[int, ...]) -> int:
    """The end of the turn that holds the text `written`; 0 if it does not end."""
    start = rendered.find(written) + len(written)
    end = _ends(tokenizer, end_of_turn_ids).search(rendered, start)
    return end.end() if end else 0


@functools.lru_cache
def _ends(tokenizer, end_of_turn_ids: tuple[int, ...]) -> re.Pattern:
    return re.compile("|".join(re.escape(tokenizer.decode([i])) for i in end_of_turn_ids))
