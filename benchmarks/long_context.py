"""The memory of supervised fine-tuning on one row of 16,384 tokens, beside the estimate of `--estimate`.

    python benchmarks/long_context.py            # measures, each setting in its own process, and prints the table
    python benchmarks/long_context.py --print    # the table from the committed data

Each process makes a freshly initialised model, and takes one step of imitation/sft on a row whose tokens, except the
first 16, are the assistant's. The peak is the memory of the process, as the system counts it. *Whole logits* are all
computed at once, instead of a chunk at a time. Times are CPU seconds of one thread.

The data are the entry long_context of benchmarks/results/measurements.json.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from model_memory import RESULTS, estimate, load_train, write_model

from common.policy import Policy
from common.trajectory import Trajectory
from viewer.results import read_json, write_json

from harness.base.machine import describe_machine

SFT = "imitation/sft/train.py"
NUM_TOKENS, NUM_PROMPT = 16_384, 16
BUNDLED = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": NUM_TOKENS,
}  # fmt: skip
SMOLLM2 = {
    "model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": NUM_TOKENS,
}  # fmt: skip
SHAPES = {"2 M": BUNDLED, "SmolLM2-135M": SMOLLM2, "SmolLM2-135M, 2 of 30 layers": SMOLLM2 | {"num_hidden_layers": 2}}
KEPT, CHECKPOINTS, WHOLE = "kept", "checkpoints", "checkpoints, whole logits"  # what a process holds
JOBS = [(name, dtype, how) for name in SHAPES for dtype in ("float32", "bfloat16") for how in (KEPT, CHECKPOINTS)]
JOBS = [job for job in JOBS if job[0] != "SmolLM2-135M" or job[2] != KEPT]  # more memory than this machine has
JOBS += [(name, "float32", WHOLE) for name in SHAPES if "layers" in name]


@dataclass(frozen=True)
class Command:
    only_print: Annotated[bool, tyro.conf.arg(name="print")] = False  # the table of the committed data
    only: str = ""  # measure only the settings whose names, MODEL/DTYPE/HOW, contain this; others stay
    job: str | None = None  # used by the program itself: MODEL/DTYPE/HOW


def main(command: Command) -> None:
    torch.set_num_threads(1)
    if command.job:
        print(json.dumps(measure(*command.job.split("/"))))
        return
    for job in [] if command.only_print else map("/".join, JOBS):
        if command.only in job:
            done = subprocess.run(
                [sys.executable, __file__, "--job", job],
                stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            found = json.loads(done.stdout.splitlines()[-1]) | describe_machine()
            write_json(RESULTS, read_json(RESULTS, "long_context") | {job: found}, entry="long_context")
    print_table(read_json(RESULTS, "long_context"))


def measure(name: str, dtype: str, how: str) -> dict:
    """CPU seconds of the step; the peak of the process before it and after it, and as estimated, in GB."""
    from transformers import AutoConfig, AutoModelForCausalLM

    train = load_train(SFT)
    torch.manual_seed(0)
    shape = AutoConfig.for_model(**SHAPES[name] | {"tie_word_embeddings": True})
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, attn_implementation="sdpa")
    if has_checkpoints := how != KEPT:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = Policy(model, None, [2], 0, 1.0, getattr(torch, dtype), has_checkpoints)
    if how == WHOLE:
        policy.max_logits = sys.maxsize
    ids, mask = torch.randint(shape.vocab_size, (NUM_TOKENS,)).tolist(), [0] * NUM_PROMPT
    mask += [1] * (NUM_TOKENS - NUM_PROMPT)
    batch = train.read(policy, [Trajectory(ids, NUM_PROMPT, mask, [0.0] * NUM_TOKENS, 0)])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    before, start = gigabytes(), time.process_time()
    metrics = train.update(train.Config(micro_batch_size=1), policy, optimizer, batch)
    seconds, peak = time.process_time() - start, gigabytes()
    assert not metrics["loss/skipped"]
    flags = ("--dtype", dtype, "--device", "cpu", "--micro-batch-size", "1", "--eval-prompts", "1", "--max-length")
    flags += (str(NUM_TOKENS), "--tokens-per-batch", str(NUM_TOKENS), *["--gradient-checkpointing"] * has_checkpoints)
    with tempfile.TemporaryDirectory() as directory:
        estimated = estimate(write_model(Path(directory), SHAPES[name]), flags, 0, script=SFT)["peak"] / 1e9
    loss = metrics["loss/total"]
    return {"seconds": seconds, "before": before, "peak": peak, "estimated": estimated, "loss": loss}


def gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def print_table(data: dict) -> None:
    print("| model | arithmetic | activations | GB before | peak | estimated | CPU seconds |\n" + "|---" * 7 + "|")
    for job in filter(data.get, map("/".join, JOBS)):
        found = data[job]
        estimated = "-" if WHOLE in job else f"{found['estimated']:.1f}"  # it knows no whole logits
        figures = f"{found['before']:.1f} | {found['peak']:.1f} | {estimated} | {found['seconds']:.0f}"
        print(f"| {job.replace('/', ' | ')} | {figures} |")


if __name__ == "__main__":
    main(tyro.cli(Command, description=__doc__))
