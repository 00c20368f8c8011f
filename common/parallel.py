"""Processes that train together. Each is called a rank; a process that was started alone is rank 0 of 1."""

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

T = TypeVar("T")


def rank() -> int:
    """The number of this process; 0 is the main process, the only one that writes and prints."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def is_main() -> bool:
    return rank() == 0


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


def clip_grad_norm_(parameters, max_norm: float) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor] | None:
    """The weights of a model that is sharded over the ranks, whole, by name; None if every rank has all of it."""
    if not any(isinstance(weight, DTensor) for weight in model.parameters()):
        return None
    return {
        name: weight.full_tensor() if isinstance(weight, DTensor) else weight
        for name, weight in model.state_dict().items()
    }
