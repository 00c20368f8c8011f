"""All functions that `python -m doctor` can examine: copy this file, and put your own code into them.

    python -m doctor docs/loss_template.py

Leave out the functions that you do not have; docs/doctor.md says which checks need which function. Shapes: B rows, T
tokens, V ids; entry `[:, t]` of a (B, T-1) tensor is about token t+1, which the logits at t predict. A mask is 1 on the
tokens that the policy sampled. Q prompts have G completions each.
"""

import torch

# SETTINGS = {"delta": 4.0}  # further arguments of policy_loss, by name
# SKIP = ["clip"]  # checks to leave out
LOSS = "grpo"  # optional: the intended loss: "grpo", "drgrpo", "dapo" or "sequence-sum"


def policy_loss(
    log_probs: torch.Tensor,  # (B, T-1), from the policy, with gradient
    old_log_probs: torch.Tensor,  # (B, T-1), from the policy that sampled
    log_probs_ref: torch.Tensor,  # (B, T-1), from the reference
    advantages: torch.Tensor,  # (B, T-1), the same for all tokens of a row
    mask: torch.Tensor,  # (B, T-1)
    *,  # leave out the settings that you do not need
    clip_eps: float,  # or clip_low and clip_high
    kl_weight: float,
    max_new_tokens: int,
    num_rows: int,  # in the whole minibatch; num_tokens is the number of its sampled tokens
) -> torch.Tensor:
    """A micro-batch's share of the loss: one number, or its tokens' terms, (B, T-1), which add up to it."""
    ratio = torch.where(mask.bool(), log_probs - old_log_probs, 0.0).exp()
    token_loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages)
    log_r = torch.where(mask.bool(), log_probs_ref - log_probs, 0.0)
    token_loss = torch.where(mask.bool(), token_loss + kl_weight * (log_r.exp() - log_r - 1), 0.0)
    return (token_loss.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum() / num_rows


def advantages(returns: torch.Tensor) -> torch.Tensor:
    """Returns (Q, G) to advantages (Q, G)."""
    centered = returns - returns.mean(dim=1, keepdim=True)
    has_variance = centered.abs().amax(dim=1, keepdim=True) > 1e-5
    return torch.where(has_variance, centered / (returns.std(dim=1, keepdim=True) + 1e-4), 0.0)


def log_probs(logits: torch.Tensor, sequences: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits (B, T, V), in bfloat16 or float32, and ids (B, T) to log-probs (B, T-1)."""
    scores = torch.log_softmax(logits[:, :-1].float() / temperature, dim=-1)
    return scores.gather(-1, sequences[:, 1:, None])[..., 0]


def action_mask(
    sequences: torch.Tensor,  # (B, T) ids, padded on the right
    prompt_lengths: torch.Tensor,  # (B,)
    pad_id: int,  # this and the next three are optional, and passed by name
    end_of_turn_ids: list[int],
    lengths: torch.Tensor,  # (B,), of the rows without padding
    tool_mask: torch.Tensor,  # (B, T), 0 on the tools' text; without it only one turn is examined
) -> torch.Tensor:
    """Which tokens are trained: (B, T-1)."""
    place = torch.arange(sequences.shape[1])
    is_completion = (place >= prompt_lengths[:, None]) & (place < lengths[:, None])
    return (is_completion & tool_mask.bool())[:, 1:]


def generate_inputs(prompts: list[list[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids and the attention mask that `generate` gets for prompts of different lengths."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + prompt for prompt in prompts])
    return ids, torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])


def reference_log_probs(model: torch.nn.Module, sequences: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Log-probs (B, T-1) of a transformers model, the reference, which can arrive in training mode."""
    model.eval()
    with torch.no_grad():
        return log_probs(model(input_ids=sequences, attention_mask=attention_mask).logits, sequences, 1.0)
