"""Advantages: how much better a completion did than the others that answered the same prompt."""

import torch

EPS = 1e-4  # small against the standard deviation of a group with rewards 0 and 1: at least 0.35 for G = 8


def group_advantages(returns: torch.Tensor, critic_type: str = "grpo", eps: float = EPS) -> torch.Tensor:
    """Compare every return with its own group.

    A return is a completion's total reward: the weighted sum of its components. What it is compared with is called the
    baseline; other methods train a second network, the critic, to predict it. Here the group's mean serves.

        grpo:    A_qg = (R_qg - mean_g R_q) / (std_g R_q + eps)     (DeepSeekMath, arXiv 2402.03300, section 4.1.2)
        drgrpo:  A_qg =  R_qg - mean_g R_q                          (Dr. GRPO, arXiv 2503.20783, section 3.2)

    The standard deviation is the unbiased one (divided by G - 1, as in `torch.std` and TRL). A group without signal,
    all of whose returns are equal, has advantage exactly 0: float noise in the mean divided by a tiny standard
    deviation would otherwise train on rounding errors. "Equal" forgives float noise in the returns themselves, as left
    by adding up weighted rewards.

    Args:
        returns: (Q, G), in units of reward; a row is a group, the G completions of one prompt.
        critic_type: which formula stands in for a critic, "grpo" or "drgrpo".
        eps: added to the standard deviation, in units of reward.

    Returns:
        (Q, G) advantages, each row summing to 0, of the dtype of `returns` (the default one for integers).
        Computed in float64.

    Raises:
        ValueError: `returns` is not (Q, G), a group has fewer than two completions, or `critic_type` is unknown.

    >>> group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]), eps=0.0)
    tensor([[ 1.5000, -0.5000, -0.5000, -0.5000],
            [ 0.0000,  0.0000,  0.0000,  0.0000]])
    """
    if returns.dim() != 2 or returns.shape[1] < 2:
        raise ValueError(f"returns must be (Q, G) with G >= 2, not {tuple(returns.shape)}: a group is its own baseline")
    exact = returns.double()
    centered = exact - exact.mean(dim=1, keepdim=True)
    match critic_type:
        case "grpo":
            advantages = centered / (exact.std(dim=1, keepdim=True) + eps)
        case "drgrpo":
            advantages = centered
        case _:
            raise ValueError(f'critic_type must be "grpo" or "drgrpo", not {critic_type!r}')
    dtype = returns.dtype if returns.is_floating_point() else torch.get_default_dtype()
    return torch.where(has_signal(returns)[:, None], advantages, 0.0).to(dtype)


def has_signal(returns: torch.Tensor) -> torch.Tensor:
    """Which groups can teach anything: (Q, G) returns in, (Q,) bool out, False where all returns of a group are equal.

    A group with a return that is not finite counts as one, so that its advantages are NaN, and the fault is seen.

    >>> has_signal(torch.tensor([[1.0, 0.0], [0.7, 0.7]]))
    tensor([ True, False])
    """
    lowest, highest = returns.amin(dim=1), returns.amax(dim=1)
    is_flat = highest - lowest <= 1e-6 * torch.maximum(lowest.abs(), highest.abs()).clamp(min=1.0)
    return ~(is_flat & returns.isfinite().all(dim=1))
