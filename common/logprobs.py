"""Log-probabilities and entropy of given tokens, in bounded memory.

Shapes: B rows, T tokens, N action tokens, hidden size H, vocabulary size V; entry `[:, t]` of a (B, T-1) tensor is
about token t+1.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.experience import Experience, MicroBatchSize
from fast.sharded_weights import gathered_weights

if TYPE_CHECKING:
    from common.policy import Policy

Score = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # as `score_logits`

# The most logits that exist at the same time: 2**25 logits are 128 MiB in float32. All logits of 64 rows of 512 tokens
# with Llama 3's vocabulary of 128,256 would be 16.8 GB, and log_softmax would hold them twice.
MAX_LOGITS = 2**25


@torch.no_grad()
def token_log_probs(policy: "Policy", experience: Experience, micro_batch_size: int | MicroBatchSize) -> torch.Tensor:
    """The log-probs of all action tokens of `experience` without gradient, a few rows at a time: (B, T-1), in nats."""
    log_probs = torch.zeros_like(experience.sampler_log_probs)
    with gathered_weights(policy.trained):  # ranks have different numbers of rows
        for rows in experience.micro_batch_rows(micro_batch_size):
            part = experience.select(rows)
            log_probs[rows, : part.action_mask.shape[1]] = policy(part.sequences, part.action_mask).log_probs
    return log_probs


def score_logits(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probs (n,) of the tokens `targets` (n,), in nats, and the entropies (n,), without gradient.

    log p(token) and H = -sum_v p_v log p_v, with p = softmax(logits) and logits (n, V)
    """
    log_p = logits.log_softmax(dim=-1)  # (n, V)
    with torch.no_grad():
        entropy = -log_p.exp().mul_(log_p).sum(dim=-1)  # not `vecdot`, which autocast runs in bfloat16
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


def log_probs_and_entropy(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: nn.Module,
    temperature: float,
    max_logits: int = MAX_LOGITS,
    score: Score = score_logits,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the LM head to the hidden states that predict tokens, and score its logits / temperature.

    The logits are computed in chunks of at most `max_logits`, and once more in the backward pass, so that the (N, V)
    tensor never exists. `hidden` is (N, H), `targets` are the (N,) tokens.

    Returns:
        (N,) log-probs in nats, and (N,) entropies in nats, without gradient.
    """
    tokens_per_chunk = max(1, max_logits // head.out_features)
    chunks = [
        # a single chunk fits in memory; computing it twice would only cost time
        _score_chunk(h, t, head, temperature, score)
        if len(targets) <= tokens_per_chunk
        else checkpoint(_score_chunk, h, t, head, temperature, score, use_reentrant=False)
        for h, t in zip(hidden.split(tokens_per_chunk), targets.split(tokens_per_chunk), strict=True)
    ]
    log_probs, entropy = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return log_probs, entropy


def _score_chunk(
    hidden: torch.Tensor, targets: torch.Tensor, head: nn.Module, temperature: float, score: Score
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = head(hidden).float()  # float32 even where the model runs in bfloat16
    return score(logits if temperature == 1 else logits / temperature, targets)
