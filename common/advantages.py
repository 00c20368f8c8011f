"""Advantages: how much better a completion did than the others that answered the same prompt."""

import torch

STD_EPS = 1e-4  # small against the standard deviation of a group with rewards 0 and 1: at least 0.35 for G = 8


def group_advantages(returns: torch.Tensor) -> torch.Tensor:
    """Compare every return with the mean of its own group.

        A_qg = R_qg - mean_g R_q

    A return is a completion's total reward, the weighted sum of its components. The mean is the baseline; other methods
    train a second network, the critic, to predict a baseline. Dr. GRPO (arXiv 2503.20783, section 3.2) uses A as it is;
    GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2) divides it by `group_std`.

    A group with zero reward variance has advantages of exactly 0: float noise in the mean, divided by a tiny standard
    deviation, would otherwise be trained on. Returns that differ only by rounding, for example from adding up weighted
    rewards, count as equal.

    Args:
        returns: (Q, G), in units of reward; a row is a group, the G completions of one prompt.

    Returns:
        (Q, G) advantages in float64, each row summing to 0.

    Raises:
        ValueError: `returns` is not (Q, G), or a group has fewer than two completions.

    >>> group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    tensor([[ 0.7500, -0.2500, -0.2500, -0.2500],
            [ 0.0000,  0.0000,  0.0000,  0.0000]], dtype=torch.float64)
    """
    if returns.dim() != 2 or returns.shape[1] < 2:
        raise ValueError(f"returns must be (Q, G) with G >= 2, not {tuple(returns.shape)}: a group is its own baseline")
    exact = returns.double()
    return torch.where(has_reward_variance(returns)[:, None], exact - exact.mean(dim=1, keepdim=True), 0.0)


def group_std(returns: torch.Tensor) -> torch.Tensor:
    """The standard deviation of each group's returns: (Q, G) in, (Q, 1) in float64 out.

    The sum of squares is divided by G - 1, as in `torch.std` and TRL.

    >>> group_std(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    tensor([[0.5000]], dtype=torch.float64)
    """
    return returns.double().std(dim=1, keepdim=True)


def has_reward_variance(returns: torch.Tensor) -> torch.Tensor:
    """Which groups can teach anything: (Q, G) returns in, (Q,) bool out, False where all returns of a group are equal.

    A group with a return that is not finite also counts, so that its advantages are NaN and the fault is noticed.

    >>> has_reward_variance(torch.tensor([[1.0, 0.0], [0.7, 0.7]]))
    tensor([ True, False])
    """
    lowest, highest = returns.amin(dim=1), returns.amax(dim=1)
    is_flat = highest - lowest <= 1e-6 * torch.maximum(lowest.abs(), highest.abs()).clamp(min=1.0)
    return ~(is_flat & returns.isfinite().all(dim=1))
