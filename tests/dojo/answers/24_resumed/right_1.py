"""A run that is stopped after some steps, and goes on from its checkpoint as if nothing had happened.

GRPO with a policy that is a table of logits by (position, previous token): it should write tokens that count down.
"""

import copy

import torch

VOCABULARY, LENGTH, GROUP = 8, 4, 16
LEARNING_RATE = 0.05


def new_run(seed: int) -> tuple[torch.Tensor, torch.optim.Optimizer, torch.Generator]:
    """The table of logits, its optimizer, and the generator of all samples."""
    table = torch.zeros(LENGTH, VOCABULARY, VOCABULARY, requires_grad=True)
    optimizer = torch.optim.AdamW([table], lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    return table, optimizer, torch.Generator().manual_seed(seed)


def save(table: torch.Tensor, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> dict:
    """A checkpoint; what changes in the run afterwards does not change it."""
    moments = dict(optimizer.state[table])
    return copy.deepcopy({"table": table.detach(), "generator": generator.get_state(), "moments": moments})


def resume(checkpoint: dict) -> tuple[torch.Tensor, torch.optim.Optimizer, torch.Generator]:
    """A run in a new process, with everything from the checkpoint."""
    table, optimizer, generator = new_run(seed=0)
    with torch.no_grad():
        table.copy_(checkpoint["table"])
    optimizer.state[table].update(copy.deepcopy(checkpoint["moments"]))
    generator.set_state(checkpoint["generator"])
    return table, optimizer, generator


@torch.no_grad()
def sample(table: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A group of completions after a random first token: (GROUP, 1 + LENGTH)."""
    ids = torch.randint(VOCABULARY, (1, 1), generator=generator).repeat(GROUP, 1)
    for position in range(LENGTH):
        probs = table[position, ids[:, -1]].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probs, 1, generator=generator)], dim=1)
    return ids


def step(table: torch.Tensor, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> dict:
    """One update; the mean reward before it, and how far it moves the table."""
    ids = sample(table, generator)
    rewards = (ids[:, 1:] == (ids[:, :-1] - 1) % VOCABULARY).float().mean(dim=1)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    log_probs = table.log_softmax(-1)[torch.arange(LENGTH), ids[:, :-1], ids[:, 1:]]
    before = table.detach().clone()
    optimizer.zero_grad()
    (-(log_probs * advantages[:, None]).mean()).backward()
    optimizer.step()
    return {"reward": rewards.mean().item(), "moved": (table.detach() - before).norm().item()}


def train(seed: int, steps: int, stop_after: int | None = None) -> dict:
    """What each step logs; with `stop_after`, the run is stopped after that step and resumed."""
    table, optimizer, generator = new_run(seed)
    log = {"reward": [], "moved": []}
    for number in range(1, steps + 1):
        for name, value in step(table, optimizer, generator).items():
            log[name].append(value)
        if number == stop_after:
            table, optimizer, generator = resume(save(table, optimizer, generator))
    return log


if __name__ == "__main__":
    runs = [train(seed=1, steps=300), train(seed=1, steps=300, stop_after=200)]
    for number in (1, 200, 201, 202, 203, 300):
        cells = [f"reward {run['reward'][number - 1]:.3f} moved {run['moved'][number - 1]:.3f}" for run in runs]
        print(f"step {number:3} | whole: {cells[0]} | stopped after 200: {cells[1]}")
