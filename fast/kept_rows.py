"""Keys and values of rows, kept from turn to turn: a row's next turn runs only its new tokens.

Kept values belong to the weights that computed them, hence to one rollout. experiment_multiturn_tool_calling/README.md
has measurements of the time saved.

Shapes: U rows of at most T tokens; keys and values are (heads, tokens, head size) per row and layer.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from fast.cache import RowCache


class Row(Protocol):
    ids: list[int]


class KeptRows:
    """The cached keys and values of some rows when their turns ended."""

    def __init__(self):
        # By the row's identity. The row is kept as well, so that no other row can get its identity.
        self._kept: dict[int, tuple[Row, list[tuple[torch.Tensor, torch.Tensor]]]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, rows: Sequence[Row], cache: "RowCache", ended: torch.Tensor, mask: torch.Tensor) -> None:
        """Keep `rows`, the rows of the cache where `ended` is true, without the padding, where `mask` is 0."""
        indices, lengths = ended.nonzero()[:, 0].tolist(), mask[ended].sum(dim=1).tolist()
        for row, index, length in zip(rows, indices, lengths, strict=True):
            states = [[x[index, :, -length:].clone() for x in (layer.keys, layer.values)] for layer in cache.layers]
            self._kept[id(row)] = row, states

    def fill(self, cache: "RowCache", rows: Sequence[Row]) -> int:
        """Move the beginnings of `rows` into an empty cache, as if their ids had been left-padded to T and run up to
        one position. All other kept rows are forgotten, so that at most one batch is ever kept.

        That position is the same in all rows; the row with the most new tokens decides it. The other rows run some of
        their known tokens again, instead of padding. So no row has a gap, which would put its tokens further apart than
        a sliding window assumes.

        Returns:
            The position: how many of the T tokens the cache then holds. 0 if one of the rows has not been kept.
        """
        kept, self._kept = self._kept, {}
        if not rows or any(id(row) not in kept for row in rows):
            return 0
        states = [kept[id(row)][1] for row in rows]
        num_new = max(len(row.ids) - x[0][0].shape[1] for row, x in zip(rows, states, strict=True))
        lengths = [max(len(row.ids) - num_new, 0) for row in rows]  # (U,) of the known tokens that are not run again
        position = max(lengths)
        for layer in range(len(states[0]) if position else 0):
            padded = []
            for kind in range(2):  # keys, values
                heads, _, size = states[0][layer][kind].shape
                padded.append(states[0][layer][kind].new_zeros(len(rows), heads, position, size))
                for target, x, length in zip(padded[kind], states, lengths, strict=True):
                    target[:, position - length :] = x[layer][kind][:, :length]
            cache.update(*padded, layer)
        return position
