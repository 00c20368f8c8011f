"""Texts that end a turn, beside its end-of-turn tokens: for models that are prompted and were taught no template.

A stop text need not be a token: it can begin and end within tokens. The turn ends with the first token after which its
text contains a stop text; what this token says after the stop text stays in the turn, which is what was sampled.
"""

import functools
from collections.abc import Sequence

UNFINISHED = "\ufffd"  # stands in a text for bytes that are no character, such as the first bytes of one


def ends_turn(tokenizer, ids: Sequence[int], stop_texts: Sequence[str]) -> bool:
    """Whether the text of a turn contains a stop text; without the last of its `ids` it contains none.

    Only the end of the turn is decoded, and only after a token that can be the last one of a stop text.
    """
    twice = _text_of_two(tokenizer, ids[-1])
    if UNFINISHED not in twice and not any(stop[-1] in twice for stop in stop_texts):
        return False
    needed, width = max(map(len, stop_texts)) + len(twice), 8
    text = tokenizer.decode(ids[-width:], skip_special_tokens=True)
    # bytes of a character, and control tokens, make no text; the first character of a part can be damaged
    while width < len(ids) and (len(text) <= needed or text[0] == UNFINISHED):
        width *= 2
        text = tokenizer.decode(ids[-width:], skip_special_tokens=True)
    return any(stop in text for stop in stop_texts)


@functools.lru_cache(maxsize=2**18)
def _text_of_two(tokenizer, token: int) -> str:
    """The text of a token that follows itself: some tokenizers drop the space before the first one."""
    return tokenizer.decode([token, token], skip_special_tokens=True)


def can_write(tokenizer, text: str) -> bool:
    """Whether the text of a completion can contain `text`: it has no control tokens, and no unknown characters."""
    if UNFINISHED in text:
        return False
    lines = (tokenizer.encode(before + text, add_special_tokens=False) for before in ("", "a", "a\n"))
    return any(text in tokenizer.decode(ids, skip_special_tokens=True) for ids in lines)
