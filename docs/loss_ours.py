"""This repository's own functions, for the doctor: all checks pass.

python -m doctor docs/loss_ours.py
python -m doctor experiment_base/train.py     # its loss alone
"""

import torch
from torch import nn

from common.advantages import STD_EPS, group_advantages, group_std
from common.experience import collate
from common.logprobs import log_probs_and_entropy
from common.loss import approx_kl_divergence, clipped_surrogate, probability_ratio
from common.sampling import left_pad
from common.trajectory import Trajectory

LOSS = "grpo"


def policy_loss(log_probs, old_log_probs, log_probs_ref, advantages, mask, *, clip_eps, kl_weight, num_rows):
    """As in experiment_base/train.py."""
    ratio = probability_ratio(log_probs, old_log_probs, mask)
    token_loss = clipped_surrogate(ratio, advantages, clip_eps)
    token_loss = token_loss + kl_weight * approx_kl_divergence(log_probs, log_probs_ref, mask)
    return token_loss * mask / mask.sum(dim=1, keepdim=True).clamp(min=1) / num_rows


def advantages(returns: torch.Tensor) -> torch.Tensor:
    """As in experiment_base/train.py."""
    return group_advantages(returns) / (group_std(returns) + STD_EPS)


def log_probs(logits: torch.Tensor, sequences: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits in place of the hidden states, and a head that leaves them unchanged."""
    head = nn.Identity()
    head.out_features = logits.shape[-1]
    targets = sequences[:, 1:].flatten()
    scores, _ = log_probs_and_entropy(logits[:, :-1].flatten(0, 1), targets, head, temperature)
    return scores.view(len(sequences), -1)


def action_mask(sequences, prompt_lengths, pad_id, lengths, tool_mask) -> torch.Tensor:
    """Rows recorded as the sampler does, with a flag for every token, then collated."""
    rows = []
    for ids, prompt, length, flags in zip(sequences.tolist(), prompt_lengths, lengths, tool_mask.tolist(), strict=True):
        row = Trajectory(ids[:prompt], int(prompt), [0] * int(prompt), [0.0] * int(prompt))
        for token, is_sampled in zip(ids[prompt:length], flags[prompt:length], strict=True):
            if is_sampled:
                row.ids.append(token)
                row.action_mask.append(1)
                row.sampler_log_probs.append(-1.0)
            else:
                row.observe([token])
        rows.append(row)
    mask = collate(rows, pad_id).action_mask
    return nn.functional.pad(mask, (0, sequences.shape[1] - 1 - mask.shape[1]))  # this batch has more padding


def generate_inputs(prompts: list[list[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As common/sampling.py pads prompts."""
    return left_pad([tuple(prompt) for prompt in prompts], pad_id, "cpu")


def reference_log_probs(model: nn.Module, sequences: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """As in `token_log_probs`: without gradient, and out of training mode, as `Policy.forward` ensures."""
    model.train(False)
    with torch.no_grad():
        return log_probs(model(sequences, attention_mask).logits, sequences, temperature=1.0)
