"""Which rows are run together: complete groups, and parts of what did not fit in memory."""

from itertools import groupby, pairwise
from typing import TypeVar

from common.fast.auto_size import AutoSize

T = TypeVar("T")


def in_groups(items: list[T], size: int, numbers: range | None = None) -> list[list[T]]:
    """Items with consecutive numbers, by group of `size` numbers; the first and the last one can be parts of groups.

    >>> in_groups(list("abcde"), 2, range(3, 8))
    [['a'], ['b', 'c'], ['d', 'e']]
    """
    paired = groupby(zip(numbers or range(len(items)), items, strict=True), lambda pair: pair[0] // size)
    return [[item for _, item in group] for _, group in paired]


def divided(batches: list[list[T]], size: int | None) -> list[list[T]]:
    """The batches in parts of at most `size.now` rows, of equal length up to one row, if the size is automatic.

    >>> divided([[1, 2, 3, 4, 5], [6]], AutoSize(3)), divided([[1, 2, 3, 4, 5]], 3)
    ([[1, 2, 3], [4, 5], [6]], [[1, 2, 3, 4, 5]])
    """
    if not isinstance(size, AutoSize):
        return list(batches)
    parts = []
    for rows in batches:
        num_parts = -(-len(rows) // size.now)
        ends = [-(-len(rows) * part // num_parts) for part in range(num_parts + 1)]
        parts += [rows[start:end] for start, end in pairwise(ends)]
    return parts
