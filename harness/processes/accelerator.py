"""Hugging Face Accelerate: its processes, their devices and arithmetic.

With DeepSpeed, `accelerator.backward` of the last micro-batch reduces the gradient, clips it and takes the step; the
prepared optimizer's own methods do nothing. Under ZeRO-3, calling a submodule gathers its weights, which sends a
message to all ranks: each rank must make the same calls in the same order, or the launch hangs.
"""

import copy
import math
import sys

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from common import parallel
from common.errors import UserError
from common.policy import Policy

from harness.base.config import PolicyConfig
from harness.base.ranks import together
from harness.processes import processes
from harness.processes.data_parallel import exclude_frozen, in_8_bits

QUANTISED = (
    "FSDP2 cannot shard quantised weights: use recipes/accelerate_configs/multi_gpu.yaml, with all of them on each GPU"
)


def start_accelerator(config: PolicyConfig) -> Accelerator:
    """Connect to the launcher's other processes as Accelerate is told to."""
    asked = processes.requested_launch()
    on_cpu, by_deepspeed = config.device == "cpu", asked.sharding == "deepspeed"
    if processes.num_restarts():  # Accelerate would look for the old addresses; it accepts processes that are connected
        processes.meet(config.device)
    # With cpu=True Accelerate would ignore DeepSpeed, and without a backend it would ignore the other processes
    backend = "gloo" if on_cpu and by_deepspeed else None
    handlers = [InitProcessGroupKwargs(timeout=processes.PATIENCE, backend=backend)]
    with processes.meeting():
        accelerator = Accelerator(cpu=on_cpu and not by_deepspeed, kwargs_handlers=handlers)
    with together():
        processes.check_launch(asked, accelerator)
        optimizer = getattr(config, "optimizer", "adamw")
        if optimizer != "adamw" and asked.sharding is not None:
            raise UserError(f"--optimizer {optimizer} needs whole weights: use a configuration without sharding")
        if config.load_in is not None and asked.sharding == "fsdp":  # Accelerate keeps them whole; checkpoints fail
            raise UserError(f"--load-in {config.load_in}: {QUANTISED}")
        processes.check_parts(config)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _fill_deepspeed(accelerator, config.micro_batch_size, config.max_grad_norm)
    elif accelerator.distributed_type == DistributedType.FSDP and accelerator.mixed_precision == "bf16":
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(  # log-probs and sums keep float32
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    accelerator.has_8bit_moments = optimizer == "adamw_8bit"  # for `prepare`
    return accelerator


def prepare(
    accelerator: Accelerator, policy: Policy, optimizer: torch.optim.Optimizer
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """`accelerator.prepare`, also for a policy that is sharded."""
    if accelerator.distributed_type == DistributedType.FSDP and getattr(policy.model, "is_quantized", False):
        raise UserError(f"--model: {QUANTISED}")
    exclude_frozen(policy)  # also a critic's
    policy._no_split_modules = policy.model._no_split_modules  # the layers, which FSDP gathers one by one
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        policy.compute_device = accelerator.device
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        policy.max_logits = sys.maxsize  # under ZeRO-3 so is each call of the LM head
    if getattr(accelerator, "has_8bit_moments", False):  # not of one that a test has made
        optimizer = in_8_bits(optimizer)
    return accelerator.prepare(policy, optimizer)


def sharded_copy(policy: Policy) -> Policy:
    """A frozen copy of the policy in parts, as `prepare` makes them; layer by layer, so that it is never whole."""
    empty = {id(weight): nn.Parameter(weight.to("meta"), requires_grad=False) for weight in policy.parameters()}
    weights, frozen = {id(empty[id(w)]): w for w in policy.parameters()}, copy.deepcopy(policy, empty)
    state = AcceleratorState()
    mesh = init_device_mesh(state.device.type, (state.num_processes,))
    layers = [module for module in frozen.model.modules() if type(module).__name__ in frozen.model._no_split_modules]
    for module in (*layers, frozen):
        copies = {}  # of this layer; tied weights stay one
        for part in module.modules():
            for name, weight in part.named_parameters(recurse=False):
                if weight.is_meta:
                    whole = nn.Parameter(weights[id(weight)].detach().clone(), requires_grad=False)
                    setattr(part, name, copies.setdefault(id(weight), whole))
        fully_shard(module, mesh=mesh, mp_policy=state.fsdp_plugin.mixed_precision_policy or MixedPrecisionPolicy())
    return frozen


def clip_grad_norm_(accelerator: Accelerator, model: torch.nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradient down to `max_norm`; returns the norm before, equal on all ranks under any sharding."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:  # it has already clipped and taken its step
        # or skipped it, if the gradient is not finite on one of the ranks
        return torch.tensor(float(model.get_global_grad_norm()) if model.was_step_applied() else math.inf)
    return parallel.clip_grad_norm_(model.parameters(), max_norm)


def _fill_deepspeed(accelerator, micro_batch_size: int, max_grad_norm: float) -> None:
    """Fill in what DeepSpeed must know. Call it right after `Accelerator(...)`, before the policy is loaded.

    Without the first lines `accelerator.prepare` asks for a dataloader, and DeepSpeed clips at Accelerate's default of
    1. The weights stay float32, whatever `mixed_precision` is: the policy runs its own bfloat16 autocast over them.
    """
    from transformers.integrations import unset_hf_deepspeed_config

    settings = accelerator.state.deepspeed_plugin.deepspeed_config
    settings.pop("train_batch_size", None)  # DeepSpeed computes the product itself
    settings["train_micro_batch_size_per_gpu"] = micro_batch_size  # used only in its own reports
    settings["gradient_accumulation_steps"] = 1  # it would divide the loss by this
    settings["gradient_clipping"] = max_grad_norm
    settings["fp16"] = settings["bf16"] = {"enabled": False}
    # Under ZeRO-3 `from_pretrained` would now load empty shards, even with zero3_init_flag: false; the reference and
    # the evaluation before training need complete weights. `prepare` shards the policy.
    unset_hf_deepspeed_config()
