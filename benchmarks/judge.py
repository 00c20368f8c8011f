"""Does a judge agree with the truth, before and after a policy is trained against it: docs/without_a_verifier.md.

    python benchmarks/judge.py --model smollm2 --judge-model smollm2 --name before
    python benchmarks/judge.py --model runs/experiment_base/short/checkpoints/step_31 --judge-model smollm2 --name after

Samples answers to prompts with instructions that a program checks, and asks the judge several questions about each.
The agreement is the area under the ROC curve: how often a right answer has a higher verdict than a wrong one.
Adds to benchmarks/results/judge/agreement.json.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import correlation, mean

import torch
import tyro

from common.chat import decode, encode_prompt
from common.sampling import sample
from tasks import instructions

from harness.base.config import ROOT, ModelConfig, RunConfig
from harness.base.files import replace_file
from harness.base.machine import describe_machine
from harness.models.loading import load_policy
from harness.task.rubric import Criterion, Rubric, ask_here, read_rubric

RESULTS = ROOT / "benchmarks" / "results" / "judge" / "agreement.json"
DATA = ROOT / "data" / "instructions_short_heldout.jsonl"
SHORT = read_rubric(str(ROOT / "data" / "rubrics" / "short.jsonl"))[0]
QUESTIONS = {
    "follows the request?": ("Request: {prompt}\n\nText: {answer}\n\nDoes the text follow the request?", []),
    "the same, question first": ("Does the text follow the request?\n\nRequest: {prompt}\n\nText: {answer}\n\n", []),
    "a good answer?": ("Request: {prompt}\n\nText: {answer}\n\nIs this a good answer?", []),
    "short, one sentence?": (SHORT.question, []),
    "the same, with four examples": (SHORT.question, SHORT.examples),
    "the same, examples reversed": (SHORT.question, SHORT.examples[::-1]),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    model: str  # the policy
    judge_model: str
    name: str  # of this measurement
    prompts: int = 40  # of the kinds of instructions that training asks for
    answers: int = 4  # to each


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    torch.set_num_threads(1)
    rows = [row for row in map(json.loads, DATA.read_text(encoding="utf-8").splitlines()) if row["split"] == "topics"]
    rows = [row for row in rows[: config.prompts] for _ in range(config.answers)]  # a group's rows are adjacent
    texts = answer(config, rows[:: config.answers])
    rewards = [instructions.reward(row, text) for row, text in zip(rows, texts, strict=True)]
    right = [reward["correct"] for reward in rewards]
    words = [float(len(text.split())) for text in texts]
    asked = [
        [*instructions.messages(row), {"role": "assistant", "content": text}]
        for row, text in zip(rows, texts, strict=True)
    ]
    ask = ask_here(RunConfig(judge_model=config.judge_model, device="cpu", generation_batch_size=64))
    found = {}
    for question, (text, examples) in QUESTIONS.items():
        verdicts = [score["judge"] for score in Rubric([Criterion("judge", 1.0, text, examples)], ask).score(asked)]
        found[question] = {
            "verdict": mean(verdicts), "agreement": auc(verdicts, right), "length": correlation(verdicts, words),
        }  # fmt: skip
        print(question, found[question], flush=True)
    machine = describe_machine()
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    known[config.name] = {
        "commit": machine["commit"], "machine": machine["machine"], "answers": len(texts), "right": mean(right),
        "words": mean(words), "on_topic": mean(reward["on_topic"] for reward in rewards), "questions": found,
        "examples": [[row["prompt"], text] for row, text in zip(rows, texts, strict=True)][:: config.answers],
    }  # fmt: skip
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    replace_file(RESULTS, (json.dumps(known, indent=1) + "\n").encode())


def answer(config: Config, rows: list[dict]) -> list[str]:
    """`config.answers` answers to each prompt, those to one prompt adjacent."""
    policy = load_policy(ModelConfig(model=config.model, device="cpu", dtype="float32"), 1.0, is_frozen=True)
    prompts = [encode_prompt(policy.tokenizer, instructions.messages(row)) for row in rows]
    sampled = sample(
        policy, prompts, config.answers, max_new_tokens=48, key=(0,), prompt_index=list(range(len(rows))),
        top_p=1.0, generation_batch_size=64,
    )  # fmt: skip
    return [decode(policy.tokenizer, one.completion_ids) for one in sampled]


def auc(verdicts: list[float], right: list[float]) -> float:
    """How often a right answer has the higher verdict; a tie counts as half."""
    of_right, of_wrong = (
        [v for v, is_right in zip(verdicts, right, strict=True) if is_right == value] for value in (1, 0)
    )
    wins = [(a > b) + (a == b) / 2 for a in of_right for b in of_wrong]
    return mean(wins)


if __name__ == "__main__":
    main()
