"""PPO's clipped surrogate."""

import torch


def clipped_surrogate(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, clip_eps: float
) -> torch.Tensor:
    """The loss of each token.

        ratio_t = p(token t) / p_old(token t)
        loss_t = -min(ratio_t A, clip(ratio_t, 1 - clip_eps, 1 + clip_eps) A)

    Args:
        log_probs: (B, T) of the policy that is trained, in nats; the gradient flows through them.
        old_log_probs: (B, T) of the policy that sampled the tokens.
        advantages: (B, 1), one for all tokens of a row.
        clip_eps: how far a ratio may move.

    Returns:
        (B, T).
    """
    rows = []
    for new, old, (advantage,) in zip(log_probs, old_log_probs, advantages, strict=True):
        ratio = new.exp() / old.exp()
        has_left = ratio > 1 + clip_eps if advantage > 0 else ratio < 1 - clip_eps
        edge = 1 + clip_eps if advantage > 0 else 1 - clip_eps
        rows.append(-advantage * torch.where(has_left, edge, ratio))
    return torch.stack(rows)
