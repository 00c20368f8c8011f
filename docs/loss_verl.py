"""verl's loss and advantages for `python -m doctor`. For verl 0.9.1.

python -m doctor docs/loss_verl.py
"""

from types import SimpleNamespace

import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_policy_loss_vanilla

LOSS_AGG_MODE = "token-mean"  # or "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"


class Config(SimpleNamespace):
    """The part of verl's ActorConfig that the loss reads."""

    def get(self, name: str, default: object = None) -> object:
        return getattr(self, name, default)


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    num_rows: int,
    num_tokens: int,
    prompt_length: int,
) -> torch.Tensor:
    """The loss of a micro-batch. verl gets only the response."""
    minibatch = {"dp_size": 1, "batch_num_tokens": num_tokens, "global_batch_size": num_rows, "loss_scale_factor": None}
    ranges = {"clip_ratio": clip_low, "clip_ratio_low": clip_low, "clip_ratio_high": clip_high, "clip_ratio_c": 3.0}
    tensors = (old_log_probs, log_probs, advantages * mask, mask.long())
    responses = (x[:, prompt_length:] for x in tensors)
    config = Config(**ranges, global_batch_info=minibatch)
    loss, _ = compute_policy_loss_vanilla(*responses, loss_agg_mode=LOSS_AGG_MODE, config=config)
    return loss


def advantages(returns: torch.Tensor) -> torch.Tensor:
    """Returns (Q, G), reshaped to rewards of one-token responses, (Q G, 1), and back."""
    index = torch.arange(len(returns)).repeat_interleave(returns.shape[1]).numpy()
    rewards = returns.reshape(-1, 1)
    result, _ = compute_grpo_outcome_advantage(rewards, torch.ones_like(rewards), index)
    return result.view(returns.shape)
