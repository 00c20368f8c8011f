# says: The wrong factor is detached
"""Say the three digits of a question in reverse, then stop: CISPO for a tiny policy."""

import torch
from torch import nn

NUM_DIGITS, MAX_TOKENS = 3, 8  # of a question, of an answer
END = 10  # ends an answer, and fills the row behind it; tokens 0 to 9 are the digits
NUM_QUESTIONS, GROUP_SIZE = 16, 8
NUM_UPDATES, RATIO_CAP = 4, 1.28  # updates per rollout, the largest weight of a token


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
def sample(policy: Policy, questions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens (B, T), the log-probs (B, T-1) of those behind the first, and action_mask (B, T): 1 on sampled tokens."""
    tokens, alive = questions, torch.ones(len(questions), 1, dtype=torch.long)
    mask = torch.zeros_like(questions)
    for _ in range(MAX_TOKENS):
        drawn = torch.multinomial(policy(tokens)[:, -1].softmax(dim=-1), 1)
        drawn = torch.where(alive == 1, drawn, END)
        tokens, mask = torch.cat([tokens, drawn], dim=1), torch.cat([mask, alive], dim=1)
        alive = alive * (drawn != END)
    return tokens, log_probs_of(policy, tokens), mask


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
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """CISPO's loss, mean over the action tokens: every token's log-prob by advantage and importance weight.

    The weight is p(token) / p_old(token), and at most RATIO_CAP: it corrects for the older policy that sampled. A token
    at the cap is still trained, with that weight.

    Args:
        log_probs: (B, T-1), of the policy, with gradient.
        old_log_probs: (B, T-1), of the policy that sampled.
        advantages: (B,).
        mask: (B, T-1), 1 on tokens that the policy sampled.
    """
    weight = (log_probs - old_log_probs).exp().clamp(max=RATIO_CAP)
    return -(weight * advantages[:, None] * log_probs.detach() * mask).sum() / mask.sum()


def train(seed: int, steps: int) -> dict[str, list[float]]:
    """What is logged for each step: the mean reward, and the losses of the first and of the last update."""
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    log = {"reward": [], "first_loss": [], "last_loss": []}
    for _ in range(steps):
        questions = torch.randint(0, END, (NUM_QUESTIONS, NUM_DIGITS)).repeat_interleave(GROUP_SIZE, dim=0)
        tokens, old_log_probs, action_mask = sample(policy, questions)
        rewards, losses = rewards_of(tokens), []
        for _ in range(NUM_UPDATES):
            log_probs = log_probs_of(policy, tokens)
            loss = policy_loss(log_probs, old_log_probs, group_advantages(rewards), action_mask[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        log["reward"].append(rewards.mean().item())
        log["first_loss"].append(losses[0])
        log["last_loss"].append(losses[-1])
    return log
