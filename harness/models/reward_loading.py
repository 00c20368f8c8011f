"""Load a reward model: a new one, on a language model that it starts from, or a finished one, to score answers."""

import torch

from common.errors import UserError
from common.reward_model import RewardModel
from fast.matmul import use_fast_products

from harness.base.config import DTYPES, PolicyConfig, find_directory, shown
from harness.base.hub import must_be_cached
from harness.models.pretrained import (
    check_finite,
    find_end_of_turn_ids,
    is_reward_model,
    read_config,
    read_model,
    read_tokenizer,
    tell_size,
    tokenizer_of,
)


def new_reward_model(config: PolicyConfig) -> RewardModel:
    """The layers of `config.model` under a new head, which is random and small: all scores begin near 0.

    If `config.model` is itself a reward model, it is trained further.
    """
    if config.has_adapter or config.load_in is not None:
        raise UserError("a reward model trains all of its weights: omit --lora-rank and --load-in, and name no adapter")
    is_here = config.base_path is not None or must_be_cached("model", config.base)
    tokenizer = tokenizer_of(config, is_here)
    options = {"attn_implementation": config.attn_implementation, "num_labels": 1}
    model = _read(config.base, torch.float32, is_here, may_lack=("score.weight",), **options)
    if not hasattr(model, "score"):
        raise UserError(f"--model {shown(config.model)}: {type(model).__name__} has no score head on its last token")
    if not is_reward_model(config.base, is_here):  # otherwise it goes on with the head that it has
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            torch.nn.init.normal_(model.score.weight, std=0.02)
    reward_model = _wrap(model, tokenizer, f"--model {shown(config.model)}", config.device, DTYPES[config.dtype])
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        reward_model.gradient_checkpointing = True
    tell_size(model)
    return reward_model


def load_reward_model(source: str, device: str, dtype: torch.dtype) -> RewardModel:
    """The finished reward model of a directory or a hub id; UserError if there is none, or it gives several numbers."""
    path, given = find_directory(source), f"--reward-model {shown(source)}"
    if path is not None and not (path / "config.json").is_file():
        raise UserError(f"{given}: there is no model (no config.json); a hub id is owner/name")
    if path is not None and (path / "final").is_dir():
        raise UserError(f"{given} is a run: give its {shown(path / 'final')}")
    source = source if path is None else str(path)
    is_here = path is not None or must_be_cached("model", source)
    config = read_config(source, is_here)
    kind = (config.architectures or ["a model without a head"])[0]
    if not is_reward_model(source, is_here):
        raise UserError(f"{given} is a {kind}, not a reward model: rewards/reward_model/train.py --model makes one")
    if config.num_labels != 1:
        raise UserError(f"{given} gives {config.num_labels} numbers: a reward model gives one (num_labels 1)")
    model = _read(source, dtype, is_here)
    tokenizer = read_tokenizer(source, is_here)
    if tokenizer.chat_template is None:
        raise UserError(f"{given} has no chat template, so that nobody knows how it reads a conversation")
    return _wrap(model, tokenizer, given, device, dtype).requires_grad_(False)


def _read(source: str, dtype: torch.dtype, is_here: bool, **options) -> torch.nn.Module:
    from transformers import AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return read_model(source, dtype, is_here, AutoModelForSequenceClassification, **options)


def _wrap(model: torch.nn.Module, tokenizer, given: str, device: str, dtype: torch.dtype) -> RewardModel:
    check_finite(given, model.named_parameters())
    use_fast_products(model)
    for module in model.modules():  # as in `make_policy`: the same answer must get the same score
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    try:
        end_of_turn_ids = find_end_of_turn_ids(tokenizer, model.config)
    except ValueError as error:
        raise UserError(f"{given}: {error}") from error
    pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    model.config.pad_token_id = next(i for i in pads if i is not None)  # transformers needs one to score a batch
    return RewardModel(model.to(device), tokenizer, end_of_turn_ids, model.config.pad_token_id, dtype)
