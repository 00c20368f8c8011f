"""Writes a policy's weights as a folder that an inference engine can load."""

import copy
import json
import shutil
from pathlib import Path

import torch

from common.parallel import is_main
from common.policy import Policy


@torch.no_grad()
def export(policy: Policy, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the policy's model as a Hugging Face directory, with any adapter merged and with a separate LM head.

    Tied embeddings are written twice, because not every engine ties them again when it loads a new checkpoint into a
    running server: vLLM 0.32 on a CPU kept the old head, without an error. The folder is replaced rather than
    overwritten file by file: the engine may still have the old files open.
    """
    has_adapter = getattr(policy.model, "peft_config", None) is not None
    model = policy.model.get_base_model() if has_adapter else policy.model
    weights = merged_weights(model, dtype) if has_adapter else model.state_dict()
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    weights[f"{head}.weight"] = weights[f"{head}.weight"].clone()
    shutil.rmtree(folder, ignore_errors=True)
    shell = copy.copy(model)  # describes the weights that are written, not the ones that they are computed from
    shell.hf_quantizer, shell.config = None, _untied(model.config)
    # in CPU memory: a GPU may have no room for another copy
    shell.save_pretrained(folder, state_dict={name: weight.to("cpu", dtype) for name, weight in weights.items()})
    shell.config.dtype = dtype  # only now: save_pretrained wrote the model's own dtype
    shell.config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


@torch.no_grad()
def export_divided(policy: Policy, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """`export` of weights that are divided over ranks: each is gathered, written and freed before the next one.

    All ranks call it together, and the main one writes. A safetensors file is the length of a header in JSON, the
    header, and the values of one tensor after the other. The library can only write a file that fits in memory.
    """
    weights, header, end = policy.model.state_dict(), {}, 0  # a tied LM head is listed, and written, again
    for name, weight in weights.items():
        start, end = end, end + weight.numel() * dtype.itemsize
        kind = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
        header[name] = {"dtype": kind, "shape": list(weight.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    whole = (weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in weights.values())
    try:
        if is_main():
            shutil.rmtree(folder, ignore_errors=True)
            config = _untied(policy.model.config)
            config.dtype = dtype
            config.save_pretrained(folder)
            policy.tokenizer.save_pretrained(folder)
            with (folder / "model.safetensors").open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                for weight in whole:
                    file.write(weight.to("cpu", dtype).contiguous().flatten().view(torch.uint8).numpy())
    finally:
        for _ in whole:  # after an error, too: the other ranks gather all
            pass


def _untied(config):
    """A copy of a model's config that says that embedding and LM head are separate, and nothing quantised."""
    config = copy.deepcopy(config)
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def merged_weights(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights of a model with injected adapters, under the names that they have without: W + (alpha / r) B A.

    Quantised weights are unpacked, so that a sum equals the weights that its layer uses, up to rounding. A sum is
    computed in float32 and kept as `dtype` in CPU memory.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils.integrations import dequantize_module_weight

    adapters = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, LoraLayer))
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith(adapters)}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            layer = module.get_base_layer()
            updates = [module.get_delta_weight(adapter).float() for adapter in module.active_adapters]
            merged = sum(updates, dequantize_module_weight(layer).float())
            weights[f"{name}.weight"] = merged.to("cpu", dtype)
            if getattr(layer, "bias", None) is not None:
                weights[f"{name}.bias"] = layer.bias
    return weights
