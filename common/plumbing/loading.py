"""Load a policy: any Hugging Face causal language model with a chat template, from the hub or from a directory."""

import copy
import logging
import os
import warnings

import torch

from common.errors import UserError
from common.fast.matmul import use_fast_products
from common.policy import Policy, PolicyOutput

from common.plumbing.config import DTYPES, PolicyConfig, resolve
from common.plumbing.hub import must_be_cached
from common.plumbing.saving import is_lora


def load_policy(config: PolicyConfig, temperature: float = 1.0) -> Policy:
    """Load `config.model` with its tokenizer on `config.device`, with a LoRA adapter if one is requested.

    Trained weights are held in float32, frozen ones (with LoRA: all of the model's own) in `config.dtype`.

    Raises:
        UserError: there is no such model, or it cannot be used here; the sentence says what to do.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # one progress line is enough
    for name in ("backends.cpu.ops", "autograd._functions"):  # notes on speed and on casts, in every layer
        logging.getLogger(f"bitsandbytes.{name}").setLevel(logging.ERROR)
    config = resolve(config, {})  # only for a config that was made in code: the command line has resolved its own
    source = str(config.model_path or config.model)
    settings = {"local_files_only": config.model_path is not None or must_be_cached("model", source)}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **settings)
        if config.load_in is not None:
            settings |= {"quantization_config": _quantization(config), "device_map": {"": config.device}}
        model, loading = AutoModelForCausalLM.from_pretrained(
            source,
            output_loading_info=True,
            dtype=DTYPES[config.dtype] if config.lora_rank else torch.float32,
            attn_implementation=config.attn_implementation,
            **settings,
        )
    except Exception as error:  # a damaged file can raise anything, a KeyError for example
        raise UserError(f"--model {source} could not be loaded: {' '.join(str(error).split())}") from error
    if loading["missing_keys"]:  # transformers would give them random numbers
        raise UserError(f"--model {source} lacks weights, {sorted(loading['missing_keys'])[0]} for one")
    return make_policy(model, tokenizer, config, temperature)


def make_policy(model: torch.nn.Module, tokenizer, config: PolicyConfig, temperature: float = 1.0) -> Policy:
    """Wrap a model and its tokenizer, ready for training."""
    if tokenizer.chat_template is None:
        raise UserError(f"--model {config.model} has no chat template; use an instruction-tuned model")
    _disable_dropout(model)
    use_fast_products(model)
    if config.device == "cpu":  # sdpa takes grouped keys as they are there; transformers need not repeat them
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    try:
        end_of_turn_ids = find_end_of_turn_ids(tokenizer, model.generation_config)
    except ValueError as error:
        raise UserError(f"--model {config.model}: {error}") from error
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end_of_turn_ids[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5.2x renames gradient checkpointing
        if config.gradient_checkpointing:
            # works in training mode only: Policy.forward enters it, and dropout is off anyway
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if config.lora_rank:
            model = _add_adapter(model, config)
    if config.load_in is None:
        model = model.to(config.device)
    else:
        _forbid_repacking(model)
    policy = Policy(
        model, tokenizer, end_of_turn_ids, pad_id, temperature, DTYPES[config.dtype], config.gradient_checkpointing
    )
    _check_head(policy)
    return policy


def make_reference(policy: Policy) -> Policy:
    """The policy as it is now, frozen, for the KL penalty: a copy, or with LoRA the same model without its adapter."""
    if not is_lora(policy):
        return copy.deepcopy(policy).requires_grad_(False)
    return _WithoutAdapter(
        policy.model, policy.tokenizer, policy.end_of_turn_ids, policy.pad_id, policy.temperature, policy.compute_dtype
    )


class _WithoutAdapter(Policy):
    """A policy with a LoRA adapter as it was before any training, at no memory of its own."""

    def forward(self, *arguments, **options) -> PolicyOutput:
        with self.model.disable_adapter():
            return super().forward(*arguments, **options)


def find_end_of_turn_ids(tokenizer, generation_config) -> list[int]:
    """Every id that ends an assistant turn: the tokenizer's and the generation config's (Llama 3 has several).

    Raises:
        ValueError: there is none, so that no completion could ever end.
    """
    configured = getattr(generation_config, "eos_token_id", None)
    configured = configured if isinstance(configured, list) else [configured]
    ids = sorted({i for i in [tokenizer.eos_token_id, *configured] if i is not None})
    if not ids:
        raise ValueError("neither the tokenizer nor the generation config names an end-of-turn (eos) token")
    return ids


def _quantization(config: PolicyConfig):
    from transformers import BitsAndBytesConfig

    if config.load_in == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[config.dtype],
    )


def _forbid_repacking(model: torch.nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights anew for CPUs with AVX512-BF16.

    It does so in the first forward pass without gradient, that is in the first rollout, and computes wrong gradients
    from then on, without an error (measured on 0.50.2; tests/models/test_adapters.py compares them).
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def _add_adapter(model: torch.nn.Module, config: PolicyConfig) -> torch.nn.Module:
    """LoRA (arXiv 2106.09685) on every linear layer but the head: W x becomes W x + (alpha / rank) B A x, B = 0."""
    from peft import LoraConfig, get_peft_model

    alpha = 2 * config.lora_rank if config.lora_alpha is None else config.lora_alpha
    settings = LoraConfig(
        task_type="CAUSAL_LM", r=config.lora_rank, lora_alpha=alpha, lora_dropout=0.0, target_modules="all-linear"
    )
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)  # A is random
        return get_peft_model(model, settings)


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
    model = policy.model.eval()
    ids = torch.arange(4, device=policy.device)[None]
    with policy.autocast():
        hidden = model.get_decoder()(ids, use_cache=False).last_hidden_state
        expected, logits = model.get_output_embeddings()(hidden), model(input_ids=ids, use_cache=False).logits
    if not torch.allclose(expected.float(), logits.float(), atol=1e-3):
        raise UserError(
            f"{type(model).__name__} transforms its logits after the LM head, which this code does not support yet"
        )
