"""Log-probs of the tokens that the policy chose."""

import torch


def log_probs_and_mask(
    logits: torch.Tensor, ids: torch.Tensor, prompt_length: torch.Tensor, length: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Log-probs of the sampled tokens, and where they are.

        mask_t = 1 if token t+1 was sampled: prompt_length <= t+1 < length
        log_probs_t = log softmax(logits_t)[ids_t+1] where mask_t is 1, and 0 elsewhere

    A row is a prompt, a completion, and padding. The policy sampled the completion, with its end-of-turn token.

    Args:
        logits: (B, T, V); those at t are about token t+1.
        ids: (B, T), padded on the right with 0, which is also the end-of-turn token.
        prompt_length: (B,), the number of tokens of the prompt.
        length: (B,), the number of tokens of prompt and completion, without padding.

    Returns:
        {"log_probs": (B, T-1), "mask": (B, T-1)}; entry [:, t] is about token t+1.
    """
    raise NotImplementedError
