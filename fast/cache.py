"""A preallocated key-value cache for sampling: appending a token writes one token, and dropping a row costs little.

transformers' DynamicCache copies all keys and values for every token that is appended, and again whenever rows are
dropped. Here tokens are written into memory that is already allocated, and the last rows move into the positions of
rows that have ended.
"""

import torch
from transformers.cache_utils import Cache, DynamicLayer

GROW_BY = 32  # when memory is full, larger tensors are allocated, with room for this many more tokens


class RowCache(Cache):
    """Keys and values of some rows, each of shape (rows, heads, tokens, head size) in every layer."""

    def __init__(self):
        super().__init__(layer_class_to_replicate=_Layer)

    def drop_rows(self, ended: torch.Tensor) -> torch.Tensor:
        """Drop the rows where `ended` (rows,) is true.

        Returns:
            (remaining,) the former indices of the remaining rows, in their new order.
        """
        num_remaining = int((~ended).sum())
        gaps = ended[:num_remaining].nonzero()[:, 0]
        movers = (~ended[num_remaining:]).nonzero()[:, 0] + num_remaining
        for layer in self.layers:
            layer.move_rows(movers, gaps, num_remaining)
        order = torch.arange(num_remaining, device=ended.device)
        order[gaps] = movers
        return order


class _Layer(DynamicLayer):
    """`keys` and `values` are views of the first rows and tokens of larger tensors, `_room`."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Append tokens: (rows, heads, new tokens, head size) each; returns all keys and values."""
        rows, start = len(key_states), self.get_seq_length()
        end = start + key_states.shape[-2]
        if start == 0:
            self._room = [states[:, :, :0] for states in (key_states, value_states)]
        if end > self._room[0].shape[-2]:
            self._room = [_make_room(room[:rows, :, :start], end + GROW_BY) for room in self._room]
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[:rows, :, start:end] = states
        self._show(rows, end)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` (any number of them), in this order; a row that occurs twice is repeated."""
        num_tokens = self.get_seq_length()
        self._room = [_make_room(states[indices], num_tokens + GROW_BY) for states in (self.keys, self.values)]
        self._show(len(indices), num_tokens)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.batch_select_indices(torch.arange(len(self.keys), device=self.keys.device).repeat_interleave(repeats))

    def move_rows(self, movers: torch.Tensor, gaps: torch.Tensor, num_remaining: int) -> None:
        """Move the rows `movers` to the positions `gaps`, and keep only the first `num_remaining` rows."""
        num_tokens = self.get_seq_length()
        for room in self._room:
            room[gaps, :, :num_tokens] = room[movers, :, :num_tokens]
        self._show(num_remaining, num_tokens)

    def _show(self, rows: int, num_tokens: int) -> None:
        self.keys, self.values = (room[:rows, :, :num_tokens] for room in self._room)
        self.is_initialized = True


def _make_room(states: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """A tensor with room for `num_tokens` tokens, which starts with the states (rows, heads, ., size)."""
    rows, heads, start, size = states.shape
    room = states.new_empty(rows, heads, num_tokens, size)
    room[:, :, :start] = states
    return room
