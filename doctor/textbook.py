"""Makes the policy_loss of an experiment's train.py a function of tensors, as the adapter in a user's file does."""

import dataclasses
import inspect
from collections.abc import Callable
from types import ModuleType

import torch

from common.experience import Experience


def textbook_loss(module: ModuleType) -> Callable:
    """The module's `policy_loss(config, log_probs, micro, count)` with the parameters of docs/loss_template.py.

    `count` is `num_rows` or `num_tokens`; a loss of pairs has `num_pairs`, and no advantages. A clip range with two
    ends is `clip_eps` and `clip_eps_high` in the settings.
    """
    fields = {field.name for field in dataclasses.fields(module.Config)}
    counts = list(inspect.signature(module.policy_loss).parameters)[3:]
    of_pairs = "num_pairs" in counts
    flags = {name: name for name in ("kl_weight", "max_new_tokens") if name in fields}  # of the settings, by our names
    if "clip_eps_high" in fields:
        flags |= {"clip_low": "clip_eps", "clip_high": "clip_eps_high"}
    elif "clip_eps" in fields:
        flags["clip_eps"] = "clip_eps"

    def policy_loss(
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor | None,
        log_probs_ref: torch.Tensor,
        mask: torch.Tensor,
        advantages: torch.Tensor | None = None,  # (B, 1)
        **settings: float,
    ) -> tuple[torch.Tensor, dict]:
        ids, rows = torch.zeros(len(mask), mask.shape[1] + 1).long(), torch.zeros(len(mask)).long()
        given = {"action_mask": mask, "old_log_probs": old_log_probs, "log_probs_ref": log_probs_ref}
        given |= {"sequences": ids, "attention_mask": torch.ones_like(ids), "advantages": advantages}
        given |= {"sampler_log_probs": torch.zeros(mask.shape), "importance_weights": torch.ones(mask.shape)}
        given |= dict.fromkeys(["prompt_index", "prompt_lengths"], rows)
        given |= {"completion_index": torch.arange(len(mask)) % 2}  # of a pair: chosen, rejected
        config = module.Config(**{flag: settings[name] for name, flag in flags.items()})
        settings["num_pairs"] = len(mask) / 2
        return module.policy_loss(config, log_probs, Experience(**given), *(settings[name] for name in counts))

    signature = inspect.signature(policy_loss)
    tensors = [each.replace(default=each.empty) for each in signature.parameters.values()][: 4 if of_pairs else 5]
    names = [*flags, *(name for name in counts if name != "num_pairs")]
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    policy_loss.__signature__ = signature.replace(parameters=[*tensors, *more])
    return policy_loss
