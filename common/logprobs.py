"""The policy as training sees it: given tokens in, their log-probabilities out, in bounded memory.

Shapes: B rows, T tokens, a vocabulary of V tokens, N action tokens of the batch; entry `[:, t]` of a (B, T-1) tensor
is about token t+1.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.experience import Experience
from common.shared_prompts import hidden_states as hidden_states_of_shared_prompts

# Logits of at most so many entries are alive at once: 2**25 of them are 128 MiB in float32. All of them for 64 rows of
# 512 tokens under Llama 3's 128,256 words would be 16.8 GB, and log_softmax would hold them twice.
MAX_LOGITS = 2**25


class TokenScores(NamedTuple):
    log_probs: torch.Tensor  # (B, T-1) nats, with gradient; 0 where the mask is 0
    entropy: torch.Tensor  # (B, T-1) nats, of the whole distribution that the token was drawn from; no gradient


class Policy(nn.Module):
    """A causal language model with what sampling and training must agree on: temperature, end of turn, padding.

    Log-probabilities are computed inside `forward`, so that a wrapper around this module (DDP, FSDP) sees the call and
    synchronises its gradients; calling `policy.model` in training would skip that, without an error.

    Args:
        model: a Hugging Face causal language model.
        tokenizer: its tokenizer.
        end_of_turn_ids: every id that ends an assistant turn; some models have several.
        pad_id: fills the batch; it may equal an end-of-turn id, because no mask is ever made from ids.
        temperature: of the sampling distribution; log-probabilities are those of logits / temperature.
        compute_dtype: torch.float32, or torch.bfloat16 for autocast. The weights stay in float32 either way: a step of
            1e-6 would be rounded away in a bfloat16 weight, and training would silently do nothing.
        gradient_checkpointing: whether the model has it switched on.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer,
        end_of_turn_ids: list[int],
        pad_id: int,
        temperature: float = 1.0,
        compute_dtype: torch.dtype = torch.float32,
        gradient_checkpointing: bool = False,
    ):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.end_of_turn_ids = end_of_turn_ids
        self.pad_id = pad_id
        self.temperature = temperature
        self.compute_dtype = compute_dtype
        self.gradient_checkpointing = gradient_checkpointing

    @property
    def device(self) -> torch.device:
        return self.model.device

    def autocast(self) -> torch.autocast:
        """The arithmetic of every forward pass, in sampling and in training alike."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16)

    def forward(self, sequences: torch.Tensor, action_mask: torch.Tensor, max_logits: int = MAX_LOGITS) -> TokenScores:
        """Score the tokens of `sequences` where `action_mask` is 1.

            log p(token_t+1) = z[token_t+1] - logsumexp(z),   z = logits_t / temperature in float32

        Only the hidden states of action tokens reach the LM head, in chunks of at most `max_logits` logits that are
        computed again in the backward pass, so that the whole (B, T, V) never exists.

        Args:
            sequences: (B, T), right-padded. No attention mask is needed: attention is causal, so that no real token
                ever sees the padding behind it, whatever the padding's id.
            action_mask: (B, T-1), 1 where token t+1 counts.
        """
        # Gradient checkpointing works in training mode only, and sampling with a cache only outside of it.
        self.model.train(self.gradient_checkpointing and torch.is_grad_enabled())
        with self.autocast():
            return self._score(sequences, action_mask, max_logits)

    def _score(self, sequences: torch.Tensor, action_mask: torch.Tensor, max_logits: int) -> TokenScores:
        hidden, places = self._hidden_states(sequences, action_mask)  # (N, H), (N,)
        targets = sequences[:, 1:].flatten()[places]  # (N,)
        head = self.model.get_output_embeddings()
        tokens_per_chunk = max(1, max_logits // head.weight.shape[0])
        scores = [
            # a single chunk fits as it is; computing it twice would only cost time
            _score_chunk(h, t, head, self.temperature)
            if len(targets) <= tokens_per_chunk
            else checkpoint(_score_chunk, h, t, head, self.temperature, use_reentrant=False)
            for h, t in zip(hidden.split(tokens_per_chunk), targets.split(tokens_per_chunk), strict=True)
        ]
        log_probs, entropy = (torch.cat(parts) for parts in zip(*scores, strict=True))  # (N,), (N,)
        blank = torch.zeros(action_mask.numel(), device=sequences.device)
        log_probs, entropy = (blank.scatter(0, places, x).view_as(action_mask) for x in (log_probs, entropy))
        return TokenScores(log_probs, entropy)

    def _hidden_states(self, sequences: torch.Tensor, action_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where action tokens are predicted: hidden states (N, H), and their places in the flattened (B, T-1)."""
        decoder = self.model.get_decoder()
        if not self.model.training:  # with gradient checkpointing no cache is kept, which sharing needs
            shared = hidden_states_of_shared_prompts(decoder, sequences, action_mask)
            if shared is not None:
                return shared
        hidden = decoder(sequences, use_cache=False).last_hidden_state  # (B, T, H)
        places = action_mask.flatten().nonzero()[:, 0]
        return hidden[:, :-1].flatten(0, 1)[places], places


def _score_chunk(
    hidden: torch.Tensor, targets: torch.Tensor, head: nn.Module, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = head(hidden).float() / temperature  # (n, V); float32 also where the model runs in bfloat16
    log_z = logits.logsumexp(dim=-1)  # (n,)
    log_probs = logits.gather(-1, targets[:, None])[:, 0] - log_z
    with torch.no_grad():
        entropy = log_z - ((logits - log_z[:, None]).exp() * logits).sum(dim=-1)  # H = log Z - E[z]
    return log_probs, entropy


@torch.no_grad()
def score(policy: Policy, experience: Experience, micro_batch_size: int) -> TokenScores:
    """Score all action tokens of `experience` without gradient, a few rows at a time: two (B, T-1) tensors."""
    log_probs = torch.zeros_like(experience.sampler_log_probs)
    entropy = torch.zeros_like(log_probs)
    for rows in experience.micro_batch_rows(micro_batch_size):
        part = experience.select(rows)
        scores = policy(part.sequences, part.action_mask)
        width = scores.log_probs.shape[1]
        log_probs[rows, :width], entropy[rows, :width] = scores
    return TokenScores(log_probs, entropy)
