"""Messages to ids and back: the chat template is rendered here and nowhere else."""

from common.errors import UserError

# Some templates write today's date into the prompt, and a run would differ after midnight. Llama 3.2's asks for
# `date_string` first; others call `strftime_now`, which the macro in front of the template hides.
TEMPLATE_DATE = "26 Jul 2024"
_PINNED_CLOCK = "{%- macro strftime_now(format) -%}" + TEMPLATE_DATE + "{%- endmacro %}"


def encode_prompt(tokenizer, messages: list[dict]) -> list[int]:
    """The ids of a conversation, up to the point where the assistant's turn begins.

    Raises:
        UserError: the chat template refuses the messages; some do so with every system turn.
    """
    try:
        return _encode(tokenizer, _render(tokenizer, messages, add_generation_prompt=True))
    except ValueError as error:
        hint = "; if it knows no system turn: --system-prompt ''" if messages[0]["role"] == "system" else ""
        raise UserError(f"{error}{hint}") from error


def encode_chat(tokenizer, messages: list[dict], end_of_turn_ids: list[int]) -> tuple[list[int], list[int]]:
    """The ids of a complete conversation, and a mask that is 1 on what the assistant says.

    The mask covers every assistant turn *including its end-of-turn token*, so that the policy learns to stop, and
    nothing that the template puts around it. Each turn is encoded separately from what precedes it, just as the
    sampler continues a prompt that is already encoded.

    Returns:
        ids and mask, of equal length.

    Raises:
        ValueError: the template rewrites earlier turns when a later one is added, so that a turn has no fixed position,
            or it does not end an assistant turn with an end-of-turn token.
    """
    ids: list[int] = []
    mask: list[int] = []
    rendered = ""

    def advance(text: str, role: str) -> list[int]:
        nonlocal rendered
        if not text.startswith(rendered):
            raise ValueError(f"the chat template rewrites what precedes message {position} ({role})")
        new_ids = _encode(tokenizer, text[len(rendered) :])
        rendered = text
        return new_ids

    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = advance(_render(tokenizer, messages[:position], add_generation_prompt=True), "assistant prompt")
        turn = advance(_render(tokenizer, messages[: position + 1], add_generation_prompt=False), "assistant")
        ends = [index for index, token in enumerate(turn) if token in end_of_turn_ids]
        if not ends:
            raise ValueError(f"the chat template does not end message {position} with an end-of-turn token")
        spoken = ends[-1] + 1
        ids += before + turn
        mask += [0] * len(before) + [1] * spoken + [0] * (len(turn) - spoken)
    return ids, mask


def decode(tokenizer, ids: list[int]) -> str:
    """The text of a completion, for rewards and for people; it is never tokenised again."""
    return tokenizer.decode(ids, skip_special_tokens=True)


def _render(tokenizer, messages: list[dict], add_generation_prompt: bool) -> str:
    import jinja2

    try:
        return tokenizer.apply_chat_template(
            messages,
            chat_template=_PINNED_CLOCK + tokenizer.get_chat_template(),
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            date_string=TEMPLATE_DATE,
        )
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error


def _encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)  # the template has written them already
