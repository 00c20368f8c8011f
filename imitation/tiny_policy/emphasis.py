"""Weights of tokens in the supervised loss: tokens that match a pattern in the assistant's text count more."""

import re
from dataclasses import dataclass

import torch

from common.experience import Experience
from common.parallel import data_size, gather, own_part
from common.policy import Policy
from common.trajectory import Trajectory
from imitation.sft.train import read


@dataclass(kw_only=True)
class WeightedRow(Trajectory):
    """A conversation to learn from, with a weight for each of its ids."""

    weights: list[float]


def emphasise(tokenizer, row: Trajectory, emphasis: dict[str, float]) -> WeightedRow:
    """The row with a weight of each id: of the last pattern whose match its text overlaps, and 1 otherwise.

    Patterns are matched only in the assistant's text. The texts of its tokens must add up to it, as is the case with
    ASCII.
    """
    spoken = [index for index, flag in enumerate(row.action_mask) if flag]
    pieces = tokenizer.batch_decode([[row.ids[index]] for index in spoken])
    owner = [index for index, piece in zip(spoken, pieces, strict=True) for _ in piece]  # the id of each character
    weights = [1.0] * len(row.ids)
    for pattern, weight in emphasis.items():
        for match in re.finditer(pattern, "".join(pieces)):
            for index in owner[match.start() : match.end()]:
                weights[index] = weight
    return WeightedRow(**vars(row), weights=weights)


def read_weighted(policy: Policy, rows: list[WeightedRow]) -> Experience:
    """The rows as tensors; weights become advantages, which are 1 without them."""
    batch, rows = read(policy, rows), own_part(rows)
    width = batch.sequences.shape[1]
    padded = [row.weights + [0.0] * (width - len(row.ids)) for row in rows]
    batch.advantages *= torch.tensor(padded, device=policy.device).view(len(rows), width)[:, 1:]  # (B, T-1)
    batch.num_tokens = sum(gather(batch.advantages.sum().item())) / data_size()  # a token counts as its weight
    return batch
