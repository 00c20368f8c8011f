from typing import Literal

import torch

from common.advantages import STD_EPS, group_advantages, group_std

Credit = Literal["episode", "reward_to_go", "gigpo", "action_mean", "walked_graph", "progress", "potential", "exact"]


def turn_advantages(config, episodes):
    returns = torch.tensor([sum(e.rewards) for e in episodes]).view(-1, config.group_size)
    a = group_advantages(returns) / (group_std(returns) + STD_EPS)
    return [[float(x)] * e.num_turns for x, e in zip(a.view(-1), episodes)]
