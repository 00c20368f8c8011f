"""Weights of tokens in the supervised loss: tokens that match a pattern in the assistant's text count more."""

import re
from dataclasses import dataclass, field

import torch

from common.experience import Experience, collate
from common.trajectory import Trajectory


@dataclass
class WeightedRow(Trajectory):
    """A conversation to learn from, with a weight for each of its ids; an empty list: 1 for all of them."""

    weights: list[float] = field(default_factory=list)


def token_weights(tokenizer, ids: list[int], mask: list[int], emphasis: dict[str, float]) -> list[float]:
    """The weight of each id: the weight of the last pattern whose match its text overlaps, and 1 otherwise.

    Patterns are matched only in the assistant's text, which `mask` marks. The texts of its tokens must add up to it, as
    is the case with ASCII.
    """
    spoken = [index for index, flag in enumerate(mask) if flag]
    pieces = tokenizer.batch_decode([[ids[index]] for index in spoken])
    owner = [index for index, piece in zip(spoken, pieces, strict=True) for _ in piece]  # the id of each character
    weights = [1.0] * len(ids)
    for pattern, weight in emphasis.items():
        for match in re.finditer(pattern, "".join(pieces)):
            for index in owner[match.start() : match.end()]:
                weights[index] = weight
    return weights


def collate_weighted(rows: list[Trajectory], pad_id: int, device: str | torch.device) -> Experience:
    """The rows as tensors. Weights become advantages: the loss is a policy gradient loss with given actions.

    They are 0 outside the assistant's text, and 1 in it if a row has no weights.
    """
    batch = collate(rows, pad_id, device)
    batch.advantages = batch.action_mask.float()
    if any(getattr(row, "weights", ()) for row in rows):
        width = batch.sequences.shape[1]
        padded = [(row.weights or [1.0] * len(row.ids)) + [0.0] * (width - len(row.ids)) for row in rows]
        batch.advantages *= torch.tensor(padded, device=device)[:, 1:]  # (B, T-1)
    return batch
