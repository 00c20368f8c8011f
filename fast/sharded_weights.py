"""Gather sharded weights on every rank for a while, to sample with them or to save them.

Gathering the weights at every decode step would take a message to all ranks per token and layer, and a rank whose
completions have ended would leave the others waiting. So they are gathered once before a rollout, which takes the
memory of the whole model on each rank.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed, nn

GATHERED = "gathered_weights"  # marks DeepSpeed's weights while they are gathered


@contextmanager
def gathered_weights(policy: nn.Module) -> Iterator[None]:
    """Inside this context, every rank holds all weights of a policy, instead of a shard.

    Forward passes inside need no messages between ranks, so each rank can make any number of them. All ranks must enter
    and leave together. It does nothing if the weights are not sharded or are already gathered. It supports shards of
    FSDP2 (torch's `fully_shard`) and of DeepSpeed's ZeRO-3.
    """
    partitioned = [weight for weight in policy.parameters() if hasattr(weight, "ds_id")]  # by ZeRO-3
    with _gathered_by_deepspeed(policy, partitioned) if partitioned else _gathered_by_fsdp(policy):
        yield


@contextmanager
def _gathered_by_fsdp(policy: nn.Module) -> Iterator[None]:
    if not distributed.is_initialized():
        yield
        return
    from torch.distributed.fsdp import FSDPModule  # takes half a second, which one process need not wait for

    modules = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    states = [module._get_fsdp_state() for module in modules]  # torch has no public API for this
    groups = [group for state in states if (group := state._fsdp_param_group)]
    if all(group.is_unsharded and group.post_forward_mesh_info is None for group in groups):
        yield  # nothing is sharded, or this context is inside another one
        return
    for state in states:
        state._lazy_init()  # the first module becomes the root; it would be a layer if a layer were called first
    after_forward = [group.post_forward_mesh_info for group in groups]
    for module in modules:
        module.unshard()
    for group in groups:
        group.post_forward_mesh_info = None  # keep the weights after a forward pass
    try:
        yield
    finally:
        for group, mesh_info in zip(groups, after_forward, strict=True):
            group.post_forward_mesh_info = mesh_info
        for module in modules:
            module.reshard()


@contextmanager
def _gathered_by_deepspeed(policy: nn.Module, weights: list[nn.Parameter]) -> Iterator[None]:
    from deepspeed import zero

    modules = list(policy.modules())
    hooks = [(module._forward_pre_hooks, module._forward_hooks) for module in modules]
    if GATHERED in weights[0].ds_active_sub_modules:
        yield
        return
    with zero.GatheredParameters(weights):
        weights[0].ds_active_sub_modules.add(GATHERED)
        for module in modules:  # their hooks free weights after use, and compare the order of modules between ranks
            module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
        try:
            yield
        finally:
            for module, (before, after) in zip(modules, hooks, strict=True):
                module._forward_pre_hooks, module._forward_hooks = before, after
            weights[0].ds_active_sub_modules.discard(GATHERED)


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """The whole weights, by name, of a model that is sharded over the ranks; None if every rank has the whole model.

    All ranks call it together. A weight that the model uses twice, such as tied embeddings, is one tensor here too.
    FSDP2's weights are gathered one by one, and kept only in the main process's CPU memory.
    """
    weights = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    if any(hasattr(weight, "ds_id") for weight in model.parameters()):
        with gathered_weights(model):
            whole = {id(weight): weight.detach().clone() for weight in model.parameters()}
    elif any(hasattr(weight, "full_tensor") for weight in model.parameters()):  # DTensor's
        whole = {}
        for weight in model.parameters():
            if hasattr(weight, "full_tensor"):
                gathered = weight.detach().full_tensor()
                whole[id(weight)] = gathered.cpu() if distributed.get_rank() == 0 else gathered.new_empty(0)
    else:
        return None
    return {name: whole.get(id(weights[name]), value) for name, value in model.state_dict().items()}
