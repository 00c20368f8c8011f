"""How many tokens a model can attend to, and whether prompts and completions fit into that."""

import math
from collections.abc import Callable

from common.chat import encode_prompt
from common.errors import UserError
from common.policy import Policy

from harness.data.rows import Row

LONGEST = 64  # encode the prompts of the rows with the longest texts only: encoding all can take seconds


def context_length(policy: Policy) -> float:
    """The number of tokens that the model can attend to; infinite if its config does not say."""
    return context_of(policy.model.config)


def context_of(config) -> float:
    """The same for a model that is not loaded, from its Hugging Face config."""
    settings = config.get_text_config()
    length = getattr(settings, "max_position_embeddings", None) or math.inf
    rope = getattr(settings, "rope_parameters", None) or {}  # some configs give the length before scaling
    stretched = (rope.get("original_max_position_embeddings") or length) * (rope.get("factor") or 1)
    return min(fixed_length(config), max(length, stretched) if length > 0 else math.inf)


def fixed_length(config) -> float:
    """The number of tokens up to which RoPE turns a token by its own position; infinite for most of its kinds.

    Beyond it, two kinds turn all tokens by the longest row of a batch. A cache keeps keys that were turned for shorter
    rows, so sampling and training would disagree, and a row would depend on its neighbours.
    """
    settings, lengths = config.get_text_config(), [math.inf]
    rope = getattr(settings, "rope_parameters", None) or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]  # some have one for each kind of layer
    lengths += [part["original_max_position_embeddings"] for part in parts if part.get("rope_type") == "longrope"]
    lengths += [settings.max_position_embeddings for part in parts if part.get("rope_type") == "dynamic"]
    return min(lengths)


def check_prompts(
    policy: Policy,
    rows: list[Row],
    messages: Callable[[Row], list[dict]],
    max_new_tokens: int,
    remedy: str = "choose another --model",
    tools: list[dict] | None = None,
    engine_length: float = math.inf,
) -> None:
    """Refuse a row whose prompt leaves less than `max_new_tokens` of the context; the UserError names the row."""
    context = min(context_length(policy), engine_length)
    if context == math.inf:
        return
    num_tokens, row = longest_prompt(policy.tokenizer, rows, messages, tools)
    if num_tokens + max_new_tokens > context:
        whose = "engine's" if engine_length < context_length(policy) else "model's"
        raise UserError(
            f"{row.place}: its prompt of {num_tokens} tokens and a completion of up to {max_new_tokens} exceed the "
            f"{whose} context of {int(context)} tokens: {remedy}"
        )


def longest_prompt(
    tokenizer, rows: list[Row], messages: Callable[[Row], list[dict]], tools: list[dict] | None = None
) -> tuple[int, Row]:
    """The number of tokens of the longest prompt, and its row."""
    conversations = [(row, messages(row)) for row in rows]
    conversations.sort(key=lambda pair: -len(str(pair[1]).encode()))
    lengths = [(len(encode_prompt(tokenizer, turns, tools)), row) for row, turns in conversations[:LONGEST]]
    return max(lengths, key=lambda pair: pair[0])
