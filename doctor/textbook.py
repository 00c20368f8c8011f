"""Makes the policy_loss of an experiment_*/train.py a function of tensors, as the adapter in a user's file does."""

from collections.abc import Callable
from types import ModuleType

import torch

from common.experience import Experience


def textbook_loss(module: ModuleType) -> Callable:
    """The module's `policy_loss(config, log_probs, micro, num_rows)` with the parameters of docs/loss_template.py."""

    def policy_loss(
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor | None,
        log_probs_ref: torch.Tensor,
        advantages: torch.Tensor,  # (B, 1)
        mask: torch.Tensor,
        clip_eps: float,
        kl_weight: float,
        max_new_tokens: int,
        num_rows: int,
    ) -> tuple[torch.Tensor, dict]:
        ids, rows = torch.zeros(len(mask), mask.shape[1] + 1).long(), torch.zeros(len(mask)).long()
        given = {"action_mask": mask, "old_log_probs": old_log_probs, "log_probs_ref": log_probs_ref}
        given |= {"sequences": ids, "attention_mask": torch.ones_like(ids), "advantages": advantages}
        given |= {"sampler_log_probs": torch.zeros(mask.shape), "importance_weights": torch.ones(mask.shape)}
        given |= dict.fromkeys(["prompt_index", "prompt_lengths", "completion_index"], rows)
        config = module.Config(clip_eps=clip_eps, kl_weight=kl_weight, max_new_tokens=max_new_tokens)
        return module.policy_loss(config, log_probs, Experience(**given), num_rows)

    return policy_loss
