"""Load a policy: any Hugging Face causal language model with a chat template, from the hub or from a directory."""

import copy
import logging
import os
import warnings

import torch
from torch.nn.parallel import DistributedDataParallel

from common.chat import begin_completions
from common.errors import UserError
from common.fast.matmul import use_fast_products
from common.policy import Policy

from harness.base.config import DTYPES, ModelConfig, PolicyConfig, resolve, shown
from harness.base.hub import must_be_cached
from harness.base.terminal import printable, say
from harness.models.adapters import (
    WithAdapterAsItWas,
    WithoutAdapter,
    add_adapter,
    is_lora,
    load_adapter,
)
from harness.models.compatibility import check_computation, check_quantisation
from harness.models.pretrained import (
    check_finite,
    check_tokenizer,
    count_parameters,
    find_end_of_turn_ids,
    read_model,
    refuse_adapter,
    set_template,
    tokenizer_of,
)


def load_policy(config: ModelConfig, temperature: float = 1.0) -> Policy:
    """Load `config.model` on `config.device`: trained weights in float32, frozen ones (with LoRA) in `config.dtype`."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # one progress line is enough
    for name in ("backends.cpu.ops", "autograd._functions"):  # notes on speed and on casts, in every layer
        logging.getLogger(f"bitsandbytes.{name}").setLevel(logging.ERROR)
    config = resolve(config, {})  # only for a config that was made in code: the command line has resolved its own
    is_here = config.base_path is not None or must_be_cached("model", config.base)
    refuse_adapter(config.base, is_here)
    tokenizer = tokenizer_of(config, is_here)
    options = {"attn_implementation": config.attn_implementation, "local_files_only": is_here}
    if config.load_in is not None:
        from transformers import BitsAndBytesConfig

        four_bit = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        four_bit |= {"load_in_4bit": True, "bnb_4bit_compute_dtype": DTYPES[config.dtype]}
        bits = four_bit if config.load_in == "4bit" else {"load_in_8bit": True}
        options |= {"quantization_config": BitsAndBytesConfig(**bits), "device_map": {"": config.device}}
    model = read_model(config.base, DTYPES[config.dtype] if config.has_adapter else torch.float32, **options)
    return make_policy(model, tokenizer, config, temperature)


def make_policy(model: torch.nn.Module, tokenizer, config: ModelConfig, temperature: float = 1.0) -> Policy:
    """Wrap a model and its tokenizer, with its adapter; under a `PolicyConfig` ready for training."""
    set_template(tokenizer, config)
    prefix = getattr(config, "completion_prefix", None)
    if prefix is not None:
        begin_completions(tokenizer, prefix)
    check_quantisation(model, config)
    use_fast_products(model)
    if config.device == "cpu":  # sdpa takes grouped keys as they are there; transformers need not repeat them
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    try:
        end_of_turn_ids = find_end_of_turn_ids(tokenizer, model.generation_config)
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end_of_turn_ids[0]
        check_tokenizer(tokenizer, end_of_turn_ids, pad_id, num_ids=len(model.get_input_embeddings().weight))
    except ValueError as error:
        raise UserError(f"--model {shown(config.model)}: {error}") from error
    if not set(end_of_turn_ids).isdisjoint(tokenizer.encode(prefix or "", add_special_tokens=False)):
        raise UserError(f"--completion-prefix {printable(prefix, 60)} holds a token that ends a turn: leave it out")
    if config.adapter_path is not None:
        model = _use_adapter(model, config)
    is_trained = isinstance(config, PolicyConfig)
    if is_trained and config.lora_rank:
        model = add_adapter(model, config.lora_rank, config.lora_alpha, config.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5.2x renames gradient checkpointing
        if is_trained and config.gradient_checkpointing:
            # works in training mode only: Policy.forward enters it, and dropout is off anyway
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.load_in is None:
        model = model.to(config.device)
    for module in model.modules():
        # log-probabilities are compared between passes, and dropout would give each pass another policy
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
        # bitsandbytes would pack 4-bit weights anew for CPUs with AVX512-BF16, in the first rollout, and compute wrong
        # gradients from then on, without an error (measured on 0.50.2; tests/models/test_adapters.py compares them)
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    policy = Policy(model, tokenizer, end_of_turn_ids, pad_id, temperature, DTYPES[config.dtype])
    policy.gradient_checkpointing = is_trained and config.gradient_checkpointing
    exclude_frozen(policy)
    check_finite(f"--model {shown(config.model)}", model.named_parameters())
    check_computation(policy)
    if is_trained:
        total, trained = count_parameters(model).values()
        say(f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%})")
    return policy


def _use_adapter(model: torch.nn.Module, config: ModelConfig) -> torch.nn.Module:
    """With the adapter that `--model` names, which is merged if a new one is to be trained."""
    model = load_adapter(model, config.adapter_path)
    given = f"--model {shown(config.model)} is a LoRA adapter of rank {model.peft_config['default'].r}"
    if isinstance(config, PolicyConfig) and config.lora_rank:
        say(f"{given}: it is merged into its base {config.base}, and a new one of rank {config.lora_rank} is trained")
        return model.merge_and_unload()
    say(f"{given} for {config.base}{': it is trained further' if isinstance(config, PolicyConfig) else ''}")
    return model


def make_reference(policy: Policy) -> Policy:
    """The policy as it is now, frozen, for the KL penalty: a copy, or with LoRA the same model without its adapter."""
    if not is_lora(policy):
        return copy.deepcopy(policy).requires_grad_(False)
    is_trained = any(weight.any() for name, weight in policy.named_parameters() if "_B." in name)  # a new one: B = 0
    return WithAdapterAsItWas(policy) if is_trained else WithoutAdapter(policy)


def exclude_frozen(policy: Policy) -> None:
    """Keep DistributedDataParallel from sending frozen weights and buffers: every process has loaded the same."""
    frozen = [name for name, weight in policy.named_parameters() if not weight.requires_grad]
    buffers = [name for name, _ in policy.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(policy, frozen + buffers)
