"""GRPO on conversations of two questions: the policy should count, "123", after each of them.

The policy is a table of logits by (previous token, next token). "123" can be written with different tokens.
"""

import torch

TOKENS = ["<end>", "<user>", "<bot>", "1", "2", "3", "12", "23", "31", "count"]
IDS = {token: i for i, token in enumerate(TOKENS)}
QUESTIONS, LENGTH, GROUP = ["count", "count3"], 5, 32


def encode(text: str) -> list[int]:
    """The tokenizer: always the longest token that fits."""
    ids = []
    while text:
        token = max((token for token in TOKENS if text.startswith(token)), key=len)
        ids.append(IDS[token])
        text = text[len(token) :]
    return ids


def decode(ids: list[int]) -> str:
    return "".join(TOKENS[i] for i in ids)


def row_of(turns: list[dict]) -> dict:
    """A conversation as the policy saw and wrote it: `ids`, and a `mask` of 1 for the tokens that it wrote.

    A turn of the user has a `text`; a turn of the policy has the `ids` that were sampled, with the end if there is one.
    """
    ids, mask = [], []
    for turn in turns:
        if "ids" in turn:
            for token in turn["ids"]:
                ids.append(token)
                mask.append(1)
        else:
            for token in [IDS["<user>"], *encode(turn["text"]), IDS["<end>"], IDS["<bot>"]]:
                ids.append(token)
                mask.append(0)
    return {"ids": ids, "mask": mask}


def log_prob_of(table: torch.Tensor, row: dict) -> torch.Tensor:
    """Of all tokens that the policy wrote, together."""
    ids, mask = torch.tensor(row["ids"]), torch.tensor(row["mask"][1:])
    return (table.log_softmax(-1)[ids[:-1], ids[1:]] * mask).sum()


@torch.no_grad()
def converse(table: torch.Tensor, generator: torch.Generator) -> tuple[list[dict], float]:
    """The turns of a conversation, and the log-prob of all that was sampled."""
    turns, total, log_probs = [], 0.0, table.log_softmax(-1)
    for question in QUESTIONS:
        turns += [{"text": question}, {"ids": []}]
        token = row_of(turns)["ids"][-1]
        while len(turns[-1]["ids"]) < LENGTH and token != IDS["<end>"]:
            before, token = token, int(torch.multinomial(log_probs[token].exp(), 1, generator=generator))
            turns[-1]["ids"].append(token)
            total += log_probs[before, token].item()
    return turns, total


def train(seed: int, steps: int) -> dict:
    """Of each step: the reward, tokens sampled and trained, and |log-prob in training - log-prob in sampling|."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(len(TOKENS), len(TOKENS), requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=0.1)
    log: dict = {"reward": [], "sampled": [], "trained": [], "difference": []}
    for _ in range(steps):
        turns, sampled = zip(*(converse(table, generator) for _ in range(GROUP)), strict=True)
        answers = [[turn["ids"] for turn in each if "ids" in turn] for each in turns]
        rewards = torch.tensor([sum(decode(ids) == "123<end>" for ids in each) / len(QUESTIONS) for each in answers])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        rows = [row_of(each) for each in turns]
        log_probs = torch.stack([log_prob_of(table, row) for row in rows])
        optimizer.zero_grad()
        (-(log_probs * advantages).mean()).backward()
        optimizer.step()
        log["reward"].append(rewards.mean().item())
        log["sampled"].append(sum(len(ids) for each in answers for ids in each) / GROUP)
        log["trained"].append(sum(sum(row["mask"]) for row in rows) / GROUP)
        log["difference"].append((log_probs.detach() - torch.tensor(sampled)).abs().mean().item())
    return log


if __name__ == "__main__":
    log = train(seed=0, steps=60)
    for step in (1, 10, 20, 30, 60):
        print(f"step {step:2}" + "".join(f"  {name} {values[step - 1]:.2f}" for name, values in log.items()))
