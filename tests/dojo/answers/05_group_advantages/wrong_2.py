# says: with other questions
"""Compare a completion with its group."""

import torch


def group_advantages(returns: torch.Tensor) -> torch.Tensor:
    """GRPO's advantages.

        A_qg = (R_qg - mean_g R_qg) / (std_g R_qg + 1e-4)

    The standard deviation divides by G - 1. A group in which all completions earned the same has advantages of 0.

    Args:
        returns: (Q, G), a row for each question.

    Returns:
        (Q, G).
    """
    return (returns - returns.mean()) / (returns.std() + 1e-4)
