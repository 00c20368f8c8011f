"""What follows a turn of the policy: the answers of tools that it has called, or what it sees of its environment."""

import functools

from common.chat_template import ANSWER, QUESTION, encode_rendered, end_of_turn, render
from common.errors import UserError

_CALL = {"id": "anycall01", "type": "function", "function": {"name": "a_tool", "arguments": {}}}


def encode_observation(
    tokenizer, contents: list[str], end_of_turn_ids: list[int], role: str = "tool", is_cut_off: bool = False
) -> list[int]:
    """The ids of new turns, to be appended to a row that ends with the policy's end-of-turn token.

    They begin with the template's text after that token, and end where the assistant's next turn begins. Earlier turns
    are not rendered again: a short conversation takes their place, since the row's ids are already known.

    Args:
        contents: the texts of the turns.
        role: whose turns they are: the tools' answers, or of an environment, which speaks as the "user".
        is_cut_off: the policy's turn has no end-of-turn token, so that the template's comes first.

    Raises:
        UserError: the chat template has no turns for tools.
    """
    ends = tuple(end_of_turn_ids)
    before, written = _call_before_tools(tokenizer, ends) if role == "tool" else (ANSWER, ANSWER["content"])
    turns = [_tool_turn(text) if role == "tool" else {"role": role, "content": text} for text in contents]
    rendered = render(tokenizer, [QUESTION, before, *turns], add_generation_prompt=True)
    start = end_of_turn(tokenizer, rendered, written, ends)
    ids = encode_rendered(tokenizer, rendered[start:], before=rendered[:start])
    end = [i for i in ends if rendered[:start].endswith(tokenizer.decode([i]))][:1] if is_cut_off else []
    return end + ids


@functools.lru_cache
def _call_before_tools(tokenizer, end_of_turn_ids: tuple[int, ...]) -> tuple[dict, str]:
    """A turn that the template lets tools answer, and a text in it: a turn without a call, else a turn with one."""
    calls = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    refusal = "it leaves out what a tool answers"
    for call, written in ((ANSWER, ANSWER["content"]), (calls, _CALL["function"]["name"])):
        try:
            turns = [[QUESTION, call, _tool_turn(text)] for text in ("first", "second")]
            one, other = (render(tokenizer, messages, add_generation_prompt=True) for messages in turns)
        except ValueError as error:
            refusal = str(error)
        else:
            if one != other and end_of_turn(tokenizer, one, written, end_of_turn_ids) > 0:
                return call, written
    raise UserError(f"the chat template has no turns for tools ({refusal}): a model is needed that was made for them")


def _tool_turn(content: str) -> dict:
    return {"role": "tool", "content": content, "name": _CALL["function"]["name"], "tool_call_id": _CALL["id"]}


def removes_thoughts(tokenizer) -> bool:
    """Whether the template removes the thought of a turn once a tool has answered it and another turn has followed.

    A row keeps every sampled token, so its text then differs from the text that the template would render.
    """
    for calls in ({}, {"tool_calls": [_CALL]}):  # some templates let tools answer nothing but calls
        turn = ANSWER | {"content": "<think>(a thought)</think>(an answer)"} | calls
        messages = [QUESTION, turn, _tool_turn("?"), turn | {"content": ANSWER["content"]}, _tool_turn("?")]
        try:
            return "(a thought)" not in render(tokenizer, messages, add_generation_prompt=True)
        except ValueError:
            continue
    return False
