# says: The ratio is upside down
"""Samples of another program: truncated importance sampling."""

import torch


def truncated_weights(
    log_probs: torch.Tensor,
    sampler_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    cap: float,
) -> torch.Tensor:
    """The loss of every token.

        w_t = min(p_trainer(t) / p_sampler(t), C), a constant
        loss_t = -w_t A log p_trainer(t)

    No gradient flows through w. A token above the cap keeps its gradient, with the weight C.

    Args:
        log_probs: (B, T), log p_trainer.
        sampler_log_probs: (B, T), log p_sampler.
        advantages: (B, 1), one for each completion.
        mask: (B, T), 1 on the tokens that were sampled.
        cap: C.

    Returns:
        (B, T), 0 where the mask is 0.
    """
    weights = (sampler_log_probs - log_probs.detach()).exp().clamp(max=cap)
    return -weights * advantages * log_probs * mask
