"""Save a policy as a Hugging Face directory, and read it back."""

import shutil
from pathlib import Path

import torch

from common.policy import Policy
from fast.sharded_weights import whole_weights

from harness.base.config import DTYPES, PolicyConfig, find_directory, read_base
from harness.base.ranks import on_main
from harness.models.adapters import is_lora, load_adapter
from harness.models.pretrained import read_model

CRITIC = "critic.safetensors"  # beside the policy's files, which load without it


def save_policy(policy: Policy, path: Path) -> None:
    """Write a Hugging Face directory, with LoRA of the adapter: all processes call it, and the main one writes."""
    weights = whole_weights(policy.model)
    # "auto" would ask the hub whether the vocabulary has grown
    options = {"save_embedding_layers": False} if is_lora(policy) else {}
    options |= {} if weights is None else {"state_dict": weights}
    on_main(lambda: (policy.model.save_pretrained(path, **options), policy.tokenizer.save_pretrained(path)))
    if _has_critic(policy):
        from safetensors.torch import save_file

        weights = whole_weights(policy.critic) or policy.critic.state_dict()
        trained = {name for name, weight in policy.critic.named_parameters() if weight.requires_grad}
        on_main(lambda: save_file({name: weights[name].contiguous() for name in trained}, path / CRITIC))


def _has_critic(policy: Policy) -> bool:
    from common.critic import ActorCritic  # not at the top: only PPO has one

    return isinstance(policy, ActorCritic)


def load_weights(policy: Policy, path: Path) -> None:
    """Read back a directory that `save_policy` wrote."""
    from safetensors.torch import load_file

    if _has_critic(policy):
        policy.critic.load_state_dict(load_file(path / CRITIC), strict=False)  # without weights that are not trained
    if is_lora(policy):
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(policy.model, load_file(path / "adapter_model.safetensors"))
        return
    saved = read_model(str(path), torch.float32, local_files_only=True, auto=type(policy.model))
    policy.model.load_state_dict(saved.state_dict())


def save_merged(adapter: Path, path: Path, tokenizer, dtype: torch.dtype) -> None:
    """Merge a saved adapter into a freshly read base: adding to quantised weights would round the training away."""
    base = read_base(adapter)
    model = read_model(str(find_directory(base) or base), dtype, local_files_only=True)
    load_adapter(model, adapter).merge_and_unload().save_pretrained(path)
    tokenizer.save_pretrained(path)


def save_base(config: PolicyConfig, policy: Policy, path: Path) -> None:
    """Write the base of a new adapter if the adapter of `--model` was merged into it, and record its path."""
    if config.adapter_path is None or not config.lora_rank:
        return
    path = path.resolve()
    if not path.exists():
        partial = path.with_name(f"{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        save_merged(config.adapter_path, partial, policy.tokenizer, DTYPES[config.dtype])
        partial.rename(path)
    policy.model.peft_config["default"].base_model_name_or_path = str(path)
