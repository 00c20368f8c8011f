"""Whether a model can be trained here: what it is checked for once it is loaded, before anything slow happens."""

import torch

from common.errors import UserError
from common.fast.shared_prompts import hidden_states, left_pad
from common.policy import Policy
from common.sampling import next_logits

from harness.base.config import ModelConfig, PolicyConfig, shown
from harness.models.adapters import is_lora


def check_quantisation(model: torch.nn.Module, config: ModelConfig) -> None:
    """Refuse weights that were quantised when they were saved, where the settings ask for what needs other ones."""
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


# The model is tried on two prompts of different lengths with two completions of two tokens each
PROMPT_LENGTHS, GROUP_SIZE, NEW_TOKENS = (3, 6), 2, 2


@torch.no_grad()
def check_computation(policy: Policy) -> None:
    """Refuse a model whose logits are not the LM head of the last hidden states, or that keeps other state (Mamba)."""
    model = policy.model.eval()
    name = type(model.get_base_model() if is_lora(policy) else model).__name__
    rows, prompts, sequences, action_mask = _rows(policy)
    unsupported = "which this code does not support yet"
    own_state = f"{name} keeps state other than keys and values, or has positions of its own, {unsupported}"
    fault = f"{name} does not run as a decoder with an LM head, {unsupported}"
    with policy.autocast():
        try:
            decoder, head = model.get_decoder(), model.get_output_embeddings()
            from_hidden = head(decoder(sequences, use_cache=False).last_hidden_state)
            logits = model(input_ids=sequences, use_cache=False).logits
            fault = own_state
            continued = _continue(policy, rows, prompts)
            states, positions = hidden_states(decoder, sequences, action_mask)
            scored = head(states[positions.argsort()])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # depends on the model: a cache without keys, an argument that it does not take
            raise UserError(fault) from error
    if not logits.isfinite().all():  # although the weights are, or else are quantised
        raise UserError(f"{name} computes logits that are NaN or infinite: are its weights damaged?")
    if not torch.allclose(from_hidden.float(), logits.float(), atol=1e-3):
        raise UserError(f"{name} transforms its logits after the LM head, {unsupported}")
    plain = logits[:, :-1][action_mask.bool()]  # (N, V), by row
    # 8-bit layers let the rows of a batch influence each other, and bfloat16 rounds, which can choose other experts
    is_exact = policy.compute_dtype == torch.float32 and not getattr(model, "is_quantized", False)
    for found in (continued, scored):
        if not _distance(found, plain) <= (1e-3 if is_exact else 0.5):  # NaN is no agreement either
            raise UserError(own_state)


def _rows(policy: Policy) -> tuple[list[list[int]], list[list[int]], torch.Tensor, torch.Tensor]:
    """Rows and their prompts; the rows as sequences (B, T) with their action mask (B, T-1)."""
    num_ids = len(policy.model.get_input_embeddings().weight)
    ids = iter([(num_ids // 2 + offset) % num_ids for offset in range(32)])  # tokens of text: special ones are outside
    prompts = [[next(ids) for _ in range(length)] for length in PROMPT_LENGTHS]
    rows = [prompt + [next(ids) for _ in range(NEW_TOKENS)] for prompt in prompts for _ in range(GROUP_SIZE)]
    width = max(map(len, rows))
    sequences = torch.tensor([row + [policy.pad_id] * (width - len(row)) for row in rows], device=policy.device)
    action_mask = torch.zeros_like(sequences[:, 1:])
    for row, mask in zip(rows, action_mask, strict=True):
        mask[len(row) - NEW_TOKENS - 1 : len(row) - 1] = 1
    return rows, prompts, sequences, action_mask


def _continue(policy: Policy, rows: list[list[int]], prompts: list[list[int]]) -> torch.Tensor:
    """The logits that predict the new tokens of the rows as sampling computes them: (N, V), by row."""
    from common.fast.cache import RowCache

    cache = RowCache()
    sequences, attention_mask = left_pad(prompts, policy.pad_id, policy.device)
    logits = [next_logits(policy, sequences, attention_mask, cache).repeat_interleave(GROUP_SIZE, dim=0)]
    cache.batch_repeat_interleave(GROUP_SIZE)
    attention_mask = attention_mask.repeat_interleave(GROUP_SIZE, dim=0)
    for token in torch.tensor([row[-NEW_TOKENS:-1] for row in rows], device=policy.device).T:
        attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(rows), 1)], dim=1)
        logits.append(next_logits(policy, token[:, None], attention_mask, cache))
    return torch.stack(logits, dim=1).flatten(0, 1)


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of logits (N, V): the norm of the difference in units of that of `expected`, whose means do not matter."""
    found, expected = (logits.float() - logits.float().mean(dim=-1, keepdim=True) for logits in (found, expected))
    return ((found - expected).norm() / expected.norm().clamp(min=1e-6)).item()
