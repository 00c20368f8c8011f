"""What a model's config says of its size: parameters, key-value cache, and the activations that training keeps.

Weights are never read. A model of one layer and one of two are run on tensors that have shapes but no data; all further
layers cost what the second one does.
"""

import copy
import json
import os
from dataclasses import dataclass
from functools import cached_property

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from common.errors import UserError

from common.plumbing.adapters import add_adapter
from common.plumbing.config import ADAPTER_SETTINGS, TINY_POLICY, ModelConfig
from common.plumbing.hub import must_be_cached
from common.plumbing.pretrained import read_config


@dataclass(frozen=True)
class Pass:
    """What one forward pass of the update runs: `rows` sequences of `tokens` tokens, each behind `cached` others."""

    rows: int
    tokens: int
    cached: int = 0


class Shape:
    """A model of which only the config is known.

    Raises:
        UserError: the config cannot be read, or transformers cannot build a model from it.
    """

    def __init__(self, config: ModelConfig):
        source = str(TINY_POLICY) if config.model == "new" else config.base
        is_here = config.base_path is not None or config.model == "new" or must_be_cached("model", config.base)
        self.config = read_config(source, is_here)
        self.text = self.config.get_text_config()
        self.layers = self.text.num_hidden_layers
        self.attention = config.attn_implementation
        if config.device == "cpu":  # as make_policy does: grouped keys are not repeated
            os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
        with torch.device("meta"):
            model, one, two = (self.build(num_layers) for num_layers in (None, 1, 2))
        self.num_parameters = model.num_parameters()
        self.in_layers = self.layers * (two.num_parameters() - one.num_parameters())
        self.largest = max(weight.numel() for weight in model.parameters())
        self.vocabulary, self.hidden = model.get_input_embeddings().weight.shape
        head = model.get_output_embeddings()
        linear = [module for module in model.modules() if _is_linear(module) and module is not head]
        self.in_linear = sum(module.weight.numel() for module in linear)
        self.ends_of_linear = sum(sum(module.weight.shape) for module in linear)  # inputs and outputs

    def build(self, num_layers: int | None = None, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
        """The model with random weights, or one with its first layers only."""
        from transformers import AutoModelForCausalLM

        config = copy.deepcopy(self.config)
        text = config.get_text_config()
        if num_layers is not None:
            text.num_hidden_layers = num_layers
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[:num_layers]
        try:
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=self._implementation)
        except Exception as error:  # transformers raises many kinds
            raise UserError(
                f"--estimate: no model can be built from this config: {' '.join(str(error).split())}"
            ) from error

    @property
    def _implementation(self) -> str:
        """FlashAttention runs on no tensor without data; what it keeps is what sdpa keeps."""
        return "eager" if self.attention == "eager" else "sdpa"

    def adapter_parameters(self, rank: int) -> int:
        """Of LoRA on every linear layer but the head: rank (inputs + outputs) each."""
        return rank * self.ends_of_linear

    @cached_property
    def cache_values(self) -> int:
        """Numbers that the key-value cache holds for one token, over all layers."""
        heads = getattr(self.text, "num_key_value_heads", None) or self.text.num_attention_heads
        size = getattr(self.text, "head_dim", None) or self.text.hidden_size // self.text.num_attention_heads
        return 2 * self.layers * heads * size

    @cached_property
    def repeats(self) -> int:
        """Query heads per key-value head."""
        heads = self.text.num_attention_heads
        return heads // (getattr(self.text, "num_key_value_heads", None) or heads)

    def kept(self, passes: tuple[Pass, ...], autocast: bool, lora_rank: int) -> tuple[float, float]:
        """Bytes that forward passes keep for the backward pass: those of all layers, and those of one layer."""
        one, two = (self._kept_by(num_layers, passes, autocast, lora_rank) for num_layers in (1, 2))
        return one + (self.layers - 1) * (two - one), two - one

    def _kept_by(self, num_layers: int, passes: tuple[Pass, ...], autocast: bool, lora_rank: int) -> int:
        kept: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        frozen = torch.bfloat16 if autocast and lora_rank else torch.float32
        with torch.device("meta"):
            model = self.build(num_layers, frozen)
            model = add_adapter(model, lora_rank) if lora_rank else model
        with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            _imagine(model)
            decoder = model.get_decoder()
            weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                for each in passes:
                    _run(decoder, each)
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in kept}
        return sum(size for place, size in storages.items() if place not in weights)


def _imagine(model: torch.nn.Module) -> None:
    """Replace tensors that are on no device by those of a CPU, of the same shapes; `FakeTensorMode` leaves out data."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                empty = torch.empty(weight.shape, dtype=weight.dtype)
                module._parameters[name] = torch.nn.Parameter(empty, requires_grad=weight.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _run(decoder: torch.nn.Module, each: Pass) -> None:
    from transformers import DynamicCache

    cache = DynamicCache()
    if each.cached:
        text = decoder.config
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        for layer in range(text.num_hidden_layers):
            states = (torch.zeros(each.rows, heads, each.cached, size, requires_grad=True) for _ in range(2))
            cache.update(*(state * 1 for state in states), layer)  # times 1: a copy that counts, as of shared prompts
    ids = torch.zeros(each.rows, each.tokens, dtype=torch.long)
    if not each.cached:
        decoder(ids, use_cache=False)
        return
    mask = torch.ones(each.rows, each.cached + each.tokens, dtype=torch.long)
    decoder(input_ids=ids, attention_mask=mask, position_ids=ids, past_key_values=cache, use_cache=True)


def rank_of(config: ModelConfig) -> int:
    """The rank of the adapter that is trained; 0: all weights are."""
    rank = getattr(config, "lora_rank", 0)
    if rank or config.adapter_path is None:
        return rank
    return int(json.loads((config.adapter_path / ADAPTER_SETTINGS).read_text(encoding="utf-8")).get("r", 8))


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"  # of GPT-2
