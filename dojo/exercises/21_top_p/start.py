"""Say the three digits of a question in reverse, then stop: GRPO with samples from a top-p nucleus."""

import torch
from torch import nn

NUM_DIGITS, MAX_TOKENS = 3, 8  # of a question, of an answer
END = 10  # ends an answer, and fills the row behind it; tokens 0 to 9 are the digits
NUM_QUESTIONS, GROUP_SIZE = 16, 8
NUM_UPDATES, CLIP_EPS = 4, 0.2  # updates per rollout
TOP_P = 0.7  # sampling leaves out the least probable tokens


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


def nucleus(log_probs: torch.Tensor) -> torch.Tensor:
    """Which tokens form the smallest set with at least TOP_P of the probability: (B, V) bool."""
    ordered, order = log_probs.exp().sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered  # the probability of all tokens that are more probable
    return torch.zeros_like(log_probs, dtype=torch.bool).scatter(-1, order, before < TOP_P)


def draw(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token of the nucleus for each row of logits (B, V); returns tokens (B, 1) and their log-probs (B, 1)."""
    log_probs = logits.log_softmax(dim=-1)
    kept = log_probs.masked_fill(~nucleus(log_probs), -torch.inf)
    tokens = torch.multinomial(kept.softmax(dim=-1), 1)
    return tokens, kept.log_softmax(dim=-1).gather(-1, tokens)


@torch.no_grad()
def sample(policy: Policy, questions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens (B, T); old log-probs and mask (B, T-1), where `[:, t]` is about token t+1: 1 if it was sampled."""
    tokens, alive = questions, torch.ones(len(questions), 1, dtype=torch.long)
    old_log_probs, mask = torch.zeros(len(questions), NUM_DIGITS - 1), torch.zeros_like(questions)[:, 1:]
    for _ in range(MAX_TOKENS):
        drawn, log_probs = draw(policy(tokens)[:, -1])
        drawn = torch.where(alive == 1, drawn, END)
        tokens, mask = torch.cat([tokens, drawn], dim=1), torch.cat([mask, alive], dim=1)
        old_log_probs = torch.cat([old_log_probs, log_probs], dim=1)
        alive = alive * (drawn != END)
    return tokens, old_log_probs, mask


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


def policy_loss(ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """PPO's clipped surrogate, mean over the action tokens: ratio and mask (B, T-1), advantages (B,)."""
    clipped = ratio.clamp(1 - CLIP_EPS, 1 + CLIP_EPS)
    surrogate = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    return -(surrogate * mask).sum() / mask.sum()


def train(seed: int, steps: int) -> dict[str, list[float]]:
    """What is logged for each step.

    reward: the mean over the rollout.
    first_ratio: the mean ratio of the action tokens in the first update.
    first_outside, last_outside: the share of ratios out of the clip's range, in the first and in the last update.
    """
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    log = {"reward": [], "first_ratio": [], "first_outside": [], "last_outside": []}
    for _ in range(steps):
        questions = torch.randint(0, END, (NUM_QUESTIONS, NUM_DIGITS)).repeat_interleave(GROUP_SIZE, dim=0)
        tokens, old_log_probs, mask = sample(policy, questions)
        rewards, ratios = rewards_of(tokens), []
        for _ in range(NUM_UPDATES):
            ratio = (log_probs_of(policy, tokens) - old_log_probs).exp()
            loss = policy_loss(ratio, group_advantages(rewards), mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ratios.append(ratio.detach()[mask == 1])
        log["reward"].append(rewards.mean().item())
        log["first_ratio"].append(ratios[0].mean().item())
        log["first_outside"].append(((ratios[0] - 1).abs() > CLIP_EPS).float().mean().item())
        log["last_outside"].append(((ratios[-1] - 1).abs() > CLIP_EPS).float().mean().item())
    return log
