"""A tiny policy learns to count: after the token 3 it should write 4, 5 and 6. GRPO with a KL penalty."""

import copy

import torch
from torch import nn

VOCABULARY, LENGTH, QUESTIONS, GROUP = 9, 3, 8, 8
CLIP, KL_WEIGHT, LEARNING_RATE, UPDATES = 0.2, 0.02, 1e-2, 2


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.gru = nn.GRU(32, 32, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next token: (B, T, V) for ids of (B, T)."""
        hidden, _ = self.gru(self.dropout(self.embedding(ids)))
        return self.head(self.dropout(hidden))


def new_policy(seed: int) -> Policy:
    torch.manual_seed(seed)
    return Policy().train()


def log_probs_of(policy: Policy, ids: torch.Tensor) -> torch.Tensor:
    """Of all tokens but the first, which is the question: (B, T - 1) for ids of (B, T)."""
    policy.eval()
    return policy(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


@torch.no_grad()
def sample(policy: Policy, ids: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids with the question, (B, 1 + LENGTH), and the log-probs of what was drawn, (B, LENGTH)."""
    policy.eval()
    recorded = []
    for _ in range(LENGTH):
        log_probs = policy(ids)[:, -1].log_softmax(-1)
        token = torch.multinomial(log_probs.exp(), 1, generator=generator)
        recorded.append(log_probs.gather(-1, token))
        ids = torch.cat([ids, token], dim=1)
    return ids, torch.cat(recorded, dim=1)


def advantages_of(ids: torch.Tensor) -> torch.Tensor:
    """A completion earns the share of its tokens that count on; (B, 1), compared in groups."""
    rewards = (ids[:, 1:] == (ids[:, :-1] + 1) % VOCABULARY).float().mean(dim=1).view(-1, GROUP)
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)


def loss_of(new: torch.Tensor, old: torch.Tensor, reference: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """The clipped surrogate and the k3 estimate of the KL."""
    ratio = (new - old).exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    kl = (reference - new).exp() - (reference - new) - 1
    return (KL_WEIGHT * kl - surrogate).mean()


def before_the_first_update(seed: int) -> dict:
    """What sampling, training and the reference say about the same tokens, when all three have the same weights."""
    policy = new_policy(seed)
    reference = copy.deepcopy(policy)
    ids, old = sample(policy, torch.arange(2)[:, None], torch.Generator().manual_seed(seed))
    return {"old": old, "new": log_probs_of(policy, ids), "reference": log_probs_of(reference, ids)}


def train(seed: int, steps: int) -> dict:
    """Of each step: the KL and the mean of |ratio - 1| before its first update, and the share of right tokens."""
    policy, generator = new_policy(seed), torch.Generator().manual_seed(seed)
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    log = {"kl": [], "ratio": [], "right": []}
    for _ in range(steps):
        questions = torch.randint(VOCABULARY, (QUESTIONS, 1), generator=generator).repeat_interleave(GROUP, dim=0)
        ids, old = sample(policy, questions, generator)
        for update in range(UPDATES):
            new = log_probs_of(policy, ids)
            with torch.no_grad():
                ref = log_probs_of(reference, ids)
            if update == 0:
                log["kl"].append(((ref - new).exp() - (ref - new) - 1).mean().item())
                log["ratio"].append(((new - old).exp() - 1).abs().mean().item())
                log["right"].append((ids[:, 1:] == (ids[:, :-1] + 1) % VOCABULARY).float().mean().item())
            optimizer.zero_grad()
            loss_of(new, old, ref, advantages_of(ids)).backward()
            optimizer.step()
    return log


if __name__ == "__main__":
    log = train(seed=0, steps=60)
    for step in (0, 1, 4, 19, 59):
        print(f"step {step + 1:2}" + "".join(f"  {name} {values[step]:.3f}" for name, values in log.items()))
