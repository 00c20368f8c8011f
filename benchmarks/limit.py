"""How far sampling and update are from what the machine's matrix products allow.

    python benchmarks/limit.py                    # the bundled policy and task, one thread; 4 minutes

The floor of a step is the time of the matrix products that it needs, at the rates at which this machine multiplies
matrices of those shapes, with the faster of MKL and oneDNN:

- every prompt encoded once per group: forward for sampling, forward and backward for the update;
- every completion token once forward in sampling, together with all rows that are not finished yet, and once forward
  and backward in the update;
- the LM head at action tokens only, and attention's own products. A backward pass has two products for each product of
  the forward pass.

Everything else (norms, softmax, rotary embedding, copies, Python) counts as zero in the floor, so no program can reach
it. The gap is the measured time divided by the floor, in CPU seconds. A profile shows the largest costs. Then one thing
at a time is changed, in turns with the unchanged code, to measure what it saves. Writes the entry limit of
benchmarks/results/measurements.json.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import tyro
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from common.advantages import STD_EPS, group_advantages, group_std
from common.chat import decode, encode_prompt
from common.experience import Experience, collate
from common.fast.matmul import is_faster, multiply
from common.fast.shared_prompts import TOKENS_AT_ONCE
from common.loss import clipped_surrogate, masked_mean, probability_ratio
from common.policy import Policy
from common.sampling import sample
from common.tasks import arithmetic as task
from common.trajectory import Trajectory
from viewer.results import write_json

from common.plumbing.config import RESOLVED, RunConfig
from common.plumbing.data import prompts_of_step, read_rows
from common.plumbing.loading import load_policy
from common.plumbing.machine import describe_machine

RESULTS = Path(__file__).resolve().parent / "results" / "measurements.json"
NUM_PROMPTS, GROUP_SIZE = 16, 8
BUDGET = RESOLVED["tiny"]["max_new_tokens"]


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = 9  # steps that count, after two of warm-up; medians are taken over them
    threads: int = 1  # CPU threads


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    torch.set_num_threads(config.threads)
    policy = load_policy(RunConfig(device="cpu", dtype="float32", attn_implementation="sdpa"))
    rows = read_rows(str(task.TRAIN_DATA), task.FIELDS)
    rate = Rates()
    steps = []
    for step in range(1, config.steps + 3):
        questions = [rows[index] for index in prompts_of_step(len(rows), NUM_PROMPTS, step, seed=0)]
        sampling, trajectories = timed(lambda questions=questions, step=step: complete(policy, questions, step))
        experience = with_advantages(policy, questions, trajectories)
        update, _ = timed(lambda experience=experience: backward(policy, experience))
        floors = floor_of_sampling(policy, trajectories, rate), floor_of_update(policy, trajectories, rate)
        tokens = sum(len(row.completion_ids) for row in trajectories)
        steps.append({"tokens": tokens, "sampling": sampling, "update": update,
                      "sampling_floor": floors[0], "update_floor": floors[1]})  # fmt: skip
    medians = {name: statistics.median(step[name] for step in steps[2:]) for name in steps[0]}
    for part in ("sampling", "update"):
        medians[f"{part}_gap"] = statistics.median(step[part] / step[f"{part}_floor"] for step in steps[2:])
    costs = {
        "sampling": largest_costs(lambda: complete(policy, questions, step)),
        "update": largest_costs(lambda: backward(policy, experience)),
    }
    savings = compare_savings(policy, rows, config.steps)
    result = {"threads": config.threads, "medians": medians, "largest_costs": costs, "savings": savings}
    result["rates"] = rate.measured
    write_json(RESULTS, result | {"steps": steps} | describe_machine(), entry="limit")
    for part in ("sampling", "update"):
        floor, gap = medians[f"{part}_floor"], medians[f"{part}_gap"]
        print(f"{part}: {medians[part]:.3f} s, floor {floor:.3f} s, gap {gap:.2f}")
        for name, share in costs[part].items():
            print(f"    {share:6.1%}  {name}")
    for name, seconds in savings.items():
        print(f"{name}: {seconds:.3f} s")


# The work ------------------------------------------------------------------------------------------------------------


def complete(
    policy: Policy, questions: list[dict], step: int, budget: int = BUDGET, group_size: int = GROUP_SIZE
) -> list[Trajectory]:
    prompts = [encode_prompt(policy.tokenizer, task.messages(row)) for row in questions]
    prompts = [prompt for prompt in prompts for _ in range(GROUP_SIZE // group_size)]
    return sample(policy, prompts, group_size, max_new_tokens=budget, key=(0, step), generation_batch_size=128)


def with_advantages(policy: Policy, questions: list[dict], trajectories: list[Trajectory]) -> Experience:
    texts = [decode(policy.tokenizer, row.completion_ids) for row in trajectories]
    correct = [
        task.reward(questions[row.prompt_index], text)["correct"] for row, text in zip(trajectories, texts, strict=True)
    ]
    experience = collate(trajectories, policy.pad_id, policy.device)
    returns = torch.tensor(correct).view(-1, GROUP_SIZE)
    experience.advantages = (group_advantages(returns) / (group_std(returns) + STD_EPS)).view(-1, 1).float()
    return experience


def backward(policy: Policy, experience: Experience, rows: int = 128, skip_zero_advantages: bool = False) -> None:
    policy.zero_grad()
    for micro in experience.split(rows, skip_zero_advantages=skip_zero_advantages):
        log_probs, _ = policy(micro.sequences, micro.action_mask)
        ratio = probability_ratio(log_probs, None, micro.action_mask)
        token_loss = clipped_surrogate(ratio, micro.advantages, clip_eps=0.2)
        (masked_mean(token_loss, micro.action_mask, dim=1).sum() / len(experience)).backward()


def timed(function: Callable) -> tuple[float, object]:
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


# The floor -----------------------------------------------------------------------------------------------------------


class Rates:
    """Floating-point operations per second of (m, k) @ (k, n), measured once per shape."""

    def __init__(self):
        self.measured: dict[str, float] = {}

    def seconds(self, m: int, k: int, n: int) -> float:
        """The time of one row of such a product, in seconds."""
        m = min(m, 512)  # more rows are no faster
        m = m if m < 16 else m // 16 * 16  # one measurement for similar shapes
        name = f"{m}x{k}x{n}"
        if name not in self.measured:
            a, b = torch.randn(m, k), torch.randn(n, k)
            products = [lambda: torch.mm(a, b.t())] + ([lambda: multiply(a, b)] if is_faster() else [])
            times = []
            for product in products * 7:
                start = time.process_time()
                for _ in range(40):
                    product()
                times.append((time.process_time() - start) / 40)
            self.measured[name] = 2 * m * k * n / min(times[len(products) :])
        return 2 * m * k * n / self.measured[name] / m  # per row


def linear_shapes(policy: Policy) -> list[tuple[int, int]]:
    """(inputs, outputs) of every linear layer except the LM head."""
    head = policy.model.get_output_embeddings()
    layers = [module for module in policy.model.modules() if isinstance(module, torch.nn.Linear) and module is not head]
    return [(layer.in_features, layer.out_features) for layer in layers]


def forward_seconds(policy: Policy, rate: Rates, tokens: float, head_tokens: float, at_once: int) -> float:
    """All linear layers for `tokens`, and the LM head for `head_tokens`, in products of `at_once` tokens."""
    vocabulary, width = policy.model.get_output_embeddings().weight.shape
    body = sum(rate.seconds(at_once, k, n) for k, n in linear_shapes(policy))
    return tokens * body + head_tokens * rate.seconds(at_once, width, vocabulary)


def attention_seconds(policy: Policy, rate: Rates, pairs: int) -> float:
    """Scores and weighted values of `pairs` (query, key) pairs, at the rate of a product as wide as a head."""
    config = policy.model.config
    head = config.hidden_size // config.num_attention_heads
    a_pair = 2 * rate.seconds(64, head, 64) / 64  # of one head: q k, and p v
    return config.num_hidden_layers * config.num_attention_heads * pairs * a_pair


def prompts_of(trajectories: list[Trajectory]) -> list[int]:
    """The length of each group's prompt."""
    return [row.prompt_length for row in trajectories[::GROUP_SIZE]]


def num_pairs(prompt: int, completion: int) -> int:
    """The number of (query, key) pairs of the tokens of a completion that follows its prompt."""
    return completion * prompt + completion * (completion + 1) // 2


def floor_of_sampling(policy: Policy, trajectories: list[Trajectory], rate: Rates) -> float:
    prompts = prompts_of(trajectories)
    lengths = [len(row.completion_ids) for row in trajectories]
    seconds = forward_seconds(policy, rate, sum(prompts), len(prompts), 512)
    pairs = sum(num_pairs(0, prompt) for prompt in prompts)
    for position in range(1, max(lengths)):  # the last token of a completion is not processed any more
        active = sum(length > position for length in lengths)
        seconds += forward_seconds(policy, rate, active, active, active)
    pairs += sum(num_pairs(row.prompt_length, len(row.completion_ids) - 1) for row in trajectories)
    return seconds + attention_seconds(policy, rate, pairs)


def floor_of_update(policy: Policy, trajectories: list[Trajectory], rate: Rates) -> float:
    prompts = prompts_of(trajectories)
    tokens = sum(len(row.completion_ids) for row in trajectories)
    forward = forward_seconds(policy, rate, sum(prompts) + tokens, tokens, TOKENS_AT_ONCE["cpu"])
    pairs = sum(num_pairs(0, prompt) for prompt in prompts)
    pairs += sum(num_pairs(row.prompt_length, len(row.completion_ids)) for row in trajectories)
    return 3 * (forward + attention_seconds(policy, rate, pairs))


class PlainCache(DynamicCache):
    """transformers' DynamicCache, with the method that sampling needs."""

    def drop_rows(self, ended: torch.Tensor) -> torch.Tensor:
        remaining = (~ended).nonzero()[:, 0]
        self.batch_select_indices(remaining)
        return remaining


def compare_savings(policy: Policy, rows: list[dict], steps: int) -> dict[str, float]:
    """Median CPU seconds of sampling and of the update, unchanged and with one thing changed."""
    times: dict[str, list[float]] = {}
    for step in range(1, steps + 3):
        questions = [rows[index] for index in prompts_of_step(len(rows), NUM_PROMPTS, step, seed=0)]
        work = list(variants(policy, questions, step).items())
        for name, (changes, function) in work if step % 2 else reversed(work):
            if name.startswith("640 tokens") and step > 5:
                continue
            with ExitStack() as stack:
                for change in changes:
                    stack.enter_context(change)
                times.setdefault(name, []).append(timed(function)[0])
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def variants(policy: Policy, questions: list[dict], step: int) -> dict[str, tuple[list, Callable]]:
    """By name: what to change, and the function to time."""

    def draw(budget: int = BUDGET, group_size: int = GROUP_SIZE) -> Callable:
        return lambda: complete(policy, questions, step, budget, group_size)

    def draw_long() -> list[Trajectory]:
        return complete(policy, questions[:4], step, budget=640)

    def train(at_once: int = NUM_PROMPTS * GROUP_SIZE, skip: bool = False) -> Callable:
        return lambda: backward(policy, experience, at_once, skip)

    trajectories = complete(policy, questions, step)
    experience = with_advantages(policy, questions, trajectories)
    longest = max(len(row.completion_ids) for row in trajectories)
    endless = patch.object(policy, "end_of_turn_ids", [])
    plain_cache = patch("common.fast.cache.RowCache", PlainCache)
    mkl = patch("common.fast.matmul.MIN_ROWS", 10**9)
    repeated_heads = patch.dict(os.environ, TRANSFORMERS_SDPA_FORCE_GQA="0")
    whole_rows = patch("common.policy.hidden_states_of_shared_prompts", lambda *arguments: None)
    return {
        "sampling": ([], draw()),
        "sampling, every prompt encoded for every row": ([], draw(group_size=1)),
        "sampling, finished rows kept": ([endless], draw(longest)),
        "sampling, MKL alone": ([mkl], draw()),
        "sampling, DynamicCache instead of RowCache": ([plain_cache], draw()),
        "640 tokens of 32 rows": ([endless], draw_long),
        "640 tokens of 32 rows, DynamicCache instead of RowCache": ([endless, plain_cache], draw_long),
        "update": ([], train()),
        "update, groups with zero reward variance skipped": ([], train(skip=True)),
        "update, MKL alone": ([mkl], train()),
        "update, keys and values repeated for every head": ([repeated_heads], train()),
        "update, whole rows, 32 at once": ([whole_rows], train(32)),
        "update, whole rows, 128 at once": ([whole_rows], train()),
        "update, whole rows, 32 at once, MKL alone": ([whole_rows, mkl], train(32)),
        "update, 128 tokens at once": ([patch.dict(TOKENS_AT_ONCE, cpu=128)], train()),
        "update, 2048 tokens at once": ([patch.dict(TOKENS_AT_ONCE, cpu=2048)], train()),
    }


def largest_costs(function: Callable, count: int = 6) -> dict[str, float]:
    """The operators with the largest shares of all operators' own time; Python's time is not included."""
    function()
    with profile(activities=[ProfilerActivity.CPU]) as measured:
        function()
    times = {event.key: event.self_cpu_time_total for event in measured.key_averages()}
    shares = {name: time / sum(times.values()) for name, time in times.items()}
    largest = dict(sorted(shares.items(), key=lambda item: -item[1])[:count])
    return largest | {"everything else": 1 - sum(largest.values())}


if __name__ == "__main__":
    main()
