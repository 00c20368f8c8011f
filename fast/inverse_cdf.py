"""Draw tokens from a large vocabulary without the cumulative sum over all of it."""

import torch
from torch import nn


def invert_cdf(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The tokens (rows,) whose intervals contain the uniform numbers (rows,): first a block of tokens, then one of it.

    Sums are float64: over 128k tokens, float32 would fall short of 1.
    """
    rows, size = len(probs), 64
    blocks = nn.functional.pad(probs, (0, -probs.shape[1] % size)).view(rows, -1, size)
    sums = blocks.sum(dim=-1, dtype=uniforms.dtype).cumsum(dim=-1)  # (rows, blocks)
    total = sums[:, -1:]
    u = torch.minimum(uniforms[:, None] * total, total.nextafter(-total))  # in float32, a uniform number can round to 1
    # right=True skips a block or token of probability 0, whose sum equals its predecessor's. NaN is beyond all sums
    block = torch.searchsorted(sums, u, right=True).clamp(max=sums.shape[1] - 1)  # (rows, 1)
    before = nn.functional.pad(sums, (1, 0)).gather(-1, block)
    cdf = blocks[torch.arange(rows, device=probs.device), block[:, 0]].cumsum(dim=-1, dtype=uniforms.dtype)
    total = cdf[:, -1:]
    u = torch.minimum((u - before).clamp(min=0), total.nextafter(-total))  # despite rounding, within the block
    return (block * size + torch.searchsorted(cdf, u, right=True))[:, 0].clamp(max=probs.shape[1] - 1)
