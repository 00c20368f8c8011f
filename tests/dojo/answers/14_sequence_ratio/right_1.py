"""One ratio for a completion."""

import torch


def sequence_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """GSPO's ratio of each completion, at each of its tokens.

        s_b = (p(completion b) / p_old(completion b)) ** (1 / n_b)

    p(completion) is the product over its tokens, which are the n_b tokens with a mask of 1. s_b is 1 if there is none.

    Args:
        log_probs: (B, T) of the policy that is trained, in nats; the gradient flows through them.
        old_log_probs: (B, T) of the policy that sampled the tokens.
        mask: (B, T), 1 on tokens that the policy sampled.

    Returns:
        (B, T): s_b where the mask is 1, and 1 elsewhere.
    """
    rows = []
    for new, old, row_mask in zip(log_probs, old_log_probs, mask, strict=True):
        row = torch.ones_like(new)
        chosen = row_mask == 1
        if chosen.any():
            row[chosen] = torch.exp(new[chosen].mean() - old[chosen].mean())
        rows.append(row)
    return torch.stack(rows)
