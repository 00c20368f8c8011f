"""What a tokenizer must be able to do before a run begins: render a conversation, and name ids that the model has."""

from pathlib import Path

from common.chat import encode_prompt
from common.errors import UserError

from common.plumbing.config import shown

PROBE = [{"role": "user", "content": "What is 1 + 1?"}]


def find_end_of_turn_ids(tokenizer, generation_config) -> list[int]:
    """Every id that ends an assistant turn: the tokenizer's and the generation config's (Llama 3 has several).

    Raises:
        ValueError: there is none, so that no completion could ever end, or one is not an id.
    """
    configured = getattr(generation_config, "eos_token_id", None)
    configured = configured if isinstance(configured, list) else [configured]
    ids = [i for i in [tokenizer.eos_token_id, *configured] if i is not None]
    for i in ids:
        if type(i) is not int:  # a bool is not an id either
            raise ValueError(f"the generation config's end-of-turn id (eos_token_id) {i!r} is not a whole number")
    if not ids:
        raise ValueError("neither the tokenizer nor the generation config names an end-of-turn (eos) token")
    return sorted(set(ids))


def check_tokenizer(tokenizer, end_of_turn_ids: list[int], pad_id: int, num_ids: int) -> None:
    """
    Args:
        num_ids: how many rows the model's embedding has.

    Raises:
        ValueError: the chat template renders nothing, or an id is beyond the embedding.
    """
    try:
        prompt = encode_prompt(tokenizer, PROBE)
    except UserError:  # it may want other messages; those that the run has are seen before it trains
        prompt = [pad_id]
    if not prompt:
        raise ValueError("the chat template renders nothing for a plain question")
    # Special tokens beyond it are common (Gemma 3's image token) and harmless as long as they are not used
    ordinary = [i for token, i in tokenizer.get_vocab().items() if token not in tokenizer.all_special_tokens]
    for what, ids in (
        ("the end-of-turn id", end_of_turn_ids),
        ("the padding id", [pad_id]),
        ("the chat template's id", prompt),
        ("the tokenizer's id", ordinary),
    ):
        for i in (min(ids), max(ids)):
            if not 0 <= i < num_ids:
                raise ValueError(f"{what} {i} is not among the {num_ids} ids that the model has")


def read_template(source: str) -> str:
    """The chat template in a file.

    Raises:
        UserError: there is none.
    """
    try:
        template = Path(source).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"--chat-template {shown(source)} cannot be read ({reason})") from error
    if not template.strip():
        raise UserError(f"--chat-template {shown(source)} is empty")
    return template
