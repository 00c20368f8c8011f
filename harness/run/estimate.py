"""`--estimate`: computes the memory that a run needs by a formula, before training and without reading weights.

A trained value takes 4 bytes, its gradient 4, and Adam's moments 8; a frozen value takes 2 to 4, or less if it is
quantised. Sampling and the update do not overlap, so the larger one counts. docs/real_models.md compares the estimate
with measured runs.
"""

import copy
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from common.logprobs import MAX_LOGITS
from common.parallel import is_main, world_size

from harness.base.checks import flag
from harness.base.config import ADAPTER_SETTINGS, TINY_POLICY, PolicyConfig, shown
from harness.base.hub import must_be_cached
from harness.base.terminal import say
from harness.models.adapters import linear_layers
from harness.models.pretrained import read_config, tokenizer_of
from harness.task.task import Task, longest_of_run

# 4-bit weights with double quantisation: 4 bits, 8 for each block of 64 weights, 32 for each 256 of those blocks
QUANTISED = {"4bit": (4 + 8 / 64 + 32 / (64 * 256)) / 8, "8bit": 1.0}
PROGRAM = 0.5e9  # bytes of Python and its libraries on a CPU; of the context on CUDA
ROOM = 32  # tokens that the cache reserves beyond its last, see fast/cache.py
IN_PIECES = 0.6  # of activations and logits, on a CPU: memory that the C library's allocator keeps after it is freed
AUTOCAST = 2.6  # bytes per value that bfloat16 arithmetic keeps: 2 for most, 4 for norms
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container
FULL = 0.95  # of a device's memory: above it, fragmentation alone can exhaust the memory
GB = 1e9
# Files of recipes/accelerate_configs/: every process holds everything, or a shard of the trained values and of the
# reference; in scale/mesh, over one of its replicas, and each process of a tensor group computes a part of every layer
LAUNCHES, MESH = ("multi_gpu", "fsdp2"), ("mesh",)


class Shape:
    """The sizes of a model, from its config alone."""

    def __init__(self, config: PolicyConfig):
        from transformers import AutoModelForCausalLM

        source = str(TINY_POLICY) if config.model == "new" else config.base
        whole = read_config(source, Path(source).is_dir() or must_be_cached("model", source))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(whole, dtype=torch.float32)
        text = whole.get_text_config()
        self.layers, self.heads = text.num_hidden_layers, text.num_attention_heads
        self.vocabulary, self.hidden = model.get_input_embeddings().weight.shape
        head_size = getattr(text, "head_dim", None) or self.hidden // self.heads
        self.queries = self.heads * head_size
        self.keys = (getattr(text, "num_key_value_heads", None) or self.heads) * head_size
        self.inner = getattr(text, "intermediate_size", None) or 4 * self.hidden
        self.parameters = model.num_parameters()
        self.largest = max(weight.numel() for weight in model.parameters())
        linear = {name: layer.weight for name, layer in linear_layers(model).items()}
        self.in_linear = sum(weight.numel() for weight in linear.values())
        targets = getattr(config, "lora_targets", ())
        adapted = [x for name, x in linear.items() if not targets or name.rpartition(".")[2] in targets]
        self.ends_of_linear = sum(sum(weight.shape) for weight in adapted)  # inputs and outputs, for its rank


def estimate(config: PolicyConfig, task: Task | None) -> None:
    """Print the memory that the run needs, and how to lower it. Trains and writes nothing."""
    from rich.console import Console
    from rich.table import Table

    if config.gpu_memory is not None:
        config = replace(config, device="cuda")  # this process can be on another device
    shape, prompt = Shape(config), 0 if task is None else _prompt_length(config, task)
    if not is_main():
        return
    room = device_memory(config.device) if config.gpu_memory is None else config.gpu_memory * GB
    launches, replicas, tensor = LAUNCHES, 1, 1
    if hasattr(config, "tensor_parallel"):
        launches, replicas, tensor = MESH, config.replicas, config.tensor_parallel
    needs_whole_weights = (
        config.load_in or hasattr(config, "engine_url") or hasattr(config, "lag") or _has_8bit_moments(config)
    )
    by_hand = hasattr(sys.modules[type(config).__module__], "DistributedDataParallel")
    if launches is LAUNCHES and (needs_whole_weights or by_hand):
        launches = ("multi_gpu",)  # the others would be refused
    unit = replicas * tensor
    processes = config.gpus or math.ceil(max(2, world_size(), torch.cuda.device_count()) / unit) * unit
    size = f"{replicas}x" * (replicas > 1) + f"{processes // unit}x{tensor}" if launches is MESH else f"x{processes}"
    columns = {"one process": (one := memory_of(config, shape, prompt))}
    if processes > 1:
        columns |= {f"{launch} {size}": memory_of(config, shape, prompt, launch, processes) for launch in launches}
    trained = rank_of(config) * shape.ends_of_linear or shape.parameters
    say(f"{shown(config.model)}: {shape.parameters:,} parameters, {trained:,} trained; {config.dtype}, {config.device}")
    table = Table("GB per device", *columns, box=None)
    for part in one:
        table.add_row(part, *(f"{bytes_of[part] / GB:.2f}" for bytes_of in columns.values()))
    Console(width=120).print(table)
    for name, bytes_of in columns.items():
        share = bytes_of["total"] / room
        fits = "fits" if share <= FULL else "does not fit" if share > 1 else "hardly fits"
        if name == "one process" or config.device.startswith("cuda"):  # several share the memory of a CPU
            say(f"{name} {fits}: {bytes_of['total'] / GB:.1f} of {room / GB:.1f} GB ({share:.0%})")
    found = [f"{flags} saves {float(f'{saved / GB:.2g}'):,g} GB" for saved, flags in savings(config, shape, prompt)[:3]]
    say("less memory: " + ("; ".join(found) or "no flag helps much"))


def memory_of(config: PolicyConfig, shape: Shape, prompt: int, launch: str = "one", processes: int = 1) -> dict:
    """Bytes per device, by part and in total, for the length of the longest prompt; `LAUNCHES` lists launches."""
    rank, on_cpu, shards = rank_of(config), config.device == "cpu", processes if launch in ("fsdp2", *MESH) else 1
    tensor = config.tensor_parallel if launch in MESH else 1
    shards //= config.replicas if launch in MESH else 1
    part = copy.copy(shape)  # the part of each layer that one process computes
    part.queries, part.keys, part.inner = (size / tensor for size in (shape.queries, shape.keys, shape.inner))
    arithmetic = 2 if config.dtype == "bfloat16" else 4  # bytes
    trained, frozen = (rank * shape.ends_of_linear, shape.parameters) if rank else (shape.parameters, 0)
    packed = shape.in_linear if config.load_in else 0
    copies = 2 if hasattr(config, "critic_warmup") else 1  # a critic is a second decoder
    weights = copies * (QUANTISED.get(config.load_in, 0) * packed + arithmetic * (frozen - packed) + 4 * trained)
    trained *= copies
    group, completion = getattr(config, "group_size", 1), getattr(config, "max_new_tokens", 0)
    rows = getattr(config, "prompts_per_step", 1) * group
    if hasattr(config, "tokens_per_batch"):  # supervised: training rows have this many tokens
        prompt, completion = 0, min(config.max_length, config.tokens_per_batch)
        rows = config.tokens_per_batch // completion
    if hasattr(config, "pairs_per_step"):  # the longest pairs that are not left out
        prompt, completion, rows = 0, config.max_length, 2 * config.pairs_per_step
    rows, evaluated = (math.ceil(count / (processes // tensor)) for count in (rows, 8 * config.eval_prompts))
    micro = min(config.micro_batch_size * (2 if hasattr(config, "pairs_per_step") else 1), rows)
    if budget := getattr(config, "tokens_per_micro_batch", None):
        micro = min(micro, max(1, budget // (prompt + completion)))

    # by autocast, which keeps the copies; fsdp2 casts what it gathers
    whole_casts = 2 * copies * shape.parameters / tensor if arithmetic == 2 and not rank else 0
    casts = 0 if launch == "fsdp2" else whole_casts
    gathered = arithmetic if launch == "fsdp2" else 4 if launch in MESH else 0  # bytes of a weight
    gathered *= shape.parameters / tensor  # all layers in a rollout, two in the update
    cache = _cache(config, part, prompt + completion, max(rows, evaluated))
    sampling = casts + gathered + cache if cache else 0
    shares = config.pack and group > 1 and micro > group / 2 and shards == 1 and not config.gradient_checkpointing
    kept = copies * _activations(config, part, micro, prompt, completion, shares)
    kept += 3 * 4 * min(MAX_LOGITS, micro * completion * shape.vocabulary) / tensor  # logits
    largest = 0 if rank else 4 * shape.largest / tensor  # the gradient of one weight, before it is added
    gathered *= 1 - shape.in_linear / shape.parameters * (1 - 2 / shape.layers)
    update = casts + gathered + kept * (1 + IN_PIECES * on_cpu) + largest
    # Adam computes with one weight at a time, or with all together
    step = 2 * largest if on_cpu and not rank else 4 * trained / shards
    moments = 2 * (1 + 4 / 256) if _has_8bit_moments(config) else 8  # a scale for each block
    optimizer = (4 + moments) * trained / shards
    if launch == "fsdp2":  # the evaluation before training has whole weights, and no optimizer yet
        sampling = max(sampling, weights * (1 - 1 / shards) - optimizer + whole_casts + cache)
    has_reference = getattr(config, "kl_weight", 0) > 0 and not rank
    held = {
        "weights": weights / shards,
        "gradients and optimizer": optimizer,
        "reference": 4 * shape.parameters / shards if has_reference else 0,
        "program, buffers of DDP": PROGRAM + (4 * trained if launch == "multi_gpu" else 0),
    }
    judges = {"reward model": getattr(config, "reward_model", None), "judge": getattr(config, "judge_model", None)}
    for judge, model in judges.items():
        if model is not None and (judge != "judge" or config.judge_url is None):
            judged = 2 if torch.device(config.device).type == "cuda" else 4
            held[judge] = judged * Shape(replace(config, model=model)).parameters
    if getattr(config, "teacher", None) and config.teacher_url is None:
        held["teacher"] = arithmetic * Shape(replace(config, model=config.teacher)).parameters
    if getattr(config, "teacher_update_rate", 1) != 1:
        held["weights of the teacher"] = 4 * trained
    if lag := getattr(config, "lag", 0):
        held["weights of earlier steps"] = (lag + 1) * 4 * trained  # and the newest, while older ones sample
    phases = {"sampling: KV cache, logits": sampling, "update: activations, logits": max(update, step)}
    return held | phases | {"total": sum(held.values()) + max(phases.values())}


def _has_8bit_moments(config: PolicyConfig) -> bool:
    return getattr(config, "optimizer", "") == "adamw_8bit"


def _cache(config: PolicyConfig, shape: Shape, length: int, most_rows: int) -> float:
    """Keys, values and logits of the rows that are sampled at the same time."""
    by_engine = hasattr(config, "engine_url") or getattr(config, "engine", None)
    if not hasattr(config, "generation_batch_size") or by_engine:
        return 0
    rows = min(config.generation_batch_size, most_rows)
    layer = 2 * rows * (length + ROOM) * shape.keys * (2 if config.dtype == "bfloat16" else 4)
    longer = 1 + (0 if config.device == "cpu" else shape.queries / shape.keys)  # one layer's copy; its repeated heads
    return layer * (shape.layers + longer) + 32 * rows * shape.vocabulary  # log-probs in float32, sums in float64


def _activations(config: PolicyConfig, shape: Shape, rows: int, prompt: int, completion: int, shares: bool) -> float:
    """Values that a Llama-like decoder keeps for the backward pass: with checkpoints, one layer and all inputs."""
    num_tokens, rank = rows * (prompt + completion), rank_of(config)
    if shares:  # each prompt runs once for its group
        num_tokens = math.ceil(rows / config.group_size) * (prompt - 1) + rows * completion
    norms = 4 if rank else 6  # inputs, outputs, and the factors of trained weights
    values = num_tokens * (norms * shape.hidden + 2 * shape.queries + 2 * shape.keys + 4 * shape.inner + 7 * rank)
    values += 2 * rows * prompt * shape.keys if shares else 0  # keys and values of the prompt, for each of its rows
    layer = values * (AUTOCAST if config.dtype == "bfloat16" else 4)
    inputs = 4 * shape.layers * num_tokens * shape.hidden
    return layer + inputs if config.gradient_checkpointing else layer * shape.layers


def savings(config: PolicyConfig, shape: Shape, prompt: int) -> list[tuple[float, str]]:
    """How many bytes each flag saves in one process, largest first."""
    halves = ("micro_batch_size", "generation_batch_size", "max_new_tokens")
    options = {f"{flag(name)} {value}": {name: value} for name in halves if (value := getattr(config, name, 0) // 2)}
    options |= {"--gradient-checkpointing": {"gradient_checkpointing": True}, "--dtype bfloat16": {"dtype": "bfloat16"}}
    options |= {"--kl-weight 0": {"kl_weight": 0.0}} if hasattr(config, "kl_weight") else {}
    adapter, quantised = {"lora_rank": 16}, {"load_in": "4bit"}
    if rank_of(config):
        options |= {"--load-in 4bit": quantised}
    else:
        options |= {"--lora-rank 16": adapter, "--lora-rank 16 --load-in 4bit": adapter | quantised}
    if hasattr(config, "tensor_parallel"):  # it cannot divide quantised weights
        options = {flags: changes for flags, changes in options.items() if "load_in" not in changes}
    before, found = memory_of(config, shape, prompt)["total"], []
    for flags, changes in options.items():
        found.append((before - memory_of(replace(config, **changes), shape, prompt)["total"], flags))
    return sorted((pair for pair in found if pair[0] > 0.01 * before), reverse=True)


def rank_of(config: PolicyConfig) -> int:
    """The rank of the trained adapter; 0: all weights are trained."""
    if config.lora_rank or config.adapter_path is None:
        return config.lora_rank
    return int(json.loads((config.adapter_path / ADAPTER_SETTINGS).read_text(encoding="utf-8")).get("r", 8))


def _prompt_length(config: PolicyConfig, task: Task) -> int:
    return longest_of_run(task, tokenizer_of(config, config.base_path is not None), config.system_prompt)


def device_memory(device: str) -> float:
    """The memory in bytes that the device has, or that this process may use."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    limit = MEMORY_LIMIT.read_text(encoding="utf-8").strip() if MEMORY_LIMIT.is_file() else "max"
    return min(psutil.virtual_memory().total, int(limit) if limit.isdecimal() else math.inf)
