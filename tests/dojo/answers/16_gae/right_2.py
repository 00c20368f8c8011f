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
    result = [0.0] * mask.shape[1]
    steps = [t for t, is_action in enumerate(mask[0].tolist()) if is_action]
    following = [*steps[1:], None]
    for t, after in reversed(list(zip(steps, following, strict=True))):
        result[t] = rewards[0, t].item() - values[0, t].item()
        if after is not None:
            result[t] += gamma * (values[0, after].item() + gae_lambda * result[after])
    return torch.tensor([result])
