"""One decoding step of a Llama-like model, without the layers of Python around its operations.

A step of a small model is so short that transformers' own bookkeeping takes as long as the arithmetic. Here the same
operations run on the same weights, in the same order: the logits are equal bit for bit.

Shapes: b rows, H hidden size, h query heads and k key-value heads of size d, L tokens in the cache.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import rms_norm

from common.fast.packed_rows import NAME, attend

if TYPE_CHECKING:
    from common.fast.cache import RowCache

MODELS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPES = ("default", "linear", "llama3", "yarn")  # whose angles do not depend on the length of the sequence


def decoding_step(model: nn.Module, max_length: int) -> Callable[..., torch.Tensor] | None:
    """A function that takes what the model takes, for one token of each row, and returns the logits (b, V).

    Args:
        model: its weights must not change while the function is in use.
        max_length: the most tokens that a row will have.

    Returns:
        None for models of other kinds.
    """
    if not _is_plain(model):
        return None
    decoder, size = model.model, model.model.layers[0].self_attn.head_dim
    positions = torch.arange(max_length, device=model.device)[None]
    cos, sin = (x[0, :, None] for x in decoder.rotary_emb(model.lm_head.weight, positions))  # (max_length, 1, d)
    sin = torch.cat([-sin[..., : size // 2], sin[..., size // 2 :]], dim=-1)  # `roll` moves halves without the sign

    def step(
        input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, past_key_values: "RowCache"
    ) -> torch.Tensor:
        x = decoder.embed_tokens(input_ids[:, 0])  # (b, H)
        mask = None if attention_mask.all() else attention_mask[:, None, None].bool()  # (b, 1, 1, L)
        rotation = cos[position_ids[:, 0]], sin[position_ids[:, 0]]  # (b, 1, d)
        for layer, layer_cache in zip(decoder.layers, past_key_values.layers, strict=True):
            x = x + _attention(layer.self_attn, _norm(x, layer.input_layernorm), rotation, mask, layer_cache)
            y, mlp = _norm(x, layer.post_attention_layernorm), layer.mlp
            x = x + mlp.down_proj(mlp.act_fn(mlp.gate_proj(y)) * mlp.up_proj(y))
        return model.lm_head(_norm(x, decoder.norm))

    return step


def _attention(
    attention: nn.Module, x: torch.Tensor, rotation: tuple, mask: torch.Tensor | None, cache
) -> torch.Tensor:
    q, k, v = (
        projection(x).view(len(x), -1, attention.head_dim)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )  # (b, h, d), (b, k, d), (b, k, d)
    if hasattr(attention, "q_norm"):
        q, k = _norm(q, attention.q_norm), _norm(k, attention.k_norm)
    both, (cos, sin) = torch.cat([q, k], dim=1), rotation
    both = both * cos + both.roll(attention.head_dim // 2, dims=2) * sin  # RoPE, arXiv 2104.09864
    q, k = both[:, : q.shape[1], None], both[:, q.shape[1] :, None]  # (b, h, 1, d), (b, k, 1, d)
    keys, values = cache.update(k, v[:, :, None])  # (b, k, L, d)
    found, _ = attend(attention, q, keys, values, mask, scaling=attention.scaling)  # (b, 1, h, d)
    return attention.o_proj(found.flatten(1))


def _norm(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    return rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def _is_plain(model: nn.Module) -> bool:
    """Whether the operations are those that `decoding_step` knows, in float32 on a CPU, with no hook."""
    if type(model).__name__ not in MODELS or model.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    config = model.config
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers]
    is_linear = all(isinstance(layer.self_attn.q_proj, nn.Linear) for layer in model.model.layers)
    return (
        config._attn_implementation == NAME
        and config.rope_parameters["rope_type"] in ROPES
        and is_linear
        and not any(windows)
        and all(weight.dtype == torch.float32 and not isinstance(weight, DTensor) for weight in model.parameters())
        and not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    )
