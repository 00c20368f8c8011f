"""The cost of a step beside its matrix products, and the cost of padding.

    python benchmarks/step_costs.py                 # 20 minutes on one core: measures, and prints the tables
    python benchmarks/step_costs.py --no-padding    # a minute: only the first table; the other one's data are kept
    python benchmarks/step_costs.py --print         # the tables from the committed data

1. The bundled policy samples 128 completions and makes one update on them. *Floor* is the time of the linear layers
   alone, on inputs of the same shapes: in sampling for the rows that are left at each token, in the update forward and
   backward. The rest is shown by kind, from PyTorch's profiler.
2. One update of three sizes of models on rows of three distributions of lengths, padded and packed. Each is measured in
   its own process, for its peak memory; variants take turns.

Times are CPU seconds of one thread. The data are the entry step_costs of benchmarks/results/measurements.json.
"""

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import nn

from common.chat import encode_prompt
from common.experience import Experience, MicroBatchSize, collate
from common.policy import Policy
from common.sampling import sample
from common.trajectory import Trajectory
from tasks import arithmetic
from viewer.results import read_json, write_json

from harness.base.config import ModelConfig
from harness.base.machine import describe_machine
from harness.models.loading import load_policy

RESULTS = Path(__file__).resolve().parent / "results" / "measurements.json"
# hidden size, layers, heads, key-value heads, inner size, vocabulary; prompts and completions of each; repetitions
SIZES = {
    "2 M": ((192, 4, 4, 2, 512, 1024), (16, 8), 3),
    "42 M": ((512, 8, 8, 4, 1536, 16_384), (4, 8), 1),
    "0.5 B": ((896, 24, 14, 2, 4864, 151_936), (2, 4), 1),
}
LENGTHS: dict[str, Callable[[random.Random, int], int]] = {
    "uniform": lambda source, row: source.randint(8, 96),
    "exponential": lambda source, row: min(1 + int(source.expovariate(1 / 40)), 400),
    "one of ten times": lambda source, row: 400 if row == 0 else 40,
}
VARIANTS = ("padded", "packed", "packed, 512 tokens")
KINDS = {
    "matrix products": ("mm", "_linear_pointwise", "addmm", "bmm"),
    "attention": ("_flash_attention_for_cpu", "_flash_attention_for_cpu_backward", "softmax", "_softmax"),
    "copies and indexing": ("copy_", "cat", "index", "_index_put_impl_", "index_select", "gather", "scatter_", "fill_"),
}


@dataclass(frozen=True)
class Config:
    only_print: Annotated[bool, tyro.conf.arg(name="print")] = False  # the tables of the committed data
    padding: bool = True  # measure the second table too
    job: str | None = None  # used by the program itself: SIZE/LENGTHS/VARIANT


def main(config: Config) -> None:
    torch.set_num_threads(1)
    if config.job:
        print(json.dumps(measure_update(*config.job.split("/"))))
        return
    if not config.only_print:
        data = {"step": measure_step() | describe_machine()}
        data |= {"padding": measure_updates()} | describe_machine() if config.padding else {}
        write_json(RESULTS, read_json(RESULTS, "step_costs") | data, entry="step_costs")
    print_tables(read_json(RESULTS, "step_costs"))


def measure_updates() -> dict:
    results = {}
    for size in SIZES:
        for lengths in LENGTHS:
            jobs = {variant: [] for variant in VARIANTS}
            for _ in range(SIZES[size][2]):
                for variant, found in jobs.items():
                    found.append(in_a_process(f"{size}/{lengths}/{variant}"))
            results[f"{size}/{lengths}"] = {name: middle(found) for name, found in jobs.items()}
    return results


def in_a_process(job: str) -> dict:
    command = [sys.executable, __file__, "--job", job]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(found.stdout.splitlines()[-1])


def middle(found: list[dict]) -> dict:
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


# A step beside its matrix products -----------------------------------------------------------------------------------


def measure_step(repetitions: int = 9) -> dict:
    policy = load_policy(ModelConfig(model="tiny", device="cpu", dtype="float32"))
    with open(arithmetic.TRAIN_DATA, encoding="utf-8") as file:
        rows = [json.loads(next(file)) for _ in range(16)]
    prompts = [encode_prompt(policy.tokenizer, arithmetic.messages(row, None)) for row in rows]

    def roll_out() -> list[Trajectory]:
        return sample(policy, prompts, 8, max_new_tokens=96, key=(0, 1))

    rows = roll_out()
    batch = collate(rows, policy.pad_id)
    with_gradient = packed_length(batch)
    lengths = [row.num_action_tokens for row in rows]
    remaining = [sum(length > position for length in lengths) for position in range(max(lengths))]
    works = {
        "sampling": (roll_out, lambda: multiply(policy, remaining)),
        "update": (
            lambda: update(policy, [batch]),
            lambda: multiply_with_gradient(policy, with_gradient, sum(lengths)),
        ),
    }
    found = {"tokens": sum(lengths), "decoding steps": len(remaining)}
    for name, (work, floor) in works.items():
        times = {"seconds": [], "floor": []}
        for _ in range(repetitions):
            times["seconds"].append(cpu_seconds(work))
            times["floor"].append(cpu_seconds(floor))
        found[name] = {kind: statistics.median(values) for kind, values in times.items()} | {"kinds": profile(work)}
    return found


def multiply(policy: Policy, counts: list[int]) -> None:
    layers = [module for module in policy.model.modules() if isinstance(module, nn.Linear)]
    inputs = {layer.in_features: torch.ones(max(counts), layer.in_features) for layer in layers}
    with torch.inference_mode():
        for count in counts:
            for layer in layers:
                layer(inputs[layer.in_features][:count])


def multiply_with_gradient(policy: Policy, num_tokens: int, num_actions: int) -> None:
    for layer in policy.model.modules():
        if isinstance(layer, nn.Linear):
            is_head = layer is policy.model.get_output_embeddings()
            x = torch.ones(num_actions if is_head else num_tokens, layer.in_features, requires_grad=True)
            y = layer(x)
            y.backward(y.detach())


def profile(work: Callable) -> dict[str, float]:
    """The share of each kind of operation in the time that the profiler sees; the rest is Python and its calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        work()
        total = time.perf_counter() - start
    shares = dict.fromkeys((*KINDS, "other operations"), 0.0)
    for event in profiler.key_averages():
        if "::" in event.key:
            name = event.key.rsplit("::", 1)[1].removeprefix("_scaled_dot_product")
            kind = next((kind for kind, names in KINDS.items() if name in names), "other operations")
            shares[kind] += event.self_cpu_time_total / 1e6 / total
    return shares | {"Python": 1 - sum(shares.values())}


# Padding -------------------------------------------------------------------------------------------------------------


def measure_update(size: str, lengths: str, variant: str) -> dict:
    """One update after one to warm up; seconds, tokens of the rows, tokens that were run, and peak memory in GB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    (hidden, layers, heads, kv_heads, inner, vocabulary), (num_prompts, group_size), _ = SIZES[size]
    shape = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=inner, tie_word_embeddings=True, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    policy = Policy(LlamaForCausalLM(shape), None, [2], pad_id=0)
    source = random.Random(0)
    rows = []
    for prompt_index in range(num_prompts):
        prompt = [source.randrange(vocabulary) for _ in range(source.randint(30, 60))]
        for completion_index in range(group_size):
            length = LENGTHS[lengths](source, len(rows))
            ids = prompt + [source.randrange(vocabulary) for _ in range(length)]
            mask = [0] * len(prompt) + [1] * length
            rows.append(Trajectory(ids, len(prompt), mask, [0.0] * len(ids), prompt_index, completion_index))
    batch = collate(rows, pad_id=0)
    if variant == "padded":
        policy.packing = None
    limit = MicroBatchSize(len(rows), 512 if "512" in variant else None)
    parts = list(batch.split(limit))
    run = sum(part.sequences.numel() if variant == "padded" else packed_length(part) for part in parts)
    update(policy, parts[:1])
    seconds = cpu_seconds(lambda: update(policy, parts))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"seconds": seconds, "tokens": sum(len(row.ids) for row in rows), "run": run, "gigabytes": peak}


def packed_length(batch: Experience) -> int:
    from fast.packed_rows import lay_out

    return len(lay_out(batch.sequences, batch.action_mask).ids)


def update(policy: Policy, parts: list[Experience]) -> None:
    for part in parts:
        policy(part.sequences, part.action_mask).log_probs.sum().backward()


def cpu_seconds(work: Callable) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


# Tables --------------------------------------------------------------------------------------------------------------


def print_tables(data: dict) -> None:
    step = data["step"]
    print(f"{step['tokens']} tokens, {step['decoding steps']} decoding steps\n")
    print("| | CPU seconds | linear layers alone | ratio | " + " | ".join(step["sampling"]["kinds"]) + " |")
    print("|---" * (4 + len(step["sampling"]["kinds"])) + "|")
    for name in ("sampling", "update"):
        found = step[name]
        ratio = found["seconds"] / found["floor"]
        shares = " | ".join(f"{share:.0%}" for share in found["kinds"].values())
        print(f"| {name} | {found['seconds']:.3f} | {found['floor']:.3f} | {ratio:.1f} | {shares} |")
    print("\n| model | lengths | padding | " + " | ".join(f"{variant}: s, GB" for variant in VARIANTS) + " |")
    print("|---" * (3 + len(VARIANTS)) + "|")
    for name, variants in data["padding"].items():
        padding = 1 - variants["padded"]["tokens"] / variants["padded"]["run"]
        cells = [f"{variants[variant]['seconds']:.2f}, {variants[variant]['gigabytes']:.2f}" for variant in VARIANTS]
        print(f"| {name.replace('/', ' | ')} | {padding:.0%} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
