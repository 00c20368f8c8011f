"""Sampling from sharded weights: gathered once for the rollout, or at every decode step, beside whole weights.

    python benchmarks/sharded_sampling.py         # about 6 minutes; writes the entry sharded_sampling of
                                                  # benchmarks/results/measurements.json

Two processes on one machine (gloo, one thread each) sample the same number of completions, all of the same length, so
that no rank waits for a longer one. Each process holds the policy whole and, sharded by FSDP2, once more. The three
ways take turns; a turn's time is that of the slower rank, and its CPU seconds, which depend less on what else the
machine does, are the mean over the ranks. Between two GPUs, or two machines, the ratio of computing to
moving bytes is another one; the bytes are the same.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import tyro
from torch import distributed

from common.fast.matmul import use_fast_products
from common.fast.sharded_weights import gathered_weights
from common.parallel import gather
from common.policy import Policy
from common.sampling import sample
from viewer.results import write_json

from common.plumbing.config import ROOT
from common.plumbing.machine import describe_machine

RESULTS = Path(__file__).resolve().parent / "results" / "measurements.json"
RANKS, PROMPTS, GROUP_SIZE, PROMPT_TOKENS, NEW_TOKENS = 2, 4, 8, 48, 64  # prompts of each rank
WAYS = ("whole", "gathered once", "gathered every step")
END = 2**31 - 1  # a token that is never drawn


@dataclass(frozen=True, kw_only=True)
class Config:
    repetitions: int = 7  # rollouts of each way
    rank: int | None = None  # used by the program itself: which process this is
    store: str = ""  # used by the program itself: the file through which the processes find each other


def models() -> dict:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    larger = LlamaConfig(
        vocab_size=8_192, hidden_size=512, intermediate_size=1_408, num_hidden_layers=7,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    tiny = str(ROOT / "assets/tiny_policy")
    return {
        "tiny": lambda: LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32),
        "larger": lambda: LlamaForCausalLM(larger),
    }


def measure(rank: int, store: str, repetitions: int) -> dict:
    """What one process does: for each model the median seconds of each way, and the bytes that it holds and moves."""
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    prompts = torch.randint(3, 1_000, (PROMPTS, PROMPT_TOKENS)).tolist()
    results = {}
    for name, make in models().items():
        whole, sharded = (Policy(make(), None, [END], pad_id=0) for _ in range(2))
        for policy in (whole, sharded):
            use_fast_products(policy.model)
        num_bytes = sum(weight.numel() * weight.element_size() for weight in whole.parameters())
        layer_bytes = sum(w.numel() * w.element_size() for w in whole.model.model.layers.parameters())
        for layer in sharded.model.model.layers:
            fully_shard(layer)
        fully_shard(sharded)
        turns = {
            "whole": lambda policy=whole: rollout(policy, prompts),
            "gathered once": lambda policy=sharded: rollout(policy, prompts),
            "gathered every step": lambda policy=sharded: rollout(policy, prompts, everyone_done=all_done),
            "gather": lambda policy=sharded: enter(policy),
        }
        seconds: dict[str, list[float]] = {way: [] for way in turns}
        cpu_seconds: dict[str, list[float]] = {way: [] for way in turns}
        for repetition in range(repetitions + 1):
            for way, turn in turns.items():
                distributed.barrier()
                start, cpu_start = time.perf_counter(), time.process_time()
                turn()
                elapsed = gather((time.perf_counter() - start, time.process_time() - cpu_start))
                if repetition > 0:  # the first one warms up
                    seconds[way].append(max(wall for wall, _ in elapsed))
                    cpu_seconds[way].append(sum(cpu for _, cpu in elapsed) / RANKS)
        moved = (RANKS - 1) / RANKS  # of what is gathered, a rank has the rest already
        results[name] = {
            "parameters": sum(weight.numel() for weight in whole.parameters()),
            "weight_bytes": num_bytes,
            "shard_bytes": sum(w.to_local().numel() * w.element_size() for w in sharded.parameters()),
            # the root's weights (embeddings, norm, head) stay whole after the first step
            "received_bytes_per_rank": {
                "whole": 0,
                "gathered once": int(num_bytes * moved),
                "gathered every step": int((num_bytes - layer_bytes + NEW_TOKENS * layer_bytes) * moved),
            },
            "seconds_per_rollout": {way: round(median(seconds[way]), 4) for way in WAYS},
            "seconds_per_decode_step": {way: round(median(seconds[way]) / NEW_TOKENS, 5) for way in WAYS},
            "cpu_seconds_per_rollout": {way: round(median(cpu_seconds[way]), 4) for way in WAYS},
            "seconds_to_gather_and_free": round(median(seconds["gather"]), 4),
            "all_seconds": {way: [round(value, 4) for value in values] for way, values in seconds.items()},
        }
    distributed.barrier()
    distributed.destroy_process_group()
    return results


def rollout(policy: Policy, prompts: list[list[int]], **mode) -> None:
    rows = sample(policy, prompts, GROUP_SIZE, max_new_tokens=NEW_TOKENS, key=(0, 1), **mode)
    assert {row.num_action_tokens for row in rows} == {NEW_TOKENS}


def all_done(done: bool) -> bool:
    return all(gather(done))


def enter(policy: Policy) -> None:
    with gathered_weights(policy):
        pass


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    torch.set_num_threads(1)
    if config.rank is not None:
        print(json.dumps(measure(config.rank, config.store, config.repetitions)))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--repetitions", str(config.repetitions), "--store", f"{folder}/store"]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment(), stdout=subprocess.PIPE, text=True)
            for rank in range(RANKS)
        ]
        outputs = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        sys.exit("a process has failed; its error is above")
    settings = {
        "ranks": RANKS, "rows_per_rank": PROMPTS * GROUP_SIZE, "prompt_tokens": PROMPT_TOKENS,
        "decode_steps": NEW_TOKENS, "repetitions": config.repetitions,
    }  # fmt: skip
    results = settings | {"models": json.loads(outputs[0])}
    for name, entry in results["models"].items():
        print(f"{name}: {entry['parameters'] / 1e6:.1f} million parameters, {entry['weight_bytes'] / 1e6:.1f} MB")
        for way in WAYS:
            wall, cpu = entry["seconds_per_rollout"][way], entry["cpu_seconds_per_rollout"][way]
            megabytes = entry["received_bytes_per_rank"][way] / 1e6
            print(f"    {way:20} {wall:8.3f} s, {cpu:8.3f} s of CPU, {megabytes:10,.1f} MB received, by each rank")
    write_json(RESULTS, results | describe_machine(), entry="sharded_sampling")


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    main()
