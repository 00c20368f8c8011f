"""Make conversations to imitate: answers of a strong served model, or of your own policy, for train.py.

    python imitation/sft/make_chats.py --url http://127.0.0.1:8000 --prompts prompts.jsonl --thoughts drop
    python imitation/sft/make_chats.py --url http://127.0.0.1:8000 --task gsm8k --data train.jsonl --keep-right
    python imitation/sft/make_chats.py --model tiny --num-samples 8 --keep-right         # rejection sampling
    python imitation/sft/train.py --model Qwen/Qwen2.5-0.5B --data chats.jsonl

A row is {"index": 0, "messages": [...]}: the prompt, without --system-prompt, and one answer. An answer is kept if it
has ended by itself and is not only a thought; --keep-right also asks for the reward `correct` = 1 of the task. The
first usable one of the --num-samples answers to a prompt is kept. `--served-model` names one of a server's models; its
key is read from VLLM_API_KEY.

The same command continues a file that was interrupted. Shards, one after the other, are the complete file, row for row.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
import functools
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch

from common.errors import UserError

from harness.base.config import Count, LocalPath, OfRun, shown
from harness.base.terminal import say
from harness.cli.parse import parse_config
from harness.data.growing_file import grow
from harness.data.thoughts import answer_of, read_format
from harness.run.start import run_main
from harness.task.responses import (
    DEFAULTS,
    Prompt,
    Response,
    ResponseConfig,
    as_messages,
    make_responder,
    read_prompts,
)


@dataclass(frozen=True, kw_only=True)
class Config(ResponseConfig):
    num_samples: Count = 1  # answers per prompt; the first usable one is kept
    thoughts: Literal["keep", "drop"] = "keep"  # keep or drop the thoughts in the answers
    # an answer begins after this tag, which ends its thought; or a JSON file of tags, or a model's directory
    answer_begins: str = "</think>"
    keep_right: bool = False  # only answers with the reward correct = 1
    output: OfRun[LocalPath] = "runs/chats.jsonl"  # a JSONL file, new or to be continued


def main(argv: list[str] | None = None) -> None:
    config = parse_config(Config, argv, description=__doc__, resolved=DEFAULTS)
    torch.set_num_threads(config.threads)
    tags = read_format(config.answer_begins)
    prompts, task = read_prompts(config)
    if config.keep_right and (task is None or "correct" not in task.scorer.weights):
        raise UserError("--keep-right needs a task with a reward component 'correct': give --task, and not --prompts")
    responder = functools.cache(lambda: make_responder(config, prompts))  # not loaded if nothing is left to do
    outcomes: Counter[str] = Counter()

    def kept(prompt: Prompt, response: Response) -> str | None:
        """The answer to imitate; None if it is not usable."""
        if response.finish_reason != "stop":
            return None
        answer = answer_of(response.text, tags)
        if answer is None or (config.keep_right and task.reward(prompt.row, response.text)["correct"] != 1):
            return None
        return answer if config.thoughts == "drop" else response.text

    def make(batch: list[Prompt]) -> list[dict]:
        rows, found = [], responder()(batch)
        if config.keep_right:  # slow judging runs in parallel
            asked = [(prompt.row, text) for prompt, some in zip(batch, found, strict=True) for text, _ in some]
            task.file.prepare([row for row, _ in asked], [text for _, text in asked])
        for prompt, responses in zip(batch, found, strict=True):
            answers = (kept(prompt, response) for response in responses)
            answer = next((answer for answer in answers if answer is not None), None)
            outcomes["left out" if answer is None else "kept"] += 1
            if answer is not None:
                messages = [*as_messages(prompt.shown), {"role": "assistant", "content": answer}]
                rows.append({"index": prompt.index, "messages": messages})
        return rows

    path = grow(config, prompts, config.batch_size, make)
    say(f"conversations: {shown(path)}; now kept {outcomes['kept']}, left out {outcomes['left out']}")


if __name__ == "__main__":
    run_main(main)
