"""What reinforcement learning does to SmolLM2 beside the reward: keep and measure the runs of docs/smollm2.md.

    for seed in 0 1 2; do bash recipes/instructions_smollm2_135m.sh -- --seed $seed --name seed$seed; done
    python benchmarks/smollm2.py runs/experiment_accelerate/seed{0,1,2}      # 5 minutes on one core

Keeps the runs in benchmarks/results/smollm2/, and writes the entry `smollm2` of measurements.json:

- `held_out`: greedy answers to all 256 held-out prompts, before training and after each run: how many are right, by
  kind of prompt (`split`) and of instruction;
- `base_log_prob`: by run and step, the mean log-probability per token (nats) that the model before training gives to
  what the policy wrote, for each tenth step, of which a run keeps all completions;
- `answers`: of the model before training and after the first run, to ten held-out prompts, and to OTHER, questions
  that nothing rewards.
"""

import json
from collections import Counter, defaultdict
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
from tasks import instructions
from viewer.groups import read_run
from viewer.results import keep_runs, write_json

from harness.base.config import ModelConfig
from harness.models.loading import load_policy
from harness.run.machine import describe_machine

HELD_OUT = instructions.EVAL_DATA.with_name("instructions_short_heldout.jsonl")
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
    max_new_tokens: int = 48  # of an answer to a held-out prompt


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    torch.set_num_threads(1)
    runs = [read_run(directory) for directory in config.runs]
    result = describe_machine()
    keep_runs(RESULTS / "smollm2", runs)
    base = load(runs[0].config["model"])
    result["base_log_prob"] = {
        run.directory.name: base_log_probs(base, run.directory / "samples.jsonl") for run in runs
    }
    rows = [json.loads(line) for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    policies = {"before": base} | {run.directory.name: load(str(run.directory / "final")) for run in runs}
    prompts = [row["prompt"] for row in rows]
    texts = {name: greedy(policy, prompts, config.max_new_tokens) for name, policy in policies.items()}
    result["held_out"] = {name: follow(rows, given) for name, given in texts.items()}
    pair = ("before", runs[0].directory.name)
    others = [greedy(policies[name], OTHER, 64) for name in pair]
    result["answers"] = list(zip(prompts[:10], *(texts[name][:10] for name in pair), strict=True))
    result["answers"] += list(zip(OTHER, *others, strict=True))
    write_json(RESULTS / "measurements.json", result, entry="smollm2")
    for name in ("base_log_prob", "held_out"):
        print(name, json.dumps(result[name], indent=1))
    for row in result["answers"]:
        print("\n   ".join(row))


def load(model: str) -> Policy:
    return load_policy(ModelConfig(model=model, device="cpu", dtype="float32"))


def follow(rows: list[dict], texts: list[str]) -> dict[str, list[int]]:
    """By kind of prompt, how many there are, and how many of the texts follow all instructions."""
    asked, right = Counter(), Counter()
    for row, text in zip(rows, texts, strict=True):
        for name in (row["split"], f"{row['split']}/{row['kind']}"):
            asked[name] += 1
            right[name] += int(instructions.reward(row, text)["correct"])
    return {name: [asked[name], right[name]] for name in sorted(asked)}


def base_log_probs(base: Policy, samples: Path) -> dict[int, float]:
    """By step, of those that samples.jsonl has completely: the mean over all sampled tokens of log p under `base`."""
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


def greedy(policy: Policy, questions: Sequence[str], max_new_tokens: int) -> list[str]:
    prompts = [encode_prompt(policy.tokenizer, [{"role": "user", "content": question}]) for question in questions]
    rows = sample(policy, prompts, 1, max_new_tokens=max_new_tokens, key=(0,), greedy=True, generation_batch_size=64)
    return [decode(policy.tokenizer, row.completion_ids) for row in rows]


if __name__ == "__main__":
    main()
