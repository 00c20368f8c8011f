"""Make conversations that teach a policy to read hints, from its own samples: the data of tiny_reader.

    python imitation/self_distill/make_hinted_chats.py
    python imitation/sft/train.py --model tiny --data runs/hinted_chats.jsonl --lora-rank 16 --epochs 3

For each question of a task, G completions are sampled. One conversation is the question and the first completion, right
or wrong: it keeps the policy as it is. Another one, if there are two different right completions, is the question with
one of them as a hint, and the other one as the answer. So a policy that has learned these is, when it is shown a hint,
the same policy given that its answer is right.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from hinted_teacher import hinted_question

from common.chat import decode, encode_prompt
from common.sampling import sample

from harness.base.config import Count, CountOrZero, LocalPath, ModelConfig, OfRun
from harness.base.terminal import say
from harness.cli.parse import parse_config
from harness.data.data import read_rows
from harness.models.loading import load_policy
from harness.run.start import run_main
from harness.task.named_task import task_of


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    task: str = "arithmetic"  # its own training questions are asked
    questions: Count = 2000  # the first so many
    group_size: Count = 8  # G: completions per question
    max_new_tokens: Count = 96  # completion budget in tokens
    seed: CountOrZero = 0
    output: OfRun[LocalPath] = "runs/hinted_chats.jsonl"


def main(argv: list[str] | None = None) -> None:
    config = parse_config(Config, argv, description=__doc__)
    torch.set_num_threads(1)
    task, policy, chooses = task_of(config.task), load_policy(config), random.Random(config.seed)
    rows = read_rows(str(task.train_data), task.fields)[: config.questions]
    chats: list[dict] = []
    for start in range(0, len(rows), 64):
        part = rows[start : start + 64]
        prompts = [encode_prompt(policy.tokenizer, task.messages(row)) for row in part]
        settings = {"max_new_tokens": config.max_new_tokens, "key": (config.seed, start)}
        drawn = sample(policy, prompts, config.group_size, prompt_index=list(range(len(part))), **settings)
        for index, row in enumerate(part):
            group = drawn[index * config.group_size :][: config.group_size]
            texts = [decode(policy.tokenizer, each.completion_ids) for each in group if each.finish_reason == "stop"]
            right = list(dict.fromkeys(text for text in texts if task.reward(row, text)["correct"] == 1))
            question = task.question(row)
            chats += [chat(question, text) for text in texts[:1]]
            if len(right) > 1:
                shown, answer = chooses.sample(right, 2)
                chats.append(chat(hinted_question(question, shown, ""), answer))
    chooses.shuffle(chats)
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in chats), encoding="utf-8")
    say(f"{output}: {len(chats)} conversations about {len(rows)} questions")


def chat(question: str, answer: str) -> dict[str, list[dict]]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


if __name__ == "__main__":
    run_main(main)
