"""Learn from pairs: direct preference optimization."""

import torch


def dpo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    """DPO's loss, the mean over N pairs.

        s(y) = beta (log p(y) - log p_reference(y))
        loss = mean over the pairs of -log sigmoid(s(chosen) - s(rejected))

    Loss and gradient must be finite also for a pair whose order is badly wrong: a difference of scores of -250.

    Args:
        chosen: (N,), the sum of the log-probs of the chosen answer's tokens under the policy.
        rejected: (N,), the same of the rejected answer.
        reference_chosen: (N,), under the reference.
        reference_rejected: (N,).
        beta: how strongly the policy is bound to the reference.

    Returns:
        A tensor without dimensions.
    """
    raise NotImplementedError
