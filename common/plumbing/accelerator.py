"""Hugging Face Accelerate: the processes that it finds, their devices and arithmetic, and its checkpoints."""

import dataclasses
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from torch.nn.parallel import DistributedDataParallel

from common.policy import Policy

from common.plumbing.config import ConfigT
from common.plumbing.processes import PATIENCE, check_divides, meet, meeting, num_restarts
from common.plumbing.ranks import together
from common.plumbing.saving import load_weights, save_policy

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)


def start_accelerator(config: ConfigT) -> tuple[ConfigT, Accelerator]:
    """Meet the other processes that a launcher has started; the settings with the device of this one.

    Raises:
        UserError: Accelerate gives something else than was asked for, or the processes cannot share the work equally.
    """
    handlers = [InitProcessGroupKwargs(timeout=PATIENCE)]
    if num_restarts():  # Accelerate would look for the addresses of before; it takes processes that have met
        is_on_cpu = config.device == "cpu" or not torch.cuda.is_available()
        meet("gloo" if is_on_cpu else "cpu:gloo,cuda:nccl")
    with meeting():
        accelerator = Accelerator(cpu=config.device == "cpu", kwargs_handlers=handlers)
    with together():
        check_divides("--prompts-per-step", config.prompts_per_step, "prompts")
    if accelerator.distributed_type not in SHARDED:
        accelerator.register_save_state_pre_hook(_save)
        accelerator.register_load_state_pre_hook(_load)
    device = "cpu" if accelerator.device.type == "cpu" else str(accelerator.device)
    dtype = "bfloat16" if accelerator.mixed_precision == "bf16" else config.dtype
    return dataclasses.replace(config, device=device, dtype=dtype), accelerator


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
