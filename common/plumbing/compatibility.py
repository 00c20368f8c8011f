"""Whether a model can be trained here: what it is checked for once it is loaded, before anything slow happens."""

import torch

from common.errors import UserError

from common.plumbing.config import PolicyConfig, shown


def check_quantisation(model: torch.nn.Module, config: PolicyConfig) -> None:
    """
    Raises:
        UserError: the weights were quantised when they were saved, and the settings ask for what needs other ones.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if not getattr(model, "is_quantized", False) or not quantizer.pre_quantized:
        return
    stored = quantizer.quantization_config
    load_in = next((bits for bits in ("4bit", "8bit") if getattr(stored, f"load_in_{bits}", False)), None)
    kind = load_in or getattr(stored.quant_method, "value", stored.quant_method)
    given = f"--model {shown(config.model)}: the weights of {config.base} are already quantised ({kind})"
    if not config.trains_adapter:
        raise UserError(f"{given} and cannot be trained: add an adapter, --lora-rank 16 for example")
    if config.load_in not in (None, load_in):
        raise UserError(f"{given}: omit --load-in {config.load_in}, or use a model that is not quantised")
    if config.save_merged:
        raise UserError(f"{given}, and an adapter cannot be merged into them: omit --save-merged")
    if config.adapter_path is not None and config.lora_rank:
        raise UserError(f"{given}, and an adapter cannot be merged into them: omit --lora-rank")
    if load_in == "8bit" and config.dtype == "float32":
        raise UserError(f"{given} and compute in half precision: use --dtype bfloat16")
