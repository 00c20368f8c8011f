"""Processes that train together. Each is called a rank; a process that runs alone is rank 0 of 1."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import distributed, nn

T = TypeVar("T")

_tensor_size = 1  # more only in scale/mesh, see `split_tensors`


def rank() -> int:
    """The number of this process; 0 is the main process, the only one that writes and prints."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def is_main() -> bool:
    return rank() == 0


def world_size() -> int:
    """The number of processes."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def split_tensors(size: int) -> None:
    """From now on, each `size` adjacent ranks hold one copy of the model together: they have the same rows."""
    global _tensor_size
    _tensor_size = size


def data_rank() -> int:
    """The number of the part of the rows that this rank has; its own number, unless ranks split tensors."""
    return rank() // _tensor_size


def data_size() -> int:
    """The number of parts that the rows are divided into."""
    return world_size() // _tensor_size


def part_of(count: int) -> range:
    """This rank's part of `count` things in a row; the parts of all ranks, one after the other, are the whole.

    >>> part_of(5)  # alone
    range(0, 5)
    """
    return range(count * data_rank() // data_size(), count * (data_rank() + 1) // data_size())


def own_part(items: list[T]) -> list[T]:
    """This rank's part of a list, see `part_of`."""
    return [items[index] for index in part_of(len(items))]


def gather(value: T) -> list[T]:
    """The values of all ranks, in the order of the ranks; every rank gets them. Ranks with the same rows count once.

    Sums, means and maxima over ranks are computed from these values, on each rank in the same order, so with the same
    rounding.
    """
    return gather_all(value)[::_tensor_size]


def gather_all(value: T) -> list[T]:
    """The values of all ranks, also of those that have the same rows."""
    if world_size() == 1:
        return [value]
    values: list = [None] * world_size()
    distributed.all_gather_object(values, value)
    return values


def call_once(function: Callable[[], T], for_all: bool = False) -> T:
    """The result of a function, called by the first of the ranks that have the same rows, or with `for_all` of all.

    They agree on it even if it is random, and what costs money is paid once.
    """
    first = 0 if for_all else rank() - rank() % _tensor_size
    if world_size() == 1 or (_tensor_size == 1 and not for_all):
        return function()
    return gather_all(function() if rank() == first else None)[first]


def gather_rows(rows: list[T]) -> list[T]:
    """The rows of all ranks in one list, in the order of the ranks."""
    return [row for part in gather(rows) for row in part]


def in_step(items: Iterable[T], filler: T) -> list[T]:
    """The items of this rank, followed by `filler` until every rank has the same number of items.

    If each forward or backward pass is also a message to the other ranks, a rank with fewer passes than the others
    would leave them waiting forever.
    """
    items = list(items)
    return items + [filler] * (max(gather(len(items))) - len(items))


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale all gradients down to a norm of `max_norm`, if it is larger, as `torch.nn.utils.clip_grad_norm_` does.

    Each rank has only a part of the gradient of a sharded weight. The norm is computed over all parts: if each rank
    scaled by the norm of its part alone, the scales would differ, and the gradient would change its direction.

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
