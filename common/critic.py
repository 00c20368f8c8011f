"""The critic of PPO: a second network that predicts the return of a completion before each of its tokens is sampled.

Shapes: B rows, T tokens, N action tokens, hidden size H; entry `[:, t]` of a (B, T-1) tensor is about token t+1.
"""

import copy
from typing import NamedTuple

import torch
from torch import nn

from common.experience import Experience, MicroBatchSize
from common.policy import Policy
from fast.sharded_weights import gathered_weights


class ActorCriticOutput(NamedTuple):
    log_probs: torch.Tensor  # (B, T-1) nats, with gradient; 0 where the mask is 0
    entropy: torch.Tensor  # (B, T-1) nats, no gradient
    values: torch.Tensor  # (B, T-1) in units of reward, with gradient; 0 where the mask is 0


class ActorCritic(Policy):
    """A policy, the actor, with a critic; both run in one `forward`, so that a wrapper (DDP, FSDP) sees one call.

    The critic is a copy of the policy's decoder with a linear head of one output, which is 0 at first:

        V(t) = w . h(t) + b,    h(t): the hidden state that predicts token t+1, and has not seen it
    """

    def __init__(self, policy: Policy):
        self.take_over(policy)
        head = nn.Linear(self.model.get_output_embeddings().in_features, 1, device=policy.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.critic = nn.ModuleDict({"decoder": copy.deepcopy(self.model.get_decoder()), "head": head})

    def forward(self, sequences: torch.Tensor, action_mask: torch.Tensor) -> ActorCriticOutput:
        """Log-probs, entropy and values at the tokens of `sequences` (B, T) where `action_mask` (B, T-1) is 1."""
        log_probs, entropy = super().forward(sequences, action_mask)
        return ActorCriticOutput(log_probs, entropy, self.values(sequences, action_mask))

    def values(self, sequences: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
        """The values (B, T-1) alone; with gradient only inside `forward`, see `Policy`."""
        self.critic.train(self.gradient_checkpointing and torch.is_grad_enabled())
        with self.autocast():
            hidden, positions = self._hidden_states(sequences, action_mask, self.critic["decoder"])  # (N, H), (N,)
        head = self.critic["head"]
        values = head(hidden.to(head.weight.dtype))[:, 0].float()  # (N,): not rounded to bfloat16
        zeros, width = torch.zeros(action_mask.shape, device=sequences.device), action_mask.shape[1]
        return zeros.index_put((positions // width, positions % width), values)


@torch.no_grad()
def token_values(policy: ActorCritic, experience: Experience, micro_batch_size: int | MicroBatchSize) -> torch.Tensor:
    """The values before all action tokens of `experience` without gradient, a few rows at a time: (B, T-1)."""
    values = torch.zeros_like(experience.sampler_log_probs)
    with gathered_weights(policy.trained):  # ranks have different numbers of rows
        for rows in experience.micro_batch_rows(micro_batch_size):
            part = experience.select(rows)
            values[rows, : part.action_mask.shape[1]] = policy.values(part.sequences, part.action_mask)
    return values
