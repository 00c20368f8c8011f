"""Keys and values of rows from turn to turn: a row's next turn runs only the tokens that it has gained.

What is kept belongs to the weights that it was computed with, hence to one rollout. What it saves is measured in
experiment_multiturn_tool_calling/README.md.

Shapes: U rows of at most T tokens; keys and values are (heads, tokens, head size) per row and layer.
"""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from common.fast.cache import RowCache
    from common.trajectory import Trajectory


class KeptRows:
    """What the cache held of some rows when their turns ended."""

    def __init__(self):
        # By the row's identity. The row is kept as well, so that no other one can get its identity.
        self._kept: dict[int, tuple[Trajectory, list[tuple[torch.Tensor, torch.Tensor]]]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, rows: "list[Trajectory]", cache: "RowCache", ended: torch.Tensor, mask: torch.Tensor) -> None:
        """Keep `rows`, which are those of the cache where `ended` is true, without what `mask` tells to be padding."""
        indices, lengths = ended.nonzero()[:, 0].tolist(), mask[ended].sum(dim=1).tolist()
        for row, index, length in zip(rows, indices, lengths, strict=True):
            states = [[x[index, :, -length:].clone() for x in (layer.keys, layer.values)] for layer in cache.layers]
            self._kept[id(row)] = row, states

    def fill(self, cache: "RowCache", rows: "list[Trajectory]") -> int:
        """Move the beginnings of `rows` into an empty cache, as if their ids had been left-padded to T and run up to
        one position. Whatever else is kept is forgotten, so that there is never more than one batch of it.

        That position is the same in all rows, and the row that has gained the most tokens decides where it is. The
        others will run some of their known tokens again, instead of padding: so no row has a gap, which would put its
        tokens further apart than a sliding window takes them to be.

        Returns:
            The position: how many of the T tokens the cache then holds. 0 if nothing is known of one of the rows.
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
