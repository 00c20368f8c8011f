"""Answers that a file gives: their ids in a conversation, for a policy to learn or for a reward model to read."""

from common.chat import answer_of, check_besides, check_said
from common.chat_template import encode_rendered, end_of_turn, render
from common.errors import UserError
from common.messages import check_message, normal_row


def encode_conversation(tokenizer, messages: list[dict]) -> list[int]:
    """The ids of a conversation that ends with an answer, as its template renders it and a reward model reads it.

    Raises:
        UserError: the chat template refuses the messages.
    """
    try:
        messages, _ = normal_row(messages)
        check_besides(tokenizer, messages, None)
        return encode_rendered(tokenizer, "".join(answer_of(tokenizer, messages)))
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
    if asked and tools and render(tokenizer, asked, True, tools) == render(tokenizer, asked, True):
        raise ValueError("the chat template leaves out the tools: give --chat-template one that presents them")
    check_besides(tokenizer, messages, tools, learned)
    ids, mask, text = [], [], ""
    for index, piece in enumerate(_pieces(tokenizer, messages, tools, learned, tuple(end_of_turn_ids))):
        new = encode_rendered(tokenizer, piece, before=text)
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
        prompt, turn = answer_of(tokenizer, turns, tools)
        if not prompt.startswith(text):
            raise ValueError(
                f"the chat template rewrites what precedes message {position} (assistant), and answers there are "
                'learned: give those "weight": 0, or give --chat-template one that keeps earlier turns (for many '
                "models TRL has one, such as qwen3_training.jinja)"
            )
        spoken = turn[: end_of_turn(tokenizer, turn, "", end_of_turn_ids)]
        if not spoken:
            raise ValueError(
                f"the chat template does not end message {position} with an end-of-turn token of the model: give "
                "--chat-template one that does (for a base model recipes/base_model.jinja)"
            )
        check_said(tokenizer, turns, tools, position, spoken)
        for earlier in range(last + 1, position):
            if messages[earlier]["role"] != "assistant":
                check_said(tokenizer, turns[:-1], tools, earlier, prompt)
        pieces.append(prompt[sum(map(len, pieces)) :])
        text, last = prompt + spoken, position
    return [*pieces, turn] if learned else []


def with_remedy(error: Exception) -> str:
    """The sentence of an error of `encode_chat`, with a way out if the template is at fault."""
    is_complete = not str(error).startswith("the chat template") or "--chat-template" in str(error)
    return str(error) if is_complete else f"{error}; --chat-template FILE gives another template"
