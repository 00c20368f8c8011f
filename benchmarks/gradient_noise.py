"""How noisy the gradient of one rollout is under each baseline: the benefit of a group of completions.

    python benchmarks/gradient_noise.py                              # the bundled policy; 4 minutes on one core
    python benchmarks/gradient_noise.py --model runs/reinforce/<name>/final --entry gradient_noise_after

A rollout is 128 completions: one for each of 128 questions, or eight for each of 16. Its gradient is the gradient of
the mean over completions of the sum over tokens of -A log p, with A = R - baseline. Over `--rollouts` rollouts of a
seed,

    noise = sum of the variances of the gradient's entries / squared norm of its mean

which is how many rollouts one would have to average for as much signal as noise. The squared norm is corrected for the
noise that remains in the mean. Writes an entry of benchmarks/results/measurements.json.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
import tyro

from common.advantages import group_advantages
from common.chat import decode, encode_prompt
from common.experience import collate
from common.policy import Policy
from common.sampling import sample
from tasks import arithmetic as task
from viewer.results import write_json

from harness.base.config import RunConfig
from harness.base.machine import describe_machine
from harness.data.data import read_rows
from harness.data.order import prompts_of_step
from harness.models.loading import load_policy

RESULTS = Path(__file__).resolve().parent / "results" / "measurements.json"
COMPLETIONS, GROUP_SIZE = 128, 8


@dataclass(frozen=True, kw_only=True)
class Config:
    model: str = "tiny"  # the bundled policy, or a directory
    entry: str = "gradient_noise"  # of measurements.json
    rollouts: int = 16  # per seed and way of sampling
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    torch.set_num_threads(1)
    policy = load_policy(RunConfig(model=config.model, device="cpu", dtype="float32", attn_implementation="sdpa"))
    rows = read_rows(str(task.TRAIN_DATA), task.FIELDS)
    by_seed = {seed: measure(policy, rows, seed, config.rollouts) for seed in config.seeds}
    names = by_seed[config.seeds[0]]
    result = {"model": config.model, "rollouts": config.rollouts, "seeds": config.seeds} | describe_machine()
    result |= {"noise": {name: [found[name] for found in by_seed.values()] for name in names}}
    write_json(RESULTS, result, entry=config.entry)
    for name, values in result["noise"].items():
        print(f"{name:26} {mean(values):8.2f}  ({min(values):.2f} to {max(values):.2f})")


class Noise:
    """Sums over rollouts, which give the mean and variance of the gradient."""

    def __init__(self) -> None:
        self.count, self.total, self.squares = 0, 0.0, 0.0

    def add(self, gradient: torch.Tensor) -> None:
        self.count += 1
        self.total = self.total + gradient
        self.squares += gradient.square().sum().item()

    def ratio(self) -> float:
        squared_mean = (self.total / self.count).square().sum().item()
        variance = (self.squares - self.count * squared_mean) / (self.count - 1)
        return variance / (squared_mean - variance / self.count)


def measure(policy: Policy, rows: list[dict], seed: int, num_rollouts: int) -> dict[str, float]:
    """The noise of every baseline."""
    returns, _ = rollout(policy, rows, seed, 10**6, 1)  # a training run's running mean would be close to its mean
    average = returns.mean().item()
    noise = {name: Noise() for name in ("no baseline", "running mean", "mean of the group")}
    for number in range(1, num_rollouts + 1):
        returns, gradient_of = rollout(policy, rows, seed, number, 1)
        noise["no baseline"].add(gradient_of(returns))
        noise["running mean"].add(gradient_of(returns - average))
        returns, gradient_of = rollout(policy, rows, seed, number, GROUP_SIZE)
        noise["mean of the group"].add(gradient_of(group_advantages(returns)))
    return {"accuracy": average} | {name: found.ratio() for name, found in noise.items()}


def rollout(policy: Policy, rows: list[dict], seed: int, number: int, group_size: int) -> tuple:
    """Returns (Q, G) of a rollout, and a function from advantages (Q, G) to the gradient of all weights."""
    asked = prompts_of_step(len(rows), COMPLETIONS // group_size, number, seed)
    prompts = [encode_prompt(policy.tokenizer, task.messages(rows[index])) for index in asked]
    completions = sample(policy, prompts, group_size, max_new_tokens=96, key=(seed, number), prompt_index=asked)
    texts = [decode(policy.tokenizer, row.completion_ids) for row in completions]
    correct = [
        task.reward(rows[row.prompt_index], text)["correct"] for row, text in zip(completions, texts, strict=True)
    ]
    experience = collate(completions, policy.pad_id, policy.device)

    def gradient_of(advantages: torch.Tensor) -> torch.Tensor:
        policy.zero_grad()
        log_probs, _ = policy(experience.sequences, mask := experience.action_mask)
        (-advantages.view(-1, 1).float() * log_probs * mask).sum().div(COMPLETIONS).backward()
        return torch.cat([weight.grad.flatten() for weight in policy.parameters()])

    return torch.tensor(correct).view(-1, group_size), gradient_of


if __name__ == "__main__":
    main()
