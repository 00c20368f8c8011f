"""Hugging Face Accelerate: the processes that it finds, their devices and arithmetic, and its checkpoints."""

import dataclasses
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from torch.nn.parallel import DistributedDataParallel

from common.errors import UserError
from common.parallel import world_size
from common.policy import Policy

from common.plumbing.config import ConfigT
from common.plumbing.ranks import together
from common.plumbing.saving import load_weights, save_policy

PATIENCE = timedelta(hours=1)  # for which a process waits for the others: for the longest rollout, or a slow disk
SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)


def start_accelerator(config: ConfigT) -> tuple[ConfigT, Accelerator]:
    """Meet the other processes that a launcher has started; the settings with the device of this one.

    Raises:
        UserError: Accelerate gives something else than was asked for, or the processes cannot share the work equally.
    """
    accelerator = Accelerator(cpu=config.device == "cpu", kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)])
    with together():
        check_divides("--prompts-per-step", config.prompts_per_step, "prompts")
    if accelerator.distributed_type not in SHARDED:
        accelerator.register_save_state_pre_hook(_save)
        accelerator.register_load_state_pre_hook(_load)
    device = "cpu" if accelerator.device.type == "cpu" else str(accelerator.device)
    dtype = "bfloat16" if accelerator.mixed_precision == "bf16" else config.dtype
    return dataclasses.replace(config, device=device, dtype=dtype), accelerator


def check_divides(name: str, count: int, what: str) -> None:
    """
    Raises:
        UserError: the processes cannot have equal parts.
    """
    if count % world_size():
        raise UserError(
            f"{name}: {count} {what} cannot be divided among {world_size()} processes: use a multiple of "
            f"{world_size()}, or another number of processes"
        )


def _save(models: list[torch.nn.Module], weights: list[dict], path: str) -> None:
    """Write the policy as a Hugging Face directory, instead of the weights as Accelerate would write them."""
    for model in models:
        save_policy(_policy_in(model), Path(path))
    weights.clear()


def _load(models: list[torch.nn.Module], path: str) -> None:
    while models:  # what is left here, Accelerate would read itself
        load_weights(_policy_in(models.pop()), Path(path))


def _policy_in(model: torch.nn.Module) -> Policy:
    return model.module if isinstance(model, DistributedDataParallel) else model
