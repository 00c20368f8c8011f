"""GRPO with several ranks, here a list in one process: each has a part of the rows, and the gradients are averaged.

The policy is a table of logits by (previous token, next token), so that its gradient is small enough to read.
"""

import torch

VOCABULARY, END, LENGTH, QUESTIONS, GROUP = 6, 0, 8, 4, 8
WANTED = 2  # tokens before the end


def all_reduce(parts: list[torch.Tensor], op: str = "sum") -> list[torch.Tensor]:
    """Each rank gives a tensor; each rank gets the sum, or the mean, of all of them."""
    total = torch.stack(parts).sum(dim=0)
    return [total / len(parts) if op == "mean" else total for _ in parts]


def sample(table: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, (B, 1 + LENGTH), of which the first is the question; and a mask of what was drawn, (B, LENGTH)."""
    questions = torch.arange(1, QUESTIONS + 1).repeat_interleave(GROUP)
    ids, masks = questions[:, None], []
    alive = torch.ones(len(questions), dtype=torch.bool)
    for _ in range(LENGTH):
        token = torch.multinomial(table[ids[:, -1]].softmax(-1), 1, generator=generator)[:, 0]
        masks.append(alive)
        ids = torch.cat([ids, token.where(alive, END)[:, None]], dim=1)
        alive = alive & (token != END)
    return ids, torch.stack(masks, dim=1).float()


def rewards_of(mask: torch.Tensor) -> torch.Tensor:
    """A completion of WANTED tokens and the end earns 1, and less the further its length is away; (B,)."""
    return 1 - (mask.sum(1) - 1 - WANTED).abs() / LENGTH


def advantages_of(rewards: torch.Tensor) -> torch.Tensor:
    """Each completion is compared with its group; (B,)."""
    rewards = rewards.view(-1, GROUP)
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()


def loss_of(table: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """The sum over tokens; a row of advantages for each row of ids."""
    log_probs = table.log_softmax(-1)[ids[:, :-1], ids[:, 1:]]
    return -(log_probs * advantages[:, None] * mask).sum()


def gradient(
    table: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor, ranks: int
) -> torch.Tensor:
    """The gradient, by the table, of the mean over all tokens of the batch; computed by `ranks` ranks, and the same
    for any number of them."""
    rows_of = [slice(rank * len(ids) // ranks, (rank + 1) * len(ids) // ranks) for rank in range(ranks)]
    tokens = all_reduce([mask[rows].sum() for rows in rows_of])[0]
    parts = []
    for rows in rows_of:
        leaf = table.clone().requires_grad_()
        loss = loss_of(leaf, ids[rows], mask[rows], advantages[rows]) / tokens
        parts.append(torch.autograd.grad(loss, leaf)[0])
    return all_reduce(parts)[0]


def train(seed: int, steps: int, ranks: int) -> dict:
    """Of each step: the norm of the gradient, and the mean reward."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(VOCABULARY, VOCABULARY)
    log = {"norm": [], "reward": []}
    for _ in range(steps):
        ids, mask = sample(table, generator)
        rewards = rewards_of(mask)
        step = gradient(table, ids, mask, advantages_of(rewards), ranks)
        log["norm"].append(step.norm().item())
        log["reward"].append(rewards.mean().item())
        table = table - 4.0 * step
    return log


if __name__ == "__main__":
    logs = {ranks: train(seed=0, steps=40, ranks=ranks) for ranks in (1, 2, 4)}
    for step in (0, 1, 4, 19, 39):
        cells = [f"{ranks}: {log['norm'][step]:.4f} {log['reward'][step]:.3f}" for ranks, log in logs.items()]
        print(f"step {step + 1:2}, ranks: norm reward | " + " | ".join(cells))
