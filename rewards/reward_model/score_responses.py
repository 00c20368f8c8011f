"""Score responses: by a reward model (the judge), or by a reward component of their task.

    python rewards/reward_model/score_responses.py --by correct
    python rewards/reward_model/score_responses.py --reward-model Skywork/Skywork-Reward-V2-Qwen3-0.6B \\
        --answer-begins "</think>"
    python rewards/reward_model/score_responses.py --reward-model-url http://127.0.0.1:8000 --shard 1/4 \\
        --output runs/scored1.jsonl

Every response of the rows of sample_responses.py gets a field `score`. The same command continues a file that was
interrupted; with --shard, the parts in order are the complete file. Next: make_pairs.py.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
import functools
from dataclasses import dataclass
from typing import ClassVar

import torch

from common.errors import UserError

from harness.base.config import Count, InputPath, LocalPath, ModelConfig, NotNegative, OfJudge, OfRun, shown
from harness.base.terminal import say
from harness.cli.parse import parse_config
from harness.data.growing_file import grow
from harness.data.rows import Row
from harness.run.start import run_main
from harness.task.answer_judge import PREFERENCE, Judge, load_judges
from harness.task.responses import as_messages, read_responses


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    FIRST_GROUP: ClassVar[str] = "scores"

    responses: InputPath = "runs/responses.jsonl"  # a file of sample_responses.py
    by: str | None = None  # a reward component of the task, e.g. correct; None: a judge scores
    reward_model: OfJudge[InputPath | None] = None  # the judge: a directory or a hub id
    reward_model_url: OfJudge[str | None] = None  # instead: the address of a vLLM server with a reward model
    # the part of a response that the judge sees: all after this tag, e.g. "</think>"; or a JSON file of tags, or
    # a model's directory with a longcot_config.json
    answer_begins: OfJudge[str | None] = None
    strict: OfJudge[bool] = False  # with --answer-begins: score only responses of exactly one thought and one answer
    no_answer_penalty: OfJudge[NotNegative] = 10.0  # a response without an answer to score gets minus this instead
    shard: OfRun[str] = "1/1"  # make only this part, e.g. 2/4; the parts in order are the complete file
    generation_batch_size: OfRun[Count] = 128  # responses that are scored at the same time
    output: OfRun[LocalPath] = "runs/scored.jsonl"  # a JSONL file, new or to be continued


def main(argv: list[str] | None = None) -> None:
    config = parse_config(Config, argv, description=__doc__, resolved={"tiny": {}, "full": {}})
    torch.set_num_threads(config.threads)
    rows = read_responses(config.responses)
    if (config.by is None) == (config.reward_model is None and config.reward_model_url is None):
        raise UserError("say who scores: --by COMPONENT, --reward-model or --reward-model-url, and only one of them")
    if config.by is not None:
        load_judges(config)  # refuses the flags of a judge
    judge = functools.cache(lambda: load_judges(config)[0])  # not loaded if nothing is left to do

    def score(batch: list[Row]) -> list[dict]:
        if config.by is not None:
            scores = [reward_of(row, response, config.by) for row in batch for response in row["responses"]]
        else:
            scores = judged(judge(), batch)
        left = iter(scores)
        return [
            {**row, "responses": [{**response, "score": next(left)} for response in row["responses"]]} for row in batch
        ]

    size = max(1, config.generation_batch_size // len(rows[0]["responses"]))
    path = grow(config, rows, size, score)
    say(f"scored responses: {shown(path)}")


def reward_of(row: Row, response: dict, component: str) -> float:
    """A reward component that sample_responses.py has written."""
    rewards = response.get("rewards") or {}
    if component not in rewards:
        raise UserError(
            f"{row.place}: a response has no reward {component!r} (there are: {', '.join(rewards) or 'none'})"
        )
    return rewards[component]


def judged(judge: Judge, batch: list[Row]) -> list[float]:
    """The judge's scores; it sees the prompt without the system turn that was meant for the policy."""
    asked = [(as_messages(row["prompt"]), response["text"]) for row in batch for response in row["responses"]]
    scores = judge.score([messages for messages, _ in asked], [text for _, text in asked])
    return [score[PREFERENCE] for score in scores]


if __name__ == "__main__":
    run_main(main)
