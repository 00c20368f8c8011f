# says: the logits of position t predict token t+1
"""Say the three digits of a question in reverse, then stop: GRPO for a tiny policy."""

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
def sample(policy: Policy, questions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (B, T), and action_mask (B, T): 1 on tokens that the policy sampled, the end included."""
    tokens, alive = questions, torch.ones(len(questions), 1, dtype=torch.long)
    mask = torch.zeros_like(questions)
    for _ in range(MAX_TOKENS):
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


def policy_loss(
    logits: torch.Tensor, tokens: torch.Tensor, action_mask: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """Minus the mean of advantage times log-prob, over the action tokens of the batch.

    Args:
        logits: (B, T, V), where `[:, t]` is about token t+1.
        tokens: (B, T).
        action_mask: (B, T), 1 on tokens that the policy sampled.
        advantages: (B,).
    """
    log_probs = logits[:, 1:].log_softmax(dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]  # (B, T-1)
    mask = action_mask[:, 1:]
    return -(advantages[:, None] * log_probs * mask).sum() / mask.sum()


def train(seed: int, steps: int) -> dict[str, list[float]]:
    """What is logged every ten steps: reward, mean number of sampled tokens, and which digits are right."""
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    log = {"reward": [], "length": [], "first": [], "second": [], "third": []}
    for step in range(steps):
        questions = torch.randint(0, END, (NUM_QUESTIONS, NUM_DIGITS)).repeat_interleave(GROUP_SIZE, dim=0)
        tokens, action_mask = sample(policy, questions)
        rewards = rewards_of(tokens)
        loss = policy_loss(policy(tokens), tokens, action_mask, group_advantages(rewards))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            log["reward"].append(rewards.mean().item())
            log["length"].append(action_mask.sum(dim=1).float().mean().item())
            for number, name in enumerate(("first", "second", "third")):
                right = tokens[:, NUM_DIGITS + number] == tokens[:, NUM_DIGITS - 1 - number]
                log[name].append(right.float().mean().item())
    return log
