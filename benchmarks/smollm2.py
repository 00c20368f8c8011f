"""The side effects of reinforcement learning on SmolLM2: keep and measure the runs of docs/smollm2.md.

    for seed in 0 1 2; do bash recipes/instructions_smollm2_135m.sh -- --seed $seed --name seed$seed; done
    bash recipes/instructions_smollm2_135m.sh -- --kl-weight 0.02 --name kl002
    python benchmarks/smollm2.py runs/experiment_accelerate/{seed0,seed1,seed2,kl002}      # 5 minutes on one core

Keeps the runs in benchmarks/results/smollm2/. To every tenth step whose completions a run has kept completely, it adds
`base_log_prob`: the mean log-probability per token (nats) of the sampled text under the model before training. The
first run's answers to OTHER, questions without a reward, go to the entry `smollm2` of measurements.json, with the
answers of the model before training.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from common.chat import decode, encode_prompt
from common.experience import collate
from common.policy import Policy
from common.sampling import sample
from common.trajectory import Trajectory
from viewer.groups import read_run
from viewer.results import KeptRun, keep_runs, write_json

from harness.base.config import ModelConfig
from harness.models.loading import load_policy
from harness.run.machine import describe_machine

RESULTS = Path(__file__).resolve().parent / "results"
OTHER = (
    "What is the capital of France?",
    "Who wrote Romeo and Juliet?",
    "What do bees make?",
    "How many days has a week?",
    "What is 2 + 3?",
    "Name three colors.",
    "Give me a recipe for pancakes.",
    "How do I boil an egg?",
    "Why is the sky blue?",
    "Explain what a computer is to a child.",
    "Write a short poem about the sea.",
    "Tell me a joke.",
    "Write an email to my teacher: I am ill today.",
    "What should I do when I cannot sleep?",
    "Translate into French: Good morning.",
    "Give me a synonym of happy.",
    "What is the opposite of hot?",
    "Tell me about the history of Rome.",
    "What is photosynthesis?",
    "Hello! How are you?",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # directories
    max_new_tokens: int = 64  # of an answer to OTHER


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    torch.set_num_threads(1)
    runs = [read_run(directory) for directory in config.runs]
    base = load_policy(ModelConfig(model=runs[0].config["model"], device="cpu", dtype="float32"))
    kept = []
    for run in runs:
        found = base_log_probs(base, run.directory / "samples.jsonl")
        rows = [
            row | {"base_log_prob": found[row["step"]]} if "time/step" in row and row["step"] in found else row
            for row in run.metrics.rows
        ]
        kept.append(KeptRun(run.directory, run.config, run.summary, rows))
        print(run.directory.name, {step: round(value, 2) for step, value in found.items()})
    keep_runs(RESULTS / "smollm2", kept)
    trained = load_policy(ModelConfig(model=str(config.runs[0] / "final"), device="cpu", dtype="float32"))
    before, after = (answers(policy, config.max_new_tokens) for policy in (base, trained))
    result = describe_machine() | {"run": config.runs[0].name, "max_new_tokens": config.max_new_tokens}
    result["answers"] = [list(row) for row in zip(OTHER, before, after, strict=True)]
    write_json(RESULTS / "measurements.json", result, entry="smollm2")
    for row in result["answers"]:
        print("\n   ".join(row))


def base_log_probs(base: Policy, samples: Path) -> dict[int, float]:
    """For each step that samples.jsonl has completely: the mean over all sampled tokens of log p under `base`."""
    rows = defaultdict(list)
    for line in samples.read_text(encoding="utf-8").splitlines():
        sampled = json.loads(line)
        if sampled["step"] == 1 or sampled["step"] % 10 == 0:
            fields = ("ids", "prompt_length", "action_mask", "sampler_log_probs", "prompt_index", "completion_index")
            rows[sampled["step"]].append(Trajectory(*(sampled[field] for field in fields)))
    found = {}
    for step, trajectories in rows.items():
        total, count = 0.0, 0
        for micro in collate(trajectories, base.pad_id, base.device).split(8):
            with torch.inference_mode():
                log_probs, _ = base(micro.sequences, micro.action_mask)
            mask = micro.action_mask.bool()
            total, count = total + log_probs[mask].sum().item(), count + mask.sum().item()
        found[step] = total / count
    return found


def answers(policy: Policy, max_new_tokens: int) -> list[str]:
    """Greedy answers to the questions in OTHER."""
    prompts = [encode_prompt(policy.tokenizer, [{"role": "user", "content": question}]) for question in OTHER]
    rows = sample(policy, prompts, 1, max_new_tokens=max_new_tokens, key=(0,), greedy=True)
    return [decode(policy.tokenizer, row.completion_ids) for row in rows]


if __name__ == "__main__":
    main()
