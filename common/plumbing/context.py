"""The model's context: whether it has room for every prompt and the completion budget, found before training."""

import math
import unicodedata
from collections.abc import Callable

from common.chat import encode_prompt
from common.errors import UserError
from common.policy import Policy

from common.plumbing.config import RunConfig
from common.plumbing.task import Row, Task

PROBE = "probe"  # a text that no template writes by itself


def context_length(policy: Policy) -> float:
    """The number of tokens that the model can attend to; infinite where its config does not say."""
    settings = policy.model.config.get_text_config()
    length = getattr(settings, "max_position_embeddings", None) or math.inf
    rope = getattr(settings, "rope_parameters", None) or {}  # some configs name the length before it is stretched
    stretched = (rope.get("original_max_position_embeddings") or length) * (rope.get("factor") or 1)
    return max(length, stretched) if length > 0 else math.inf


def check_context(config: RunConfig, task: Task, policy: Policy) -> None:
    """Refuse a run with a row whose prompt and completion do not fit into the model's context.

    Raises:
        UserError: naming the row.
    """
    rows = [*task.eval_rows, *task.train_rows]
    remedy = "leave out long questions with --max-question-length, or lower --max-new-tokens"
    check_prompts(policy, rows, lambda row: task.messages(row, config.system_prompt), config.max_new_tokens, remedy)


def check_prompts(
    policy: Policy,
    rows: list[Row],
    messages: Callable[[Row], list[dict]],
    max_new_tokens: int,
    remedy: str = "choose another --model",
) -> None:
    """Refuse a row whose prompt leaves less than `max_new_tokens` of the model's context.

    Raises:
        UserError: naming the row, its tokens, and what to do.
    """
    context = context_length(policy)
    found = None if context == math.inf else _find_long_prompt(policy, rows, messages, int(context) - max_new_tokens)
    if found is not None:
        row, num_tokens = found
        raise UserError(
            f"{row.place}: its prompt of {num_tokens} tokens and a completion of up to {max_new_tokens} exceed the "
            f"model's context of {int(context)} tokens: {remedy}"
        )


def _find_long_prompt(
    policy: Policy, rows: list[Row], messages: Callable[[Row], list[dict]], room: int
) -> tuple[Row, int] | None:
    """A row with a prompt of more than `room` tokens, and how many they are.

    Only prompts that could be too long are encoded. A token covers at least one byte of UTF-8, and what the template
    adds is found by encoding a conversation of the same roles with short texts. So the tokens of a prompt are at most

        what the template adds + bytes of its texts * how often the template writes a text + one token per turn

    The last is the space that some tokenizers put in front of every piece of text.
    """
    added: dict[tuple[str, ...], tuple[int, int]] = {}  # by the roles of the turns: tokens, copies of a text
    candidates = []
    for row in rows:
        turns = messages(row)
        roles = tuple(turn["role"] for turn in turns)
        if roles not in added:
            ids = encode_prompt(policy.tokenizer, [turn | {"content": PROBE} for turn in turns])
            copies = policy.tokenizer.decode(ids).count(PROBE)
            added[roles] = len(ids), max(1, copies - len(turns) + 1)
        tokens, copies = added[roles]
        size = sum(num_bytes(str(value)) for turn in turns for key, value in turn.items() if key != "role")
        if tokens + len(turns) + copies * size > room:
            candidates.append((size, row, turns))
    for _, row, turns in sorted(candidates, key=lambda candidate: -candidate[0]):
        num_tokens = len(encode_prompt(policy.tokenizer, turns))
        if num_tokens > room:
            return row, num_tokens
    return None


def num_bytes(text: str) -> int:
    """The length of a text in UTF-8, as it is or normalised, as some tokenizers do first: one sign can become many.

    >>> num_bytes("2+2"), num_bytes("²"), num_bytes("\\ufdfa")
    (3, 2, 33)
    """
    if text.isascii():
        return len(text)
    return max(len(form.encode(errors="replace")) for form in (text, unicodedata.normalize("NFKC", text)))
