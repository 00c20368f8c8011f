"""The memory of a run, part by part: what every phase of it must hold at the same time, per device.

    full      4 bytes per parameter for weights and gradients each, 8 for Adam's moments, 4 for the reference
    LoRA      the same for the adapter, and 2 (bfloat16), 4 (float32), 1 (8-bit) or 0.53 (4-bit) per frozen weight

Sharding divides weights, gradients and moments by the number of processes. The KV cache is that of as many rows as are
sampled at the same time, the activations are those of one micro-batch, and one chunk of logits exists at a time.
"""

from dataclasses import dataclass, replace
from math import ceil

from common.fast.shared_prompts import TOKENS_AT_ONCE
from common.logprobs import MAX_LOGITS

from common.plumbing.config import ModelConfig, PolicyConfig
from common.plumbing.estimate.shape import Pass, Shape, rank_of

# 4-bit weights with double quantisation: 4 bits, 8 for each block of 64 weights, 32 for each 256 of those
BYTES = {"4bit": (4 + 8 / 64 + 32 / (64 * 256)) / 8, "8bit": 1.0}
MANY = 1000  # questions of an evaluation that does not say how many
# Of activations and logits: what the C library's allocator has not given back (measured on Linux, with
# benchmarks/model_memory.py --check); on a GPU PyTorch has its own allocator
IN_PIECES = 0.6
ROOM = 32  # tokens that the cache has room for beyond its last, see common/fast/cache.py
PROGRAM = 0.5e9  # Python and its libraries, on a CPU; of CUDA, its context

# How the processes of a launch divide what there is: with which file of accelerate_configs/
LAUNCHES = {"one": None, "ddp": "multi_gpu", "zero2": "deepspeed_zero2", "zero3": "deepspeed_zero3"}
LAUNCHES |= {"fsdp2": "fsdp2", "offload": "fsdp2_offload"}
PARTS = ("weights", "gradients", "optimizer", "reference", "KV cache", "activations", "logits", "other")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What of a run's settings and data decides on its memory."""

    rank: int  # of the adapter; 0: all weights are trained
    load_in: str | None
    autocast: bool  # bfloat16 arithmetic
    on_cpu: bool
    kl_weight: float
    gradient_checkpointing: bool
    prompt: int  # tokens of the longest prompt
    completion: int
    group_size: int
    rows: int  # of a rollout
    evaluated: int  # rows that an evaluation samples
    generation_batch_size: int  # 0: an engine samples
    micro_batch_size: int
    file_bytes: float = 0.0  # of weights on disk that are converted when they are read
    is_trained: bool = True

    @property
    def has_copy(self) -> bool:
        """Whether the reference is a copy of the model."""
        return self.kl_weight > 0 and not self.rank

    @property
    def compute_bytes(self) -> int:
        return 2 if self.autocast else 4


def setting_of(config: ModelConfig, shape: Shape, prompt: int) -> Setting:
    rank, group_size = rank_of(config), getattr(config, "group_size", 1)
    rows = getattr(config, "prompts_per_step", 1) * group_size
    completion = getattr(config, "max_new_tokens", None)
    if hasattr(config, "tokens_per_batch"):  # supervised: rows of this many tokens are trained on
        prompt, completion = 0, min(config.max_length, config.tokens_per_batch)
        rows = config.tokens_per_batch // completion
    engine = hasattr(config, "engine_url")
    stored = 2 if getattr(shape.text, "dtype", None) is not None and shape.text.dtype.itemsize == 2 else 4
    held = 2 if rank and config.dtype == "bfloat16" else 4
    return Setting(
        rank=rank,
        load_in=config.load_in,
        autocast=config.dtype == "bfloat16",
        on_cpu=config.device == "cpu",
        kl_weight=getattr(config, "kl_weight", 0.0),
        gradient_checkpointing=getattr(config, "gradient_checkpointing", False),
        prompt=prompt,
        completion=completion,
        group_size=group_size,
        rows=rows,
        evaluated=8 * getattr(config, "eval_prompts", MANY),
        generation_batch_size=0 if engine else getattr(config, "generation_batch_size", 128),
        micro_batch_size=min(getattr(config, "micro_batch_size", 1), rows),
        is_trained=isinstance(config, PolicyConfig),
        file_bytes=stored * shape.num_parameters
        if stored != held
        else 0,  # else the file is mapped, and is the weights
    )


class Memory:
    """Bytes that one device holds, by part and phase, in one process or in each of several.

    phases: what each phase of a run holds, by part. A part that a phase lacks is freed before it, or not made yet.
    """

    def __init__(self, shape: Shape, setting: Setting, launch: str = "one", processes: int = 1):
        rows = ceil(setting.rows / processes)
        setting = replace(
            setting,
            rows=rows,
            evaluated=ceil(setting.evaluated / processes),
            micro_batch_size=min(setting.micro_batch_size, rows),
        )
        self.shape, self.setting, self.launch, self.processes = shape, setting, launch, processes
        self.shares = setting.micro_batch_size > setting.group_size / 2 and launch in ("one", "ddp", "zero2")
        self.phases = self._phases()

    @property
    def peak(self) -> float:
        return sum(self.phases[self.peak_phase].values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    def part(self, name: str) -> float:
        """The most that the part takes in any phase."""
        return max(phase.get(name, 0.0) for phase in self.phases.values())

    def _phases(self) -> dict[str, dict[str, float]]:
        shape, setting = self.shape, self.setting
        trained = shape.num_parameters if not setting.rank else shape.adapter_parameters(setting.rank)
        held = self._held(trained)
        if not setting.is_trained:
            held |= {"gradients": 0.0, "optimizer": 0.0}
        whole = held["weights"]
        if self.launch in ("fsdp2", "offload", "zero3"):  # gathered: all weights for a rollout, a layer for the update
            gathered = setting.compute_bytes if self.launch != "zero3" else 4
            held["weights"] /= self.processes
            whole = held["weights"] + gathered * shape.num_parameters
            root = shape.num_parameters - shape.in_layers
            layers = 2 * shape.in_layers / shape.layers  # one computes while the next is fetched
            held["other"] += gathered * (root + layers)
        if self.launch == "offload":
            held |= {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
            whole = setting.compute_bytes * shape.num_parameters
        casts = 2 * shape.num_parameters if setting.autocast and not setting.rank else 0  # which autocast keeps
        if self.launch in ("fsdp2", "offload"):
            casts = 0
        phases = {"sampling": held | {"weights": whole, "other": held["other"] + casts}}
        phases["sampling"] |= self._cache()
        activations, logits = self._activations(), 3 * 4 * MAX_LOGITS
        logits = min(logits, 3 * 4 * setting.micro_batch_size * setting.completion * shape.vocabulary)
        drawn = 4 * shape.largest if not setting.rank else 0  # the gradient of the largest weight, before it is added
        pieces = IN_PIECES * (activations + logits) if setting.on_cpu else 0
        cast = casts if setting.gradient_checkpointing else casts * (1 - shape.in_layers / shape.num_parameters)
        update = {"activations": activations, "logits": logits, "other": held["other"] + drawn + pieces + cast}
        phases["update"] = held | update
        # Adam's intermediate results: of one weight on a CPU, of all together on a GPU
        step = 2 * 4 * shape.largest if setting.on_cpu else 4 * trained / self.divisor
        if setting.rank:
            step = 4 * trained
        phases["optimizer step"] = held | {"other": held["other"] + (0 if self.launch == "offload" else step)}
        if setting.on_cpu:
            phases["loading"] = {"weights": whole, "other": PROGRAM + setting.file_bytes}
        return phases

    @property
    def divisor(self) -> int:
        """By which gradients and moments are divided."""
        return 1 if self.launch in ("one", "ddp") else self.processes

    def _held(self, trained: float) -> dict[str, float]:
        """What is there in every phase, from the second step on."""
        shape, setting = self.shape, self.setting
        frozen = shape.num_parameters if setting.rank else 0
        if setting.load_in is not None:
            packed = shape.in_linear
            frozen_bytes = BYTES[setting.load_in] * packed + setting.compute_bytes * (frozen - packed)
        else:
            frozen_bytes = setting.compute_bytes * frozen
        other = PROGRAM
        if self.launch == "ddp":
            other += 4 * trained  # its buckets, in which gradients are averaged
        if self.launch in ("zero2", "zero3"):
            other += 4 * trained / self.processes if self.launch == "zero2" else 0  # its own copy of the weights
            other += min(4 * trained, 2e9)  # its buckets
        return {
            "weights": frozen_bytes + 4 * trained,
            "gradients": 4 * trained / self.divisor,
            "optimizer": 8 * trained / self.divisor,
            "reference": 4 * shape.num_parameters if setting.has_copy else 0.0,
            "other": other,
        }

    def _cache(self) -> dict[str, float]:
        setting, shape = self.setting, self.shape
        size = setting.generation_batch_size
        if not size:
            return {}
        rows = min(max(size, setting.group_size), max(setting.rows, setting.evaluated))
        tokens = setting.prompt + setting.completion + ROOM
        cache = rows * tokens * shape.cache_values * setting.compute_bytes
        copies = 1 + (0 if setting.on_cpu else 2 * shape.repeats) / 2  # of one layer: a longer one; repeated heads
        # logits and log-probs in float32, probabilities and their sums in float64
        return {"KV cache": cache * (1 + copies / shape.layers), "logits": 32.0 * rows * shape.vocabulary}

    def _activations(self) -> float:
        setting, shape = self.setting, self.shape
        rows, length = setting.micro_batch_size, setting.prompt + setting.completion
        if setting.gradient_checkpointing:  # one layer at a time, and the input of every layer
            _, layer = shape.kept((Pass(rows, length),), setting.autocast, setting.rank)
            return layer + 4.0 * shape.layers * rows * length * shape.hidden
        if not self.shares:
            return shape.kept((Pass(rows, length),), setting.autocast, setting.rank)[0]
        prompts = Pass(ceil(rows / setting.group_size), max(1, setting.prompt - 1))
        at_once = TOKENS_AT_ONCE["cpu" if setting.on_cpu else "cuda"]
        batch = min(rows, max(1, at_once // (setting.completion + 1)))
        first, _ = shape.kept((prompts,), setting.autocast, setting.rank)
        each, _ = shape.kept((Pass(batch, setting.completion, prompts.tokens),), setting.autocast, setting.rank)
        return first + each * rows / batch
