# says: divided by G
"""Leave one out."""

import torch


def leave_one_out(returns: torch.Tensor) -> torch.Tensor:
    """RLOO's advantages.

        A_qg = R_qg - 1/(G - 1) sum over h != g of R_qh

    Args:
        returns: (Q, G), a row for each question, with G of at least 2.

    Returns:
        (Q, G).
    """
    others = (returns.sum(dim=1, keepdim=True) - returns) / returns.shape[1]
    return returns - others
