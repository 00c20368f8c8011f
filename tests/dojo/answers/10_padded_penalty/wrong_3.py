# says: each answer has a mean of its own
"""Say the three digits of a question in reverse, then stop: GRPO with a KL penalty for a tiny policy."""

import copy

import torch
from torch import nn

NUM_DIGITS = 3  # of a question
END = 10  # ends an answer, and fills the row behind it; tokens 0 to 9 are the digits
NUM_QUESTIONS, GROUP_SIZE = 16, 8


class Policy(nn.Module):
    """The logits of the next token: a sum over all tokens so far, each with a table of its own."""

    def __init__(self, width: int):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(width, width, END + 1, END + 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, T) tokens; returns (B, T, V), where `[:, t]` is about token t+1."""
        t = torch.arange(tokens.shape[1])
        rows = self.table[t[:, None], t[None, :], tokens[:, None, :]]  # (B, T, T, V)
        return (rows * (t[:, None] >= t[None, :])[:, :, None]).sum(dim=2)


@torch.no_grad()
def sample(policy: Policy, questions: torch.Tensor, room: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (B, T), and action_mask (B, T): 1 on tokens that the policy sampled, the end included."""
    tokens, alive = questions, torch.ones(len(questions), 1, dtype=torch.long)
    mask = torch.zeros_like(questions)
    for _ in range(room):
        drawn = torch.multinomial(policy(tokens)[:, -1].softmax(dim=-1), 1)
        drawn = torch.where(alive == 1, drawn, END)
        tokens, mask = torch.cat([tokens, drawn], dim=1), torch.cat([mask, alive], dim=1)
        alive = alive * (drawn != END)
    return tokens, mask


def rewards_of(tokens: torch.Tensor) -> torch.Tensor:
    """The share of the four right tokens, which are three digits and the end: (B,)."""
    right = torch.nn.functional.pad(tokens[:, :NUM_DIGITS].flip(1), (0, 1), value=END)
    return (tokens[:, NUM_DIGITS : 2 * NUM_DIGITS + 1] == right).float().mean(dim=1)


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Each answer beside the others to its question: (B,)."""
    groups = rewards.view(-1, GROUP_SIZE)
    return ((groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + 1e-4)).flatten()


def log_probs_of(policy: Policy, tokens: torch.Tensor) -> torch.Tensor:
    """Of every token but the first: (B, T-1), where `[:, t]` is about token t+1."""
    return policy(tokens)[:, :-1].log_softmax(dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]


def policy_loss(
    log_probs: torch.Tensor, log_probs_ref: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor, kl_weight: float
) -> torch.Tensor:
    """The mean of `-advantage * log-prob + kl_weight * KL` over the action tokens of the batch.

    The KL of a token is estimated as r - log r - 1, with r = p_ref(token) / p(token).

    Args:
        log_probs: (B, T-1), of the policy.
        log_probs_ref: (B, T-1), of the reference.
        mask: (B, T-1), 1 on tokens that the policy sampled.
        advantages: (B,).
    """
    log_r = log_probs_ref - log_probs
    kl = log_r.exp() - log_r - 1
    surrogate = -(advantages[:, None] * log_probs * mask).sum() / mask.sum()
    return surrogate + kl_weight * ((kl * mask).sum(dim=1) / mask.sum(dim=1)).mean()


def train(seed: int, steps: int, room: int = 8, kl_weight: float = 0.3) -> dict[str, list[float]]:
    """What is logged every ten steps, with `room` for an answer: reward, and KL from the reference in nats a token."""
    torch.manual_seed(seed)
    policy = Policy(NUM_DIGITS + room)
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    log = {"reward": [], "kl": []}
    for step in range(steps):
        questions = torch.randint(0, END, (NUM_QUESTIONS, NUM_DIGITS)).repeat_interleave(GROUP_SIZE, dim=0)
        tokens, action_mask = sample(policy, questions, room)
        rewards, mask = rewards_of(tokens), action_mask[:, 1:]
        log_probs, log_probs_ref = log_probs_of(policy, tokens), log_probs_of(reference, tokens).detach()
        loss = policy_loss(log_probs, log_probs_ref, mask, group_advantages(rewards), kl_weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            log["reward"].append(rewards.mean().item())
            log["kl"].append((((log_probs - log_probs_ref) * mask).sum() / mask.sum()).item())
    return log
