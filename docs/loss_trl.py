"""TRL's loss for `python -m doctor`: GRPOTrainer's `_compute_loss`, called without a model. For TRL 1.16.

    python -m doctor docs/loss_trl.py

To examine your own subclass of GRPOTrainer, put its name in place of GRPOTrainer.
"""

from collections import defaultdict
from dataclasses import fields
from types import SimpleNamespace

import torch
from trl import GRPOConfig, GRPOTrainer

LOSS_TYPE = "dapo"  # or "grpo", "dr_grpo", "bnpo", "luspo", "cispo"
LEVEL = "token"  # of the ratio; "sequence" with the loss type "grpo" is GSPO
BIAS_CORRECTION_KL = True  # TRL's default: the KL penalty is multiplied by the ratio


class OneProcess:
    """The parts of accelerate that the loss uses."""

    num_processes, sync_gradients = 1, True

    def gather(self, x: torch.Tensor, reduction: str = "") -> torch.Tensor:
        return x

    gather_for_metrics = reduce = gather


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor | None,
    log_probs_ref: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,  # 1 on tool output too, as in TRL
    tool_mask: torch.Tensor,  # 0 on tool output
    *,
    clip_low: float,
    clip_high: float,
    kl_weight: float,
    max_new_tokens: int,
    num_tokens: int,
    num_parts: int,
    prompt_length: int,
) -> torch.Tensor:
    """The loss of a micro-batch. TRL gets prompt and completion separately."""
    prompt = torch.ones(len(mask), prompt_length, dtype=torch.long)
    mask, tool_mask, log_probs_ref = (x[:, prompt_length:] for x in (mask.long(), tool_mask.long(), log_probs_ref))
    inputs = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": mask, "completion_mask": mask}
    inputs |= {"tool_mask": tool_mask, "advantages": advantages[:, 0], "ref_per_token_logps": log_probs_ref}
    inputs["num_items_in_batch"] = torch.tensor(num_tokens)
    if old_log_probs is not None:
        inputs["old_per_token_logps"] = old_log_probs[:, prompt_length:]
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    trainer.__dict__ |= {
        "model": SimpleNamespace(training=True),
        "accelerator": OneProcess(),
        "args": SimpleNamespace(**{field.name: field.default for field in fields(GRPOConfig)}),
        "_metrics": {mode: defaultdict(list) for mode in ("train", "eval")},
        "current_gradient_accumulation_steps": num_parts,
        "epsilon_low": clip_low,
        "epsilon_high": clip_high,
        "beta": kl_weight,
        "max_completion_length": max_new_tokens,
        "loss_type": LOSS_TYPE,
        "importance_sampling_level": LEVEL,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
    }
    trainer.args.steps_per_generation = num_parts
    trainer.args.use_bias_correction_kl = BIAS_CORRECTION_KL
    scores = log_probs[:, prompt_length:], torch.ones(mask.shape), None  # log-probs, entropies, no auxiliary loss
    trainer._get_per_token_logps_and_entropies = lambda *arguments, **options: scores
    return trainer._compute_loss(trainer.model, inputs)
