"""Refuse settings that cannot work, before anything is loaded: one sentence, which names the flags."""

import importlib.util
import math
from pathlib import Path

import torch

from common.errors import UserError

from common.plumbing.config import ADAPTER_SETTINGS, PolicyConfig, shown
from common.plumbing.terminal import say

# Of all experiments; a flag that is None, or that an experiment does not have, is in range.
POSITIVE = (
    *("steps", "prompts_per_step", "max_new_tokens", "temperature", "epochs_per_step", "minibatch_size"),
    *("micro_batch_size", "lr", "clip_eps", "max_grad_norm", "generation_batch_size", "max_question_length"),
    *("threads", "eval_prompts", "lora_alpha", "keep_checkpoints", "epochs", "tokens_per_batch", "max_length"),
)
NOT_NEGATIVE = (
    *("seed", "weight_decay", "kl_weight", "eval_every", "samples_every", "checkpoint_every", "lora_rank"),
    *("warmup_steps", "final_lr", "num_copying", "num_reasoning", "num_answering"),
)


def flag(name: str) -> str:
    """
    >>> flag("max_new_tokens")
    '--max-new-tokens'
    """
    return "--" + name.replace("_", "-")


def parse_numbers(flag: str, pairs: tuple[str, ...]) -> dict[str, float]:
    """
    >>> parse_numbers("--reward-weight", ("format=0.1",))
    {'format': 0.1}

    Raises:
        UserError: a pair is not NAME=NUMBER.
    """
    values = {}
    for pair in pairs:
        name, _, number = pair.partition("=")
        if name in values:
            raise UserError(f"{flag} {pair}: {name} is given twice")
        try:
            values[name] = float(number)
        except ValueError:
            values[name] = math.nan
        if not name or not math.isfinite(values[name]):
            raise UserError(f"{flag} {pair}: this is not NAME=NUMBER")
    return values


def check_ranges(config: PolicyConfig) -> None:
    """Refuse numbers out of range.

    Raises:
        UserError: naming the flag and its value.
    """
    for names, is_fine, wanted in (
        (POSITIVE, lambda value: value > 0, "more than 0, and finite"),
        (NOT_NEGATIVE, lambda value: value >= 0, "0 or more, and finite"),
    ):
        for name in names:
            value = getattr(config, name, None)
            if value is not None and not (is_fine(value) and math.isfinite(value)):
                raise UserError(f"{flag(name)} must be {wanted}, not {value}")
    group_size, top_p = getattr(config, "group_size", 2), getattr(config, "top_p", 1.0)
    if group_size < 2:
        raise UserError(f"--group-size must be 2 or more, not {group_size}: a group is its own baseline")
    if not 0 < top_p <= 1:
        raise UserError(f"--top-p must be above 0 and at most 1, not {top_p}")


def check_combinations(config: PolicyConfig) -> None:
    """Refuse flags that contradict each other, or that need something that is not requested or not installed."""
    _check_minibatches(config)
    if config.attn_implementation == "flash_attention_2" and config.dtype == "float32":
        raise UserError("--attn-implementation flash_attention_2 computes in half precision: add --dtype bfloat16")
    if config.load_in == "8bit" and config.dtype == "float32":
        raise UserError("--load-in 8bit computes in half precision: omit --dtype, or make it bfloat16")
    if not config.lora_rank:
        for name in ("lora_alpha",) if config.trains_adapter else ("lora_alpha", "load_in", "save_merged"):
            if getattr(config, name):
                raise UserError(f"{flag(name)} needs an adapter to train: add --lora-rank 16, for example")
    elif config.model == "new":
        raise UserError("--lora-rank adapts a model that exists: give a --model, or omit it")
    elif config.load_in is not None and config.adapter_path is not None:
        raise UserError(
            f"--load-in {config.load_in}: to merge the adapter of --model into quantised weights would round what it "
            "has learned: omit --lora-rank to train it further, or merge it first with --save-merged"
        )
    if config.load_in is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"--load-in {config.load_in} needs the package bitsandbytes: pip install bitsandbytes")
    if getattr(config, "top_p", 1.0) < 1:
        say(
            "--top-p below 1: tokens are drawn from the most probable ones only, but trained under the full "
            "distribution: the gradient is biased towards what was likely before"
        )


def check_model(config: PolicyConfig) -> None:
    """Refuse a directory that is not there, or that holds neither a model nor an adapter of one that is there."""
    path, base = config.model_path, config.base_path
    if path is None:
        return
    if not path.is_dir():
        raise UserError(f"--model {config.model}: there is no such directory (a hub id is owner/name)")
    if config.adapter_path is not None:
        if base is not None and not (base / "config.json").is_file():
            raise UserError(
                f"--model {shown(config.model)} is an adapter of {base}, where there is no model (no config.json): if "
                f"it was moved, correct base_model_name_or_path in {path / ADAPTER_SETTINGS}"
            )
    elif not (path / "config.json").is_file() or (path / "metrics.jsonl").is_file():
        policies = _policies_in(path)
        raise UserError(
            f"--model {shown(config.model)} holds no model (config.json) and no adapter ({ADAPTER_SETTINGS})"
            + (f"; did you mean {shown(policies[0])}?" if policies else "")
        )


def _policies_in(directory: Path) -> list[Path]:
    """What a run has saved, if this is its directory or that of its checkpoints: the final policy first."""
    steps = [path for pattern in ("step_*", "checkpoints/step_*") for path in directory.glob(pattern)]
    numbered = [(int(path.name[5:]), path) for path in steps if path.name[5:].isdecimal()]
    found = [directory / "final", *(path for _, path in sorted(numbered, reverse=True))]
    return [path for path in found if any((path / name).is_file() for name in ("config.json", ADAPTER_SETTINGS))]


def check_name(name: str | None) -> None:
    if name is not None and (name in ("", ".", "..") or len(Path(name).parts) != 1):
        raise UserError(f"--name {name!r} cannot be the name of a directory")


def check_device(name: str) -> None:
    if name == "auto":
        return
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"--device must be cpu, cuda, cuda:<number> or auto, not {name}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices")


def _check_minibatches(config: PolicyConfig) -> None:
    minibatch_size = getattr(config, "minibatch_size", None)
    if minibatch_size is None:
        return
    group_size, rows = config.group_size, config.prompts_per_step * config.group_size
    if minibatch_size % group_size:
        raise UserError(f"--minibatch-size {minibatch_size} is not a multiple of --group-size {group_size}")
    if minibatch_size > rows:
        raise UserError(f"--minibatch-size {minibatch_size} exceeds the {rows} rows of a rollout")
