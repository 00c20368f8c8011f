# says: A price for long answers changes the task and cannot help
"""Say the three digits of a question in reverse, then stop: a tiny policy learns from its best answers."""

import torch
from torch import nn

NUM_DIGITS, MAX_TOKENS = 3, 8  # of a question, of an answer
END = 10  # ends an answer, and fills the row behind it; tokens 0 to 9 are the digits
NUM_QUESTIONS, GROUP_SIZE = 16, 8


class Policy(nn.Module):
    """The logits of the next token: a sum over all tokens so far, each with a table of its own."""

    def __init__(self):
        super().__init__()
        width = NUM_DIGITS + MAX_TOKENS
        self.table = nn.Parameter(torch.zeros(width, width, END + 1, END + 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, T) tokens; returns (B, T, V), where `[:, t]` is about token t+1."""
        t = torch.arange(tokens.shape[1])
        rows = self.table[t[:, None], t[None, :], tokens[:, None, :]]  # (B, T, T, V)
        return (rows * (t[:, None] >= t[None, :])[:, :, None]).sum(dim=2)


@torch.no_grad()
def sample(policy: Policy, questions: torch.Tensor) -> torch.Tensor:
    """Tokens (B, T): the question, the answer, and END behind it."""
    tokens, has_ended = questions, torch.zeros(len(questions), 1, dtype=torch.bool)
    for _ in range(MAX_TOKENS):
        drawn = torch.multinomial(policy(tokens)[:, -1].softmax(dim=-1), 1)
        tokens = torch.cat([tokens, drawn.masked_fill(has_ended, END)], dim=1)
        has_ended = tokens[:, -1:] == END
    return tokens


def action_mask_of(tokens: torch.Tensor) -> torch.Tensor:
    """1 on tokens that the policy sampled, 0 on the question and on padding: (B, T)."""
    mask = (tokens != END).long()
    mask[:, :NUM_DIGITS] = 0
    return mask


def rewards_of(tokens: torch.Tensor) -> torch.Tensor:
    """The share of the four right tokens, which are three digits and the end: (B,)."""
    right = torch.nn.functional.pad(tokens[:, :NUM_DIGITS].flip(1), (0, 1), value=END)
    share = (tokens[:, NUM_DIGITS : 2 * NUM_DIGITS + 1] == right).float().mean(dim=1)
    return share - 0.1 * (tokens[:, 2 * NUM_DIGITS :] != END).sum(dim=1)


def best_of_group(rewards: torch.Tensor) -> torch.Tensor:
    """1 for the best answers to each question, 0 for the others: (B,)."""
    groups = rewards.view(-1, GROUP_SIZE)
    return (groups == groups.amax(dim=1, keepdim=True)).float().flatten()


def policy_loss(
    logits: torch.Tensor, tokens: torch.Tensor, action_mask: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Minus the mean of weight times log-prob, over the action tokens of the batch.

    Args:
        logits: (B, T, V), where `[:, t]` is about token t+1.
        tokens: (B, T).
        action_mask: (B, T), 1 on tokens that the policy sampled.
        weights: (B,).
    """
    log_probs = logits[:, :-1].log_softmax(dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]  # (B, T-1)
    mask = action_mask[:, 1:]
    return -(weights[:, None] * log_probs * mask).sum() / mask.sum()


def train(seed: int, steps: int) -> dict[str, list[float]]:
    """What is logged every ten steps: the mean reward, number of digits in an answer, and share of answers that end."""
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    log = {"reward": [], "length": [], "ended": []}
    for step in range(steps):
        questions = torch.randint(0, END, (NUM_QUESTIONS, NUM_DIGITS)).repeat_interleave(GROUP_SIZE, dim=0)
        tokens = sample(policy, questions)
        action_mask = action_mask_of(tokens)
        rewards = rewards_of(tokens)
        loss = policy_loss(policy(tokens), tokens, action_mask, best_of_group(rewards))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            log["reward"].append(rewards.mean().item())
            log["length"].append((tokens[:, NUM_DIGITS:] != END).sum(dim=1).float().mean().item())
            log["ended"].append((tokens[:, -1] == END).float().mean().item())
    return log
