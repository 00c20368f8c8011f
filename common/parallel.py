"""Processes that train together. Each is called a rank; a process that was started alone is rank 0 of 1."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import distributed, nn

T = TypeVar("T")
GATHERED = "gathered_weights"  # marks DeepSpeed's weights while they are


def rank() -> int:
    """0 is the main process: only it writes and prints."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def world_size() -> int:
    """The number of processes."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def part_of(count: int) -> range:
    """Of `count` things in a row, those of this rank; the parts of all ranks, one after the other, are all of them.

    >>> part_of(5)  # alone
    range(0, 5)
    """
    return range(count * rank() // world_size(), count * (rank() + 1) // world_size())


def gather(value: T) -> list[T]:
    """The values that all ranks give, in the order of the ranks; every rank gets them.

    Sums, means and maxima over ranks are taken from them: in the same order, and so with the same rounding, on each.
    """
    if world_size() == 1:
        return [value]
    values: list = [None] * world_size()
    distributed.all_gather_object(values, value)
    return values


def gather_rows(rows: list[T]) -> list[T]:
    """The rows of all ranks in one list, in the order of the ranks."""
    return [row for part in gather(rows) for row in part]


def in_step(items: Iterable[T], filler: T) -> list[T]:
    """The items of this rank, followed by `filler` until every rank has the same number of them.

    Where each forward or backward pass is also a message to the other ranks, a rank with fewer passes than the others
    would leave them waiting for good.
    """
    items = list(items)
    return items + [filler] * (max(gather(len(items))) - len(items))


@contextmanager
def gathered_weights(policy: nn.Module) -> Iterator[None]:
    """Inside, every rank holds all weights of a policy of which it otherwise holds a shard.

    No forward pass inside is a message to the other ranks, so each may make as many as it likes. To be entered and left
    by all ranks together. Does nothing where weights are not sharded or are gathered already. The shards are those of
    FSDP2 (torch's `fully_shard`), or of DeepSpeed's ZeRO-3.
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
    states = [module._get_fsdp_state() for module in modules]  # torch has no public way to what is asked of them here
    groups = [group for state in states for group in state._fsdp_param_groups]
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
    except BaseException:
        for module, state in zip(modules, states, strict=True):
            if state._is_root:
                module.reset_iter_state()  # a forward pass may not have come to its end
        raise
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


@contextmanager
def gathered_when_called(policy: nn.Module, method: str) -> Iterator[None]:
    """Inside, `policy.<method>(...)` gathers sharded weights as it needs them, layer by layer, as `policy(...)` does.

    Each call is thus a message to the other ranks, and all must make the same number of calls.
    """
    if not distributed.is_initialized():
        yield
        return
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    if method not in vars(policy):
        register_fsdp_forward_method(policy, method)  # otherwise weights outside of the layers would not be gathered
    try:
        yield
    finally:
        if isinstance(policy, FSDPModule):
            policy.reshard()  # the root's own weights stay whole after a forward pass


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale all gradients down so that their norm is `max_norm`, if it is more: `torch.nn.utils.clip_grad_norm_`.

    Of a sharded weight each rank has a part of the gradient. The norm is that of all parts: each rank's own would give
    it another scale, and so a gradient of another direction.

    Returns:
        The norm before: a tensor without dimensions, with the same value on all ranks.
    """
    by_mesh: dict[object, list[nn.Parameter]] = {}  # None: not sharded
    for weight in parameters:
        if weight.grad is not None:
            by_mesh.setdefault(getattr(weight.grad, "device_mesh", None), []).append(weight)
    norms = [nn.utils.get_total_norm([weight.grad for weight in weights]) for weights in by_mesh.values()]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    norm = norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)
    for weights in by_mesh.values():
        nn.utils.clip_grads_with_norm_(weights, max_norm, norm)
    return norm
