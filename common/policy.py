"""Load a policy: any Hugging Face causal language model with a chat template, from the hub or from a directory.

The class `Policy` itself stands in logprobs.py.
"""

import copy

import torch

from common.chat import find_end_of_turn_ids
from common.config import PolicyConfig, UserError
from common.logprobs import Policy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_policy(config: PolicyConfig, temperature: float = 1.0) -> Policy:
    """Load `config.model` with its tokenizer, in float32 weights, on `config.device`.

    Raises:
        UserError: there is no such model, or it cannot be used here; the sentence says what to do.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # one progress line is enough
    source = str(config.model_path or config.model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, attn_implementation=config.attn_implementation
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise UserError(f"--model {source} could not be loaded: {' '.join(str(error).split())}") from error
    return make_policy(model, tokenizer, config, temperature)


def make_policy(model: torch.nn.Module, tokenizer, config: PolicyConfig, temperature: float = 1.0) -> Policy:
    """Wrap a model and its tokenizer, ready for training."""
    if tokenizer.chat_template is None:
        raise UserError(f"--model {config.model} has no chat template; use an instruction-tuned model")
    _disable_dropout(model)
    try:
        end_of_turn_ids = find_end_of_turn_ids(tokenizer, model.generation_config)
    except ValueError as error:
        raise UserError(f"--model {config.model}: {error}") from error
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end_of_turn_ids[0]
    policy = Policy(model, tokenizer, end_of_turn_ids, pad_id, temperature, DTYPES[config.dtype]).to(config.device)
    _check_head(policy)
    return policy


def make_reference(policy: Policy) -> Policy:
    """A frozen copy of the policy as it is now, for the KL penalty."""
    return copy.deepcopy(policy).requires_grad_(False)


def _disable_dropout(model: torch.nn.Module) -> None:
    """Log-probabilities are compared between passes, and dropout would give each pass another policy."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


@torch.no_grad()
def _check_head(policy: Policy) -> None:
    """Refuse a model whose logits are not simply its LM head applied to its last hidden states.

    `Policy.forward` relies on it. Gemma 2's soft-capped logits, for one, are something else.
    """
    model = policy.model
    ids = torch.arange(4, device=policy.device)[None]
    with policy.autocast():
        hidden = model.get_decoder()(ids, use_cache=False).last_hidden_state
        expected, logits = model.get_output_embeddings()(hidden), model(ids, use_cache=False).logits
    if not torch.allclose(expected, logits, atol=1e-3):
        raise UserError(
            f"{type(model).__name__} transforms its logits after the LM head, which this code does not support yet"
        )
