"""Makes the policy_loss of an experiment_*/train.py a function of tensors, as the adapter in a user's file does."""

import dataclasses
import inspect
from collections.abc import Callable
from types import ModuleType

import torch

from common.experience import Experience


def textbook_loss(module: ModuleType) -> Callable:
    """The module's `policy_loss(config, log_probs, micro, count)` with the parameters of docs/loss_template.py.

    `count` is `num_rows` or `num_tokens`. A clip range with two ends is `clip_eps` and `clip_eps_high` in the settings.
    """
    fields = {field.name for field in dataclasses.fields(module.Config)}
    count = list(inspect.signature(module.policy_loss).parameters)[3]
    flags = {"kl_weight": "kl_weight", "max_new_tokens": "max_new_tokens"}  # of the settings, by the doctor's names
    if "clip_eps_high" in fields:
        flags |= {"clip_low": "clip_eps", "clip_high": "clip_eps_high"}
    elif "clip_eps" in fields:
        flags["clip_eps"] = "clip_eps"

    def policy_loss(
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor | None,
        log_probs_ref: torch.Tensor,
        advantages: torch.Tensor,  # (B, 1)
        mask: torch.Tensor,
        **settings: float,
    ) -> tuple[torch.Tensor, dict]:
        ids, rows = torch.zeros(len(mask), mask.shape[1] + 1).long(), torch.zeros(len(mask)).long()
        given = {"action_mask": mask, "old_log_probs": old_log_probs, "log_probs_ref": log_probs_ref}
        given |= {"sequences": ids, "attention_mask": torch.ones_like(ids), "advantages": advantages}
        given |= {"sampler_log_probs": torch.zeros(mask.shape), "importance_weights": torch.ones(mask.shape)}
        given |= dict.fromkeys(["prompt_index", "prompt_lengths", "completion_index"], rows)
        config = module.Config(**{flag: settings[name] for name, flag in flags.items()})
        return module.policy_loss(config, log_probs, Experience(**given), settings[count])

    signature = inspect.signature(policy_loss)
    tensors = list(signature.parameters.values())[:-1]
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (*flags, count)]
    policy_loss.__signature__ = signature.replace(parameters=[*tensors, *more])
    return policy_loss
