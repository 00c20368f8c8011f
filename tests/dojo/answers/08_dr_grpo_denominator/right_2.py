"""Dr. GRPO's denominator."""

import torch


def dr_grpo_loss(
    log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, max_new_tokens: int
) -> torch.Tensor:
    """The loss of Dr. GRPO for one update per rollout.

        loss = -1/B sum_b 1/max_new_tokens sum_t mask_bt A_b log_probs_bt

    Args:
        log_probs: (B, T) of the policy that is trained, in nats; the gradient flows through them.
        advantages: (B, 1), one for all tokens of a row.
        mask: (B, T), 1 on tokens that the policy sampled.
        max_new_tokens: the completion budget: how many tokens a completion may have.

    Returns:
        A scalar.
    """
    weights = advantages.expand_as(log_probs)[mask == 1] / max_new_tokens
    return -torch.dot(log_probs[mask == 1], weights) / len(log_probs)
