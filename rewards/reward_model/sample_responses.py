"""Sample responses to prompts: the raw material of preference pairs.

    python rewards/reward_model/sample_responses.py                                  # the bundled policy and task
    python rewards/reward_model/sample_responses.py --model Qwen/Qwen2.5-0.5B-Instruct --prompts wild.jsonl
    python rewards/reward_model/sample_responses.py --url http://127.0.0.1:8000 --task gsm8k --data train.jsonl
    python rewards/reward_model/sample_responses.py --shard 1/4 --output part1.jsonl      # then 2/4, ...

One row per prompt: {"index": 0, "prompt": text or messages, "responses": [{"text": ..., "finish_reason": "stop" or
"length", "rewards": {...}, "style": {...}}, ...]}. Rewards and style come from the task. With --prompts, turns of
the assistant at the end of a prompt are dropped, and the field `conversation` of a row is kept.

The same command continues a file that was interrupted. Shards, one after the other, are the complete file, row for row.
Next: score_responses.py, then make_pairs.py.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
import functools

import torch

from harness.base.config import shown
from harness.base.terminal import say
from harness.cli.parse import parse_config
from harness.data.growing_file import grow
from harness.run.start import run_main
from harness.task.responses import DEFAULTS, Prompt, make_responder, read_prompts
from harness.task.responses import ResponseConfig as Config
from harness.task.task import Task


def main(argv: list[str] | None = None) -> None:
    config = parse_config(Config, argv, description=__doc__, resolved=DEFAULTS)
    torch.set_num_threads(config.threads)
    prompts, task = read_prompts(config)
    responder = functools.cache(lambda: make_responder(config, prompts))  # not loaded if nothing is left to do

    def make(batch: list[Prompt]) -> list[dict]:
        answers = responder()(batch)
        if task is not None:  # slow judging runs in parallel
            asked = [(prompt.row, text) for prompt, some in zip(batch, answers, strict=True) for text, _ in some]
            task.file.prepare([row for row, _ in asked], [text for _, text in asked])
        rows = []
        for prompt, responses in zip(batch, answers, strict=True):
            kept = {"conversation": prompt.row["conversation"]} if "conversation" in prompt.row else {}
            found = [response._asdict() | described(task, prompt, response.text) for response in responses]
            rows.append({"index": prompt.index, "prompt": prompt.shown, **kept, "responses": found})
        return rows

    path = grow(config, prompts, config.batch_size, make)
    say(f"responses: {shown(path)}")


def described(task: Task | None, prompt: Prompt, text: str) -> dict:
    """The task's description of a response."""
    if task is None:
        return {}
    rewards, style = task.reward(prompt.row, text), task.describe(prompt.row, text)
    return {"rewards": rewards} | ({"style": style} if style else {})


if __name__ == "__main__":
    run_main(main)
