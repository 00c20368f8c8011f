"""Keys and values of rows whose turn has ended: the next turn of a row runs only the tokens that it has gained.

What is kept was computed with the weights that the policy had then. So this belongs to one rollout: it is made anew for
each, and given to all turns of the same rows.

Shapes: U rows of at most T tokens; keys and values are (heads, tokens, head size) per row and layer.
"""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from common.fast.cache import RowCache
    from common.trajectory import Trajectory


class KeptRows:
    """What the cache held of some rows when their turns ended, without padding."""

    def __init__(self):
        # Rows are told apart as objects; each is kept with its tensors, so that no other object can get its id.
        self._kept: dict[int, tuple[Trajectory, list[tuple[torch.Tensor, torch.Tensor]]]] = {}

    def put(self, rows: "list[Trajectory]", cache: "RowCache", indices: list[int], lengths: list[int]) -> None:
        """Keep `rows`, which are the rows `indices` of the cache, each with the last `lengths` tokens of it."""
        for row, index, length in zip(rows, indices, lengths, strict=True):
            states = [(layer.keys[index, :, -length:].clone(), layer.values[index, :, -length:].clone())
                      for layer in cache.layers]  # fmt: skip
            self._kept[id(row)] = row, states

    def discard_others(self, rows: "list[Trajectory]") -> None:
        """Forget all rows but these."""
        wanted = {id(row) for row in rows}
        self._kept = {key: entry for key, entry in self._kept.items() if key in wanted}

    def fill(self, cache: "RowCache", rows: "list[Trajectory]") -> int:
        """Put what is known of `rows` into an empty cache, as if their ids had been padded on the left to T and run.

        All rows continue at the same position. The row that has gained the most tokens decides which: the others run
        some of their known ones again, which costs no more than the padding that would stand there.

        Returns:
            The number of tokens that the cache holds, of T: 0 if nothing is known of one of the rows.
        """
        entries = [self._kept.get(id(row)) for row in rows]
        if not rows or None in entries:
            return 0
        width = max(len(row.ids) for row in rows)
        num_new = max(len(row.ids) - _num_tokens(states) for row, states in entries)
        start = width - num_new
        if start <= 0:
            return 0
        for number, (keys, _) in enumerate(entries[0][1]):
            heads, _, size = keys.shape
            padded = [keys.new_zeros(len(rows), heads, start, size) for _ in range(2)]
            for index, (row, states) in enumerate(entries):
                length = len(row.ids) - num_new
                if length > 0:
                    for target, source in zip(padded, states[number], strict=True):
                        target[index, :, start - length :] = source[:, :length]
            cache.update(*padded, number)
        return start


def _num_tokens(states: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
    return states[0][0].shape[1]
