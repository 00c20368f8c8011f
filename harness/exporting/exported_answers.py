"""Whether what was written answers as what was trained: greedy ids of both, question by question."""

from dataclasses import dataclass
from pathlib import Path

import torch

from common.chat import encode_prompt
from common.policy import Policy
from common.sampling import sample

from harness.base.config import RESOLVED
from harness.base.terminal import say
from harness.exporting.source import Source
from harness.models.pretrained import read_model, read_tokenizer


@dataclass(frozen=True)
class Questions:
    """What both are asked."""

    conversations: list[list[dict]]
    prompts: list[list[int]]  # ids, as in training
    budget: int  # tokens of an answer


def read_questions(source: Source, limit: int, policy: Policy) -> Questions:
    """The first held-out questions of the run's task, with its system turn."""
    task, config = source.load_task(limit)
    conversations = [task.messages(row, config.system_prompt) for row in task.eval_rows]
    budget = source.settings.get("max_new_tokens", RESOLVED["tiny"]["max_new_tokens"])  # experiment_sft has none
    return Questions(conversations, [encode_prompt(policy.tokenizer, turns) for turns in conversations], budget)


def trained_answers(policy: Policy, questions: Questions) -> list[list[int]]:
    """The ids that the sampler of training chooses greedily, of every question."""
    settings = {"max_new_tokens": questions.budget, "key": (0, 0), "greedy": True, "generation_batch_size": 16}
    return [row.completion_ids for row in sample(policy, questions.prompts, 1, **settings)]


@torch.no_grad()
def written_answers(directory: Path, questions: Questions, device: str) -> list[list[int]]:
    """The ids that `generate` of transformers chooses with its default settings, from the directory alone."""
    model = read_model(str(directory), "auto", local_files_only=True, device_map={"": device}).eval()
    found = []
    for prompt in questions.prompts:
        ids = torch.tensor([prompt], device=device)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=questions.budget)
        found.append(output[0, len(prompt) :].tolist())
    return found


def num_equal(trained: list[list[int]], written: list[list[int]]) -> int:
    return sum(one == other for one, other in zip(trained, written, strict=True))


def num_prompts_equal(directory: Path, questions: Questions) -> int:
    """How many questions the written chat template renders as the ids of training; a date in it changes them."""
    tokenizer = read_tokenizer(str(directory), local_files_only=True)
    options = {"add_generation_prompt": True, "return_dict": False}
    rendered = [tokenizer.apply_chat_template(turns, **options) for turns in questions.conversations]
    equal = num_equal(questions.prompts, rendered)
    if equal < len(rendered):
        others = f"{len(rendered) - equal} of {len(rendered)} questions"
        say(f"the chat template renders {others} otherwise: it writes the date, or they spell control tokens")
    return equal
