"""Batch sizes that are chosen automatically, and halved where memory runs out: `--micro-batch-size auto`.

The rows of a batch do not depend on one another, so a smaller batch gives the same results, up to rounding.
"""

import errno
import gc
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from common.fast.matmul import NO_KERNEL

T = TypeVar("T")
# What PyTorch calls an allocation that has failed, where it raises a RuntimeError and no OutOfMemoryError: its own
# allocators, C++'s, and cuBLAS, which allocates past them.
WORDS = ("DefaultCPUAllocator", "out of memory", "std::bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED")


class AutoSize(int):
    """A number of rows that was chosen automatically. As a number it is the first choice; `now` is what is used.

    A copy of it, and what is pickled of it, is a plain number: what is used at that time.

    >>> size = AutoSize(8)
    >>> size.halve(MemoryError()), size.now, size.halve(ValueError()), size
    (True, 4, False, 8)
    """

    def __init__(self, _: int):
        self.now = int(self)
        self.on_change: Callable[[int], None] | None = None  # is told of a new size, with the one before

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (self.now,)

    def halve(self, error: BaseException, num_rows: int | None = None) -> bool:
        """Halve it, rounded up, if `error` says that memory has run out; False if it does not, or if it is 1.

        Args:
            num_rows: how many rows were run, if these were fewer: then it becomes half of them.
        """
        used = min(self.now, self.now if num_rows is None else num_rows)
        if used == 1 or not is_out_of_memory(error):
            return False
        before, self.now = self.now, (used + 1) // 2
        if self.on_change is not None:
            self.on_change(before)
        return True


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, that of a device or that of the machine."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and (str(error) == NO_KERNEL or any(word in str(error) for word in WORDS))


def rows_now(size: int) -> int:
    """
    >>> rows_now(AutoSize(8)), rows_now(4)
    (8, 4)
    """
    return size.now if isinstance(size, AutoSize) else size


def fits(size: int | None, num_rows: int | None, call: Callable[..., object], *arguments: object) -> bool:
    """Call; False if memory ran out and `size`, an automatic one, has been halved. Whatever the call held is freed.

    Args:
        num_rows: see `AutoSize.halve`.
    """
    try:
        call(*arguments)
        return True
    except Exception as error:
        if not isinstance(size, AutoSize) or not size.halve(error, num_rows):
            raise
    free_memory()  # not above: the error's traceback holds the tensors of the call
    return False


def run_all(batches: Callable[[int], Iterable[T]], size: int, call: Callable[[T], None]) -> None:
    """Call with every one of `batches(size)`; where memory runs out, all of them again in the halved size."""

    def run() -> None:
        for batch in batches(rows_now(size)):
            call(batch)

    while not fits(size, None, run):
        pass


def free_memory() -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
