"""Save a policy as a Hugging Face directory, and read it back."""

import warnings
from pathlib import Path

import torch

from common.policy import Policy

from common.plumbing.config import DTYPES, PolicyConfig


def save_policy(policy: Policy, path: Path) -> None:
    """Write a Hugging Face directory that `from_pretrained` loads; with LoRA that of the adapter, for peft."""
    # "auto" would ask the hub whether the vocabulary has grown
    options = {"save_embedding_layers": False} if is_lora(policy) else {}
    policy.model.save_pretrained(path, **options)
    policy.tokenizer.save_pretrained(path)


def load_weights(policy: Policy, path: Path) -> None:
    """Read back what `save_policy` has written."""
    if is_lora(policy):
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        set_peft_model_state_dict(policy.model, load_file(path / "adapter_model.safetensors"))
        return
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    policy.model.load_state_dict(saved.state_dict())


def save_merged(config: PolicyConfig, adapter: Path, path: Path) -> None:
    """Add a saved LoRA adapter to the weights that it was trained on, and write them as a model of its own.

    The weights are read anew, unquantised: to add to quantised ones would round what was learned.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = str(config.model_path or config.model)
    base = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[config.dtype], local_files_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # as in make_policy
        model = PeftModel.from_pretrained(base, adapter)
    model.merge_and_unload().save_pretrained(path)
    AutoTokenizer.from_pretrained(adapter).save_pretrained(path)


def is_lora(policy: Policy) -> bool:
    return getattr(policy.model, "peft_config", None) is not None
