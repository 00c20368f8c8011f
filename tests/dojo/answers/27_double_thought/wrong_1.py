# says: opens the thought twice
"""GRPO on the form of an answer: a thought, then the answer. One question, and a policy of a few tokens.

The policy is a table of logits by (position, previous token). It begins as a model that was taught the chat template:
after the template's prompt, it mostly goes on with the thought.
"""

import re
from itertools import pairwise

import torch

TOKENS = ["<think>", "</think>", "<answer>", "</answer>", "2 and 3 are 5", "5", "6", "<|end|>"]
OPEN, END, LENGTH, GROUP = TOKENS.index("<think>"), TOKENS.index("<|end|>"), 8, 32
TAUGHT = ["<think>", "2 and 3 are 5", "</think>", "<answer>", "5", "</answer>", "<|end|>"]  # pairs that are likely
QUESTION = [
    {"role": "system", "content": "Think, then answer: <think>a thought</think><answer>a number</answer>"},
    {"role": "user", "content": "What is 2 + 3?"},
]


def render(messages: list[dict], add_generation_prompt: bool) -> str:
    """The chat template of the model, as it was trained with it."""
    text = "".join(f"<|{message['role']}|>{message['content']}<|end|>" for message in messages)
    return text + "<|assistant|><think>" if add_generation_prompt else text


def score(messages: list[dict], completion: str, gold: str) -> dict:
    """The rewards of a completion, which is the text that the policy wrote after the prompt.

    format: 1 if the assistant's turn, from its header to its end, is one <think>...</think> that is not empty, then
    one <answer>...</answer> that is not empty, and nothing else.
    correct: 1 if the text of the only <answer> is the gold answer.
    """
    turn = completion
    is_well_formed = re.fullmatch(r"(?:<think>)?[^<>]+</think><answer>[^<>]+</answer>", turn) is not None
    answers = re.findall(r"<answer>([^<>]*)</answer>", completion)
    return {"format": float(is_well_formed), "correct": float(answers == [gold])}


def new_policy() -> torch.Tensor:
    table = torch.zeros(LENGTH, len(TOKENS), len(TOKENS))
    for before, after in pairwise(TAUGHT):
        table[:, TOKENS.index(before), TOKENS.index(after)] = 3.0
    return table.requires_grad_()


@torch.no_grad()
def sample(table: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Ids that begin with the last token of the prompt: (GROUP, 1 + LENGTH)."""
    assert render(QUESTION, add_generation_prompt=True).endswith(TOKENS[OPEN])
    ids = torch.full((GROUP, 1), OPEN)
    for position in range(LENGTH):
        probs = table[position, ids[:, -1]].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probs, 1, generator=generator)], dim=1)
    return ids


def train(seed: int, steps: int) -> dict:
    """The mean rewards of each step, and the most frequent completion of the last one."""
    generator, table = torch.Generator().manual_seed(seed), new_policy()
    optimizer = torch.optim.Adam([table], lr=0.1)
    log: dict = {"format": [], "correct": [], "sample": ""}
    for _ in range(steps):
        ids = sample(table, generator)
        texts = ["".join(TOKENS[token] for token in row).partition("<|end|>")[0] for row in ids[:, 1:].tolist()]
        scores = [score(QUESTION, text, "5") for text in texts]
        rewards = torch.tensor([each["format"] + each["correct"] for each in scores])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        log_probs = table.log_softmax(-1)[torch.arange(LENGTH), ids[:, :-1], ids[:, 1:]]
        is_end = (ids[:, 1:] == END).long()
        mask = (is_end.cumsum(1) - is_end == 0).float()
        optimizer.zero_grad()
        (-(log_probs * advantages[:, None] * mask).sum() / mask.sum()).backward()
        optimizer.step()
        for name in ("format", "correct"):
            log[name].append(sum(each[name] for each in scores) / GROUP)
        log["sample"] = max(texts, key=texts.count)
    return log


if __name__ == "__main__":
    for steps in (1, 10, 20, 40, 100):
        log = train(seed=0, steps=steps)
        print(f"step {steps:3}  format {log['format'][-1]:.2f}  correct {log['correct'][-1]:.2f}  {log['sample']}")
