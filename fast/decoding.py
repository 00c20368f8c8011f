"""One decoding step of a Llama-like model, without the layers of Python around its operations.

A step of a small model is so short that transformers' own bookkeeping takes as long as the arithmetic. Here the same
operations run on the same weights, in the same order: the logits are equal bit for bit (on a GPU, up to rounding).

Shapes: b rows, H hidden size, h query heads and k key-value heads of size d, L tokens in the cache.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from fast.matmul import product
from fast.packed_rows import NAME

if TYPE_CHECKING:
    from fast.cache import RowCache

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
    # functions: to call a module, or to look one up, takes longer than a product of few rows
    layers, last_norm = [_Layer.of(layer) for layer in decoder.layers], _norm(decoder.norm)
    head = product(model.lm_head)

    def step(
        input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, past_key_values: "RowCache"
    ) -> torch.Tensor:
        x = decoder.embed_tokens(input_ids[:, 0])  # (b, H)
        mask = None if attention_mask.all() else attention_mask[:, None, None].bool()  # (b, 1, 1, L)
        rotation = cos[position_ids[:, 0]], sin[position_ids[:, 0]]  # (b, 1, d)
        for layer, cache in zip(layers, past_key_values.layers, strict=True):
            x = x + layer.attend(layer.norm(x), rotation, mask, cache)
            y = layer.next_norm(x)
            x = x + layer.down(layer.activation(layer.gate(y)) * layer.up(y))
        return head(last_norm(x))

    return step


Function = Callable[[torch.Tensor], torch.Tensor]


class _Layer(NamedTuple):
    norm: Function
    q: Function
    k: Function
    v: Function
    norm_of_q: Function | None
    norm_of_k: Function | None
    o: Function
    scaling: float
    next_norm: Function
    gate: Function
    up: Function
    activation: Function
    down: Function

    @classmethod
    def of(cls, layer: nn.Module) -> "_Layer":
        attention, mlp = layer.self_attn, layer.mlp
        projections = (product(x) for x in (attention.q_proj, attention.k_proj, attention.v_proj))
        norms = [_norm(norm) if (norm := getattr(attention, name, None)) else None for name in ("q_norm", "k_norm")]
        functions = (product(mlp.gate_proj), product(mlp.up_proj), mlp.act_fn.forward, product(mlp.down_proj))
        inputs = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        return cls(inputs[0], *projections, *norms, product(attention.o_proj), attention.scaling, inputs[1], *functions)

    def attend(self, x: torch.Tensor, rotation: tuple, mask: torch.Tensor | None, cache) -> torch.Tensor:
        size = rotation[0].shape[-1]
        q, k, v = (project(x).view(len(x), -1, size) for project in (self.q, self.k, self.v))  # (b, h or k, d) each
        if self.norm_of_q is not None:
            q, k = self.norm_of_q(q), self.norm_of_k(k)
        both, (cos, sin) = torch.cat([q, k], dim=1), rotation
        both = both * cos + both.roll(size // 2, dims=2) * sin  # RoPE, arXiv 2104.09864
        q, k = both[:, : q.shape[1], None], both[:, q.shape[1] :, None]  # (b, h, 1, d), (b, k, 1, d)
        keys, values = cache.update(k, v[:, :, None])  # (b, k, L, d)
        found = scaled_dot_product_attention(q, keys, values, mask, scale=self.scaling, enable_gqa=True)  # (b, h, 1, d)
        return self.o(found.flatten(1))


def _norm(norm: nn.Module) -> Function:
    weight, eps, shape = norm.weight, norm.variance_epsilon, norm.weight.shape
    return lambda x: rms_norm(x, shape, weight, eps)


def _is_plain(model: nn.Module) -> bool:
    """Whether the operations are those that `decoding_step` knows, in float32 on a CPU or with CUDA, with no hook."""
    device = model.device.type
    if type(model).__name__ not in MODELS or device not in ("cpu", "cuda") or torch.is_autocast_enabled(device):
        return False
    config = model.config
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers]
    is_linear = all(isinstance(layer.self_attn.q_proj, nn.Linear) for layer in model.model.layers)
    return (
        config._attn_implementation == NAME
        and config.rope_parameters["rope_type"] in ROPES
        and is_linear
        and not any(windows)
        # of another class: a shard (DTensor) or quantised
        and all(weight.dtype == torch.float32 and type(weight) is nn.Parameter for weight in model.parameters())
        and not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    )
