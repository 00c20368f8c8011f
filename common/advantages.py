"""Advantages: how much better a completion did than others that answered the same prompt, or than a critic expected."""

import torch

from common.loss import masked_sum
from common.parallel import gather

STD_EPS = 1e-4  # small against the standard deviation of a group with rewards 0 and 1: at least 0.35 for G = 8


def group_advantages(returns: torch.Tensor) -> torch.Tensor:
    """Compare every return with its group's mean.

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


def success_rate(returns: torch.Tensor) -> torch.Tensor:
    """The share of each group's completions that succeed: (Q, G) in, (Q, 1) in float64 out, at least `STD_EPS`.

        p_q = mean_g R_qg - min(0, min_g R_qg)

    MaxRL (arXiv 2602.02710) divides by it, and defines it for rewards of 0 and 1: the mean. A group with returns below
    0 is measured from its lowest: rewards of -1 and 1 count like 0 and 1. Advantages are then at most G - 1, where a
    mean of nearly 0, or below, would make them huge.

    >>> success_rate(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, -1.0, -1.0, -1.0]]))
    tensor([[0.2500],
            [0.5000]], dtype=torch.float64)
    """
    exact = returns.double()
    return (exact.mean(dim=1, keepdim=True) - exact.amin(dim=1, keepdim=True).clamp(max=0)).clamp(min=STD_EPS)


def has_reward_variance(returns: torch.Tensor) -> torch.Tensor:
    """Which groups can teach anything: (Q, G) returns in, (Q,) bool out, False where all returns of a group are equal.

    A group with a return that is not finite also counts, so that its advantages are NaN and the fault is noticed.

    >>> has_reward_variance(torch.tensor([[1.0, 0.0], [0.7, 0.7]]))
    tensor([ True, False])
    """
    lowest, highest = returns.amin(dim=1), returns.amax(dim=1)
    is_flat = highest - lowest <= 1e-6 * torch.maximum(lowest.abs(), highest.abs()).clamp(min=1.0)
    return ~(is_flat & returns.isfinite().all(dim=1))


# With a critic (PPO) --------------------------------------------------------------------------------------------------


def final_rewards(returns: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Give each completion its return as the reward of its last action token: (B,) in, (B, T-1) out.

    A completion that was cut off ends at its last token like any other: its reward does not grow any more.

    >>> final_rewards(torch.tensor([1.0, 0.5, 9.0]), torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]]))
    tensor([[0.0000, 1.0000, 0.0000],
            [0.0000, 0.0000, 0.5000],
            [0.0000, 0.0000, 0.0000]])
    """
    is_last = (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True)) & mask.bool()
    return torch.where(is_last, returns[:, None], 0.0)


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, gae_lambda: float
) -> torch.Tensor:
    """Generalized advantage estimation, GAE (Schulman et al. 2015, arXiv 1506.02438, equations 11 to 16).

        delta_t = r_t + gamma V_t+1 - V_t        A_t = delta_t + gamma lambda A_t+1

    Here t+1 is the next *action token*: the last token before a tool's answer is followed by the first one after it. A
    tool's tokens and padding are not steps of the policy; their values are never read, and nothing follows the last
    action token: V and A are 0 there. lambda = 1 gives A_t = the return that is left - V_t (equation 18); lambda = 0
    gives delta_t (equation 17), which trusts the critic with everything but the next reward.

    Args:
        rewards: (B, T-1), in units of reward, at action tokens.
        values: (B, T-1); V_t is what the critic expects before token t+1 is sampled.
        mask: (B, T-1), 1 on action tokens.

    Returns:
        (B, T-1) advantages, 0 where the mask is 0. A + V is the target of the critic: the lambda-return.

    >>> rewards, mask = torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.tensor([[1, 0, 1, 1]])
    >>> generalized_advantages(rewards, torch.zeros(1, 4), mask, gamma=1.0, gae_lambda=0.5)
    tensor([[0.2500, 0.0000, 0.5000, 1.0000]])
    """
    is_action = mask.bool()
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])  # (B,) of the action token that follows
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = torch.where(is_action[:, t], delta + gamma * gae_lambda * next_advantage, 0.0)
        next_value = torch.where(is_action[:, t], values[:, t], next_value)
        next_advantage = torch.where(is_action[:, t], advantages[:, t], next_advantage)
    return advantages


def whiten(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Shift and scale advantages (B, T-1) to mean 0 and standard deviation 1 over the action tokens of all ranks.

    Other entries, which would count as zeros, become 0.

    >>> whiten(torch.tensor([[3.0, 1.0, 7.0]]), torch.tensor([[1, 1, 0]]))
    tensor([[ 0.9999, -0.9999,  0.0000]])
    """
    exact, mask = advantages.cpu().double(), mask.cpu()
    count = sum(gather(int(mask.sum())))
    mean = sum(gather(masked_sum(exact, mask).item())) / max(1, count)
    std = (sum(gather(masked_sum((exact - mean) ** 2, mask).item())) / max(1, count)) ** 0.5
    return torch.where(mask.bool(), (exact - mean) / (std + STD_EPS), 0.0).to(advantages)


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """The share of the returns' variance that the critic predicts, over the action tokens of all ranks.

        1 - Var(R - V) / Var(R)

    1 means a perfect critic, 0 a critic that knows only the mean; below 0 it misleads. 0 if all returns are equal.

    Args:
        values, mask: (B, T-1).
        returns: (B, T-1), discounted and without what came before, so that a critic can predict them; without a
            discount (B, 1), a completion's.

    >>> explained_variance(torch.tensor([[0.5, 1.0], [0.5, 0.0]]), torch.tensor([[1.0], [0.0]]), torch.ones(2, 2))
    0.5
    """
    pairs = torch.stack([x.expand_as(values)[mask.bool()].cpu().double() for x in (returns, values)])  # (2, N)
    returns, values = torch.cat(gather(pairs), dim=1)
    variance = returns.var(correction=0).item()
    return 1 - (returns - values).var(correction=0).item() / variance if variance > 0 else 0.0
