"""Load a policy: any Hugging Face causal language model with a chat template, from the hub or from a directory."""

import copy
import math
import os
import warnings

import torch

from common.chat import begin_completions, encode_prompt
from common.errors import UserError
from common.policy import Policy
from common.sampling import left_pad, next_logits
from common.stop_texts import can_write
from fast.matmul import use_fast_products
from fast.packed_rows import FLEX, hidden_states

from harness.base.config import DTYPES, ModelConfig, PolicyConfig, resolve, shown
from harness.base.hub import must_be_cached
from harness.base.ranks import num_launched
from harness.base.terminal import printable, say, silence_bitsandbytes
from harness.data.thoughts import check_is_shown
from harness.models.adapters import AdapterReference, add_adapter, is_lora, load_adapter
from harness.models.context import fixed_length
from harness.models.pretrained import (
    check_finite,
    check_tokenizer,
    find_end_of_turn_ids,
    is_reward_model,
    read_model,
    refuse_adapter,
    set_template,
    tell_size,
    tokenizer_of,
)
from harness.processes.data_parallel import exclude_frozen
from harness.processes.processes import requested_launch


def load_policy(config: ModelConfig, temperature: float = 1.0, is_frozen: bool = False) -> Policy:
    """Load `config.model` on `config.device`: trained weights in float32, frozen ones in `config.dtype`."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # one progress line is enough
    silence_bitsandbytes()
    config = resolve(config, {})  # only for a config made in code: the command line resolves its own
    is_here = config.base_path is not None or must_be_cached("model", config.base)
    refuse_adapter(config.base, is_here)
    if is_reward_model(config.base, is_here):
        raise UserError(f"--model {shown(config.model)} is a reward model and writes nothing: --reward-model takes it")
    tokenizer = tokenizer_of(config, is_here)
    check_is_shown(tokenizer, getattr(config, "answer_begins", None))
    attention = "sdpa" if config.attn_implementation == FLEX else config.attn_implementation  # sdpa samples
    options = {"attn_implementation": attention, "local_files_only": is_here}
    if config.load_in is not None:
        from transformers import BitsAndBytesConfig

        four_bit = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        four_bit |= {"load_in_4bit": True, "bnb_4bit_compute_dtype": DTYPES[config.dtype]}
        bits = four_bit if config.load_in == "4bit" else {"load_in_8bit": True}
        options |= {"quantization_config": BitsAndBytesConfig(**bits), "device_map": {"": config.device}}
    dtype = DTYPES[config.dtype] if config.has_adapter or is_frozen else torch.float32
    model = read_model(config.base, dtype, **options)
    return make_policy(model, tokenizer, config, temperature)


def make_policy(model: torch.nn.Module, tokenizer, config: ModelConfig, temperature: float = 1.0) -> Policy:
    """Wrap a model and its tokenizer, with its adapter; a `PolicyConfig` makes it ready for training."""
    set_template(tokenizer, config.model, config.chat_template)
    prefix = getattr(config, "completion_prefix", None)
    if prefix is not None:
        begin_completions(tokenizer, prefix)
    check_quantisation(model, config)
    use_fast_products(model)
    if config.device == "cpu":  # sdpa accepts grouped keys directly; transformers need not repeat them
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    try:
        end_of_turn_ids = find_end_of_turn_ids(tokenizer, model.generation_config)
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end_of_turn_ids[0]
        check_tokenizer(tokenizer, end_of_turn_ids, pad_id, num_ids=len(model.get_input_embeddings().weight))
    except ValueError as error:
        raise UserError(f"--model {shown(config.model)}: {error}") from error
    if not set(end_of_turn_ids).isdisjoint(tokenizer.encode(prefix or "", add_special_tokens=False)):
        raise UserError(f"--completion-prefix {printable(prefix, 60)} holds a token that ends a turn: leave it out")
    stop_texts = tuple(getattr(config, "stop", ()))
    for text in stop_texts:
        if not can_write(tokenizer, text):
            raise UserError(
                f"--stop {printable(repr(text), 60)}: no text of {shown(config.model)} contains it: its tokenizer has "
                "no tokens for it, or only control tokens, which texts leave out"
            )
    if not stop_texts:
        _tell_of_unknown_end(tokenizer, end_of_turn_ids, config.model)
    if config.adapter_path is not None:
        model = _use_adapter(model, config)
    is_trained = isinstance(config, PolicyConfig)
    if is_trained and config.lora_rank:
        model = add_adapter(model, config.lora_rank, config.lora_alpha, config.seed, config.lora_targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5.2x renames gradient checkpointing
        if is_trained and config.gradient_checkpointing:
            # works in training mode only: Policy.forward enters it, and dropout is off anyway
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.load_in is None:
        model = model.to(config.device)
    for module in model.modules():
        # log-probabilities are compared between passes, and dropout would change the policy in each pass
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
        # on CPUs with AVX512-BF16, bitsandbytes would repack 4-bit weights in the first rollout and then compute wrong
        # gradients, without an error (measured on 0.50.2; tests/models/test_adapters.py compares them)
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    policy = Policy(model, tokenizer, end_of_turn_ids, pad_id, temperature, DTYPES[config.dtype])
    policy.stop_texts = stop_texts
    policy.gradient_checkpointing = is_trained and config.gradient_checkpointing
    exclude_frozen(policy)
    check_finite(f"--model {shown(config.model)}", model.named_parameters())
    if config.attn_implementation == FLEX:
        policy.packing = FLEX
    if not getattr(config, "pack", True):
        policy.packing = None
    check_computation(policy)
    if (length := fixed_length(model.config)) < math.inf:
        say(
            f"{shown(config.model)} has a context of {length} tokens here: beyond it, its RoPE turns all tokens by "
            "the longest row of a batch, and sampling and training would disagree"
        )
    if is_trained:
        tell_size(model)
    return policy


def _tell_of_unknown_end(tokenizer, end_of_turn_ids: list[int], model: str) -> None:
    """Say what the template writes after an answer, if no end-of-turn token of the model is there."""
    asks, says = "(a question)", "(an answer)"
    turns = [{"role": role, "content": text} for role, text in (("user", asks), ("assistant", says), ("user", asks))]
    try:
        _, found, after = tokenizer.decode(encode_prompt(tokenizer, turns)).rpartition(says)
    except UserError:  # the template wants other messages
        return
    after = after.partition(asks)[0]  # with the header of the question: GLM's ends a turn
    if not found or any(tokenizer.decode([i]) in after for i in end_of_turn_ids):
        return
    own = " or ".join(tokenizer.convert_ids_to_tokens(end_of_turn_ids))
    say(
        f"--model {shown(model)}: the chat template ends an answer with "
        f"{printable(repr((after.split() or [after])[0]), 60)}, but only {own} ends a completion, so that completions "
        "run to their limit: give a base model another template (--chat-template recipes/base_model.jinja), or take an "
        "instruction-tuned model"
    )


def _use_adapter(model: torch.nn.Module, config: ModelConfig) -> torch.nn.Module:
    """Add the adapter that `--model` names; it is merged if the run trains a new one."""
    model = load_adapter(model, config.adapter_path)
    given = f"{shown(config.model)} is a LoRA adapter of rank {model.peft_config['default'].r}"
    if isinstance(config, PolicyConfig) and config.lora_rank:
        say(f"{given}: it is merged into its base {config.base}, and a new one of rank {config.lora_rank} is trained")
        return model.merge_and_unload()
    say(f"{given} for {config.base}{': it is trained further' if isinstance(config, PolicyConfig) else ''}")
    return model


def make_reference(policy: Policy) -> Policy:
    """The current policy, frozen, for the KL penalty: a copy or, with LoRA, the same model without its adapter."""
    if is_lora(policy):
        return AdapterReference(policy)
    if num_launched() > 1 and requested_launch().sharding == "fsdp":
        from harness.processes.accelerator import sharded_copy  # not at the top: it takes two seconds

        return sharded_copy(policy)
    return copy.deepcopy(policy).requires_grad_(False)


# Whether a model can be trained here ----------------------------------------------------------------------------------


def check_quantisation(model: torch.nn.Module, config: ModelConfig) -> None:
    """Refuse weights that were saved quantised if the settings ask for something that needs others."""
    quantizer = getattr(model, "hf_quantizer", None)
    if not getattr(model, "is_quantized", False) or not quantizer.pre_quantized:
        return
    stored = quantizer.quantization_config
    load_in = next((bits for bits in ("4bit", "8bit") if getattr(stored, f"load_in_{bits}", False)), None)
    kind = load_in or getattr(stored.quant_method, "value", stored.quant_method)
    given = f"--model {shown(config.model)}: the weights of {config.base} are already quantised ({kind})"
    if config.load_in not in (None, load_in):
        raise UserError(f"{given}: omit --load-in {config.load_in}, or use a model that is not quantised")
    if isinstance(config, PolicyConfig):
        if not config.has_adapter:
            raise UserError(f"{given} and cannot be trained: add an adapter, --lora-rank 16 for example")
        if config.save_merged or (config.adapter_path is not None and config.lora_rank):
            omitted = "--save-merged" if config.save_merged else "--lora-rank"
            raise UserError(f"{given}, and an adapter cannot be merged into them: omit {omitted}")
    if load_in == "8bit" and config.dtype == "float32":
        raise UserError(f"{given} and compute in half precision: use --dtype bfloat16")


# A model is tested on two prompts of different lengths with two completions of two tokens each
PROMPT_LENGTHS, GROUP_SIZE, NEW_TOKENS = (3, 6), 2, 2


@torch.no_grad()
def check_computation(policy: Policy) -> None:
    """Refuse a model whose logits are not the LM head of the last hidden states, or that keeps other state (Mamba)."""
    model = policy.model.eval()
    name = type(model.get_base_model() if is_lora(policy) else model).__name__
    rows, prompts, sequences, action_mask = _rows(policy)
    unsupported = "which this code does not support yet"
    own_state = f"{name} keeps state other than keys and values, or computes its own positions, {unsupported}"
    fault = f"{name} does not run as a decoder with an LM head, {unsupported}"
    with policy.autocast():
        try:
            decoder, head = model.get_decoder(), model.get_output_embeddings()
            from_hidden = head(decoder(sequences, use_cache=False).last_hidden_state)
            logits = model(input_ids=sequences, use_cache=False).logits
            fault = own_state
            continued = _continue(policy, rows, prompts)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # depends on the model: a cache without keys, an unsupported argument
            raise UserError(fault) from error
    if not logits.isfinite().all():  # although the weights are finite, or quantised
        raise UserError(f"{name} computes logits that are NaN or infinite: are its weights damaged?")
    if not torch.allclose(from_hidden.float(), logits.float(), atol=1e-3):
        raise UserError(f"{name} transforms its logits after the LM head, {unsupported}")
    plain = logits[:, :-1][action_mask.bool()]  # (N, V), by row
    # 8-bit layers let the rows of a batch influence each other, and bfloat16 rounds, which can choose other experts
    is_exact = policy.compute_dtype == torch.float32 and not getattr(model, "is_quantized", False)
    tolerance = 1e-3 if is_exact else 0.5
    if not _distance(continued, plain) <= tolerance:  # NaN is no agreement either
        raise UserError(own_state)
    if policy.packing and not _distance(_packed(policy, sequences, action_mask, plain), plain) <= tolerance:
        say(f"rows are padded, not packed: the attention of {name} does not know the borders of packed rows")
        policy.packing = None


def _packed(policy: Policy, sequences: torch.Tensor, action_mask: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """The logits (N, V) that predict the rows' new tokens, from packed rows; NaN if the model does not take these."""
    try:
        with policy.autocast():
            hidden, positions = hidden_states(policy.model.get_decoder(), sequences, action_mask, policy.packing)
            return policy.model.get_output_embeddings()(hidden[positions.argsort()])
    except torch.OutOfMemoryError:
        raise
    except Exception:  # depends on the model: a sliding window, an argument that it does not pass on
        return torch.full_like(plain, torch.nan)


def _rows(policy: Policy) -> tuple[list[list[int]], list[list[int]], torch.Tensor, torch.Tensor]:
    """Rows and their prompts; the rows as sequences (B, T) with their action mask (B, T-1)."""
    num_ids = len(policy.model.get_input_embeddings().weight)
    ids = iter([(num_ids // 2 + offset) % num_ids for offset in range(32)])  # ordinary tokens: special ones are outside
    prompts = [[next(ids) for _ in range(length)] for length in PROMPT_LENGTHS]
    rows = [prompt + [next(ids) for _ in range(NEW_TOKENS)] for prompt in prompts for _ in range(GROUP_SIZE)]
    width = max(map(len, rows))
    sequences = torch.tensor([row + [policy.pad_id] * (width - len(row)) for row in rows], device=policy.device)
    action_mask = torch.zeros_like(sequences[:, 1:])
    for row, mask in zip(rows, action_mask, strict=True):
        mask[len(row) - NEW_TOKENS - 1 : len(row) - 1] = 1
    return rows, prompts, sequences, action_mask


def _continue(policy: Policy, rows: list[list[int]], prompts: list[list[int]]) -> torch.Tensor:
    """The logits that predict the rows' new tokens, computed as in sampling: (N, V), by row."""
    from fast.cache import RowCache  # not at the top: it imports transformers, which `--help` need not wait for

    cache = RowCache()
    sequences, attention_mask = left_pad(prompts, policy.pad_id, policy.device)
    logits = [next_logits(policy, sequences, attention_mask, cache).repeat_interleave(GROUP_SIZE, dim=0)]
    cache.batch_repeat_interleave(GROUP_SIZE)
    attention_mask = attention_mask.repeat_interleave(GROUP_SIZE, dim=0)
    for ids in torch.tensor([row[-NEW_TOKENS:-1] for row in rows], device=policy.device).T:
        attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(rows), 1)], dim=1)
        logits.append(next_logits(policy, ids[:, None], attention_mask, cache))
    return torch.stack(logits, dim=1).flatten(0, 1)


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The distance of logits (N, V), relative to the norm of `expected`; the means of both do not matter.

    >>> _distance(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 2.0]]))
    0.0
    """
    found, expected = (logits.float() - logits.float().mean(dim=-1, keepdim=True) for logits in (found, expected))
    return ((found - expected).norm() / expected.norm().clamp(min=1e-6)).item()
