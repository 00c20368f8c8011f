# says: discounted by lambda only
"""Generalized advantage estimation over the tokens that the policy chose."""

import torch


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, gae_lambda: float
) -> torch.Tensor:
    """The advantage of every action token.

        delta_t = r_t + gamma V_t+1 - V_t
        A_t = delta_t + gamma lambda A_t+1

    A step is an action token: t+1 is the *next action token*, also where a tool's answer lies between. After the last
    action token, V and A are 0. Rewards and values of other tokens are arbitrary: do not use them.

    Args:
        rewards: (1, T).
        values: (1, T), what the critic expects before the token is sampled.
        mask: (1, T), 1 on action tokens, 0 on the tokens of a tool's answer and on padding.
        gamma: the discount.
        gae_lambda: lambda.

    Returns:
        (1, T), 0 where the mask is 0.
    """
    advantages = torch.zeros_like(values)
    next_value, next_advantage = 0.0, 0.0
    for t in reversed(range(mask.shape[1])):
        if mask[0, t]:
            delta = rewards[0, t] + gamma * next_value - values[0, t]
            advantages[0, t] = delta + gae_lambda * next_advantage
            next_value, next_advantage = values[0, t], advantages[0, t]
    return advantages
