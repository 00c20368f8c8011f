# says: anywhere after the last =
"""GRPO on sums of 1 to 6, with a policy that cannot see the question: it can only guess, or find another way.

The policy is a table of logits by (position, previous token). A completion ends with "." or after LENGTH tokens.
"""

import torch

TOKENS = [*"123456", "+", "=", "."]
END, LENGTH, QUESTIONS, GROUP = TOKENS.index("."), 12, 8, 16


def text_of(ids: list[int]) -> str:
    """What was written before the end."""
    return "".join(TOKENS[token] for token in ids).partition(".")[0]


def reward(a: int, b: int, completion: str) -> float:
    """1 if the completion answers a + b, and else 0.

    An answer is one "=" with a number after it, and nothing else after the "=". Before the "=" there may be anything,
    for example the terms: "2+3=5". A completion with two "=" gives no answer.
    """
    return float("=" in completion and str(a + b) in completion.rpartition("=")[2])


@torch.no_grad()
def sample(table: torch.Tensor, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Ids with an END before the first token: (rows, 1 + LENGTH)."""
    ids = torch.full((rows, 1), END)
    for position in range(LENGTH):
        probs = table[position, ids[:, -1]].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probs, 1, generator=generator)], dim=1)
    return ids


def train(seed: int, steps: int) -> dict:
    """The mean reward of each step, and the questions and completions of the last one."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(LENGTH, len(TOKENS), len(TOKENS), requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=0.1)
    log: dict = {"reward": [], "samples": []}
    for _ in range(steps):
        sums = torch.randint(1, 7, (QUESTIONS,), generator=generator).repeat_interleave(GROUP).tolist()
        questions = [((total + 1) // 2, total // 2) for total in sums]
        ids = sample(table, len(questions), generator)
        texts = [text_of(row) for row in ids[:, 1:].tolist()]
        rewards = torch.tensor([reward(*pair, text) for pair, text in zip(questions, texts, strict=True)])
        groups = rewards.view(QUESTIONS, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        log_probs = table.log_softmax(-1)[torch.arange(LENGTH), ids[:, :-1], ids[:, 1:]]
        mask = ((ids[:, 1:] == END).cumsum(1) - (ids[:, 1:] == END).long() == 0).float()
        loss = -(log_probs * advantages.view(-1, 1) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log["reward"].append(rewards.mean().item())
        log["samples"] = [f"{a}+{b}: {text}" for (a, b), text in zip(questions, texts, strict=True)]
    return log


if __name__ == "__main__":
    log = train(seed=0, steps=150)
    for step in (1, 25, 50, 100, 150):
        print(f"step {step:3}  reward {sum(log['reward'][max(0, step - 10) : step]) / min(step, 10):.3f}")
    print(*log["samples"][::32], sep="\n")
