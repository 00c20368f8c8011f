"""What reinforcement learning does to SmolLM2 beside the reward: keep and measure the runs of docs/smollm2.md.

    for seed in 0 1; do bash recipes/instructions_smollm2_135m.sh -- --seed $seed --name seed$seed; done
    python benchmarks/smollm2.py runs/experiment_accelerate/seed{0,1}      # 6 minutes on one core

Keeps the runs in benchmarks/results/smollm2/, and writes the entry `smollm2` of measurements.json:

- `held_out`: greedy answers to all 256 held-out prompts, before training and after each run: how many are right, by
  kind of prompt (`split`) and of instruction;
- `base_log_prob`: by run and step, the mean log-probability per token (nats) of the policy's completions under the
  model before training. A run keeps all completions of the first and of each tenth step;
- `rewarded`: by run and step, five of the different prompts whose completions earned the reward, with the completion;
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
from common.logprobs import token_log_probs
from common.loss import masked_mean
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
    result["base_log_prob"], result["rewarded"] = {}, {}
    for run in runs:
        samples = read_samples(run.directory / "samples.jsonl")
        result["base_log_prob"][run.directory.name] = {
            step: base_log_prob(base, entries) for step, entries in samples.items()
        }
        result["rewarded"][run.directory.name] = {
            step: list({entry["question"]: entry["text"] for entry in entries if entry["return"] == 1}.items())[:5]
            for step, entries in samples.items()
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


def read_samples(path: Path) -> dict[int, list[dict]]:
    """The completions of the steps that a run keeps completely, by step."""
    samples = defaultdict(list)
    for entry in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if entry["step"] == 1 or entry["step"] % 10 == 0:
            samples[entry["step"]].append(entry)
    return samples


def base_log_prob(base: Policy, samples: list[dict]) -> float:
    """The mean over all sampled tokens of log p under `base`."""
    fields = ("ids", "prompt_length", "action_mask", "sampler_log_probs", "prompt_index", "completion_index")
    experience = collate([Trajectory(*(entry[field] for field in fields)) for entry in samples], base.pad_id)
    return masked_mean(token_log_probs(base, experience, 8), experience.action_mask).item()


def greedy(policy: Policy, questions: Sequence[str], max_new_tokens: int) -> list[str]:
    prompts = [encode_prompt(policy.tokenizer, [{"role": "user", "content": question}]) for question in questions]
    rows = sample(policy, prompts, 1, max_new_tokens=max_new_tokens, key=(0,), greedy=True, generation_batch_size=64)
    return [decode(policy.tokenizer, row.completion_ids) for row in rows]


if __name__ == "__main__":
    main()
