"""What was sampled in a step, in numbers; docs/metrics.md explains each."""

import torch

from common.advantages import has_reward_variance
from common.evaluate import mean
from common.trajectory import Trajectory


def rollout_metrics(trajectories: list[Trajectory], returns: torch.Tensor) -> dict[str, float]:
    """Rewards by component, what the task describes, lengths, and how many groups can teach anything.

    Args:
        returns: (Q, G).
    """
    first = trajectories[0]
    lengths = [row.num_action_tokens for row in trajectories]
    metrics = {"reward/total": returns.mean().item()}
    metrics |= {f"reward/{name}": mean([row.rewards[name] for row in trajectories]) for name in first.rewards}
    metrics |= {
        f"completion/{name}": mean([row.description[name] for row in trajectories]) for name in first.description
    }
    metrics["completion/length"] = mean(lengths)
    if first.turns:
        metrics["completion/turns"] = mean([row.num_turns for row in trajectories])
    if "correct" in first.rewards:
        is_right = [row.rewards["correct"] == 1 for row in trajectories]  # partly right is not right, as in pass@k
        for name, wanted in (("right", True), ("wrong", False)):
            among = [length for length, right in zip(lengths, is_right, strict=True) if right == wanted]
            metrics |= {f"completion/length_{name}": mean(among)} if among else {}
    metrics["completion/stopped"] = mean([row.finish_reason == "stop" for row in trajectories])
    metrics["completion/truncated"] = mean([row.finish_reason == "length" for row in trajectories])
    metrics["group/zero_reward_variance"] = 1 - has_reward_variance(returns).float().mean().item()
    return metrics
