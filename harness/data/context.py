"""The model's context: whether it has room for every prompt and the completion budget, found before training."""

import math
from collections.abc import Callable
from functools import partial

from common.chat import encode_prompt
from common.errors import UserError
from common.policy import Policy

from harness.base.config import ModelConfig
from harness.data.task import Row, Task

PROBE = "probe"  # a text that no template writes by itself


def context_length(policy: Policy) -> float:
    """The number of tokens that the model can attend to; infinite where its config does not say."""
    return context_of(policy.model.config)


def context_of(config) -> float:
    """The same, of a model that is not loaded, from its Hugging Face config."""
    settings = config.get_text_config()
    length = getattr(settings, "max_position_embeddings", None) or math.inf
    rope = getattr(settings, "rope_parameters", None) or {}  # some configs name the length before it is stretched
    stretched = (rope.get("original_max_position_embeddings") or length) * (rope.get("factor") or 1)
    return max(length, stretched) if length > 0 else math.inf


def check_context(config: ModelConfig, task: Task, policy: Policy, engine: object | None = None) -> None:
    """Refuse a run with a row whose prompt and completion do not fit into the model's context, or into an engine.

    Args:
        engine: an `Engine`, which has a `max_length` and the name of its flag.

    Raises:
        UserError: naming the row.
    """
    rows = [*task.eval_rows, *task.train_rows]
    remedy = "leave out long questions with --max-question-length, or lower --max-new-tokens"
    remedy += ", or describe the functions of --tools in fewer words" if getattr(config, "tools", None) else ""
    engine_length = math.inf if engine is None else engine.max_length
    if engine_length < context_length(policy):
        remedy += f", or start the engine with a longer {engine.length_flag}"
    messages = partial(task.messages, system_prompt=config.system_prompt)
    check_prompts(policy, rows, messages, config.max_new_tokens, remedy, task.tools, engine_length)


def fitting_length(config: ModelConfig, task: Task, policy: Policy) -> int:
    """A power of 2 into which every prompt and its completion fit, or the model's context if that is less."""
    context, rows = context_length(policy), [*task.eval_rows, *task.train_rows]
    messages = partial(task.messages, system_prompt=config.system_prompt)
    length = 256
    while length < context and _find_long_prompt(policy, rows, messages, length - config.max_new_tokens, task.tools):
        length *= 2
    return int(min(length, context))


def check_prompts(
    policy: Policy,
    rows: list[Row],
    messages: Callable[[Row], list[dict]],
    max_new_tokens: int,
    remedy: str = "choose another --model",
    tools: list[dict] | None = None,
    engine_length: float = math.inf,
) -> None:
    """Refuse a row whose prompt leaves less than `max_new_tokens` of the model's context, or of an engine's.

    Raises:
        UserError: naming the row, its tokens, and what to do.
    """
    context = min(context_length(policy), engine_length)
    room = 0 if context == math.inf else int(context) - max_new_tokens
    found = None if context == math.inf else _find_long_prompt(policy, rows, messages, room, tools)
    if found is not None:
        row, num_tokens = found
        whose = "engine's" if engine_length < context_length(policy) else "model's"
        raise UserError(
            f"{row.place}: its prompt of {num_tokens} tokens and a completion of up to {max_new_tokens} exceed the "
            f"{whose} context of {int(context)} tokens: {remedy}"
        )


def _find_long_prompt(
    policy: Policy, rows: list[Row], messages: Callable[[Row], list[dict]], room: int, tools: list[dict] | None
) -> tuple[Row, int] | None:
    """A row with a prompt of more than `room` tokens, and how many they are.

    Only prompts that could be too long are encoded. A token covers at least one byte of UTF-8, and what the template
    adds is found by encoding a conversation of the same roles with a short text in every turn. So the tokens of a
    prompt are at most those of this conversation + bytes of the texts * how often the template writes a text.
    """
    costs: dict[tuple[str, ...], tuple[float, int]] = {}  # by the roles of the turns
    candidates = []
    for row in rows:
        turns = messages(row)
        roles = tuple(turn["role"] for turn in turns)
        if roles not in costs:
            costs[roles] = _cost_of_template(policy, turns, tools)
        tokens, copies = costs[roles]
        size = sum(_most_bytes(str(value)) for turn in turns for key, value in turn.items() if key != "role")
        if tokens + copies * size > room:
            candidates.append((size, row, turns))
    for _, row, turns in sorted(candidates, key=lambda candidate: -candidate[0]):
        num_tokens = len(encode_prompt(policy.tokenizer, turns, tools))
        if num_tokens > room:
            return row, num_tokens
    return None


def _cost_of_template(policy: Policy, turns: list[dict], tools: list[dict] | None) -> tuple[float, int]:
    """The tokens of a conversation with a short text in every turn, and how often the template writes a text."""
    try:
        ids = encode_prompt(policy.tokenizer, [turn | {"content": PROBE} for turn in turns], tools)
    except UserError:  # a template can refuse this text: then every prompt is encoded
        return math.inf, 1
    return len(ids), max(1, policy.tokenizer.decode(ids).count(PROBE) - len(turns) + 1)


def _most_bytes(text: str) -> int:
    """The most bytes of UTF-8 that a tokenizer can make of a text; some normalise it, so that a sign becomes many."""
    return len(text) if text.isascii() else 33 * len(text)  # 33: of the Arabic ligature U+FDFA, in NFKC
