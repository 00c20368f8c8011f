"""Refuse settings that cannot work, before anything is loaded, in one sentence that names the flags."""

import importlib.util
import math
import numbers
import operator
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from common.errors import UserError

from harness.base.config import ADAPTER_SETTINGS, ROOT, TAUGHT, ModelConfig, PolicyConfig, shown
from harness.base.flags import flag, read_marks
from harness.base.terminal import printable, say


def parse_numbers(flag: str, pairs: tuple[str, ...]) -> dict[str, float]:
    """
    >>> parse_numbers("--reward-weight", ("format=0.1",))
    {'format': 0.1}
    """
    values: dict[str, float] = {}
    for pair in pairs:
        name, _, number = pair.partition("=")
        if name in values:
            raise UserError(f"{flag} {pair}: {name} is given twice")
        with suppress(ValueError):
            values[name] = float(number)
        if not name or not math.isfinite(values.get(name, math.nan)):
            raise UserError(f"{flag} {pair}: this is not NAME=NUMBER")
    return values


def parse_sources(flag: str, pairs: tuple[str, ...]) -> dict[str, str]:
    """
    >>> parse_sources("--eval-sets", ("amc=data/amc.jsonl",))
    {'amc': 'data/amc.jsonl'}
    """
    sources: dict[str, str] = {}
    for pair in pairs:
        name, _, source = pair.partition("=")
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII) or not source or name in ("greedy", "sampled"):
            raise UserError(f"{flag} {printable(pair, 60)}: this is not NAME=SOURCE")
        if name in sources:
            raise UserError(f"{flag} {printable(pair, 60)}: {name} is given twice")
        sources[name] = source
    return sources


def parse_target(text: str | None) -> tuple[str, Callable[[float, float], bool], float] | None:
    """The metric, comparison and number of `--stop-when`; None if it has none.

    >>> parse_target("loss/kl > 0.5"), parse_target("over-optimised")
    (('loss/kl', <built-in function gt>, 0.5), None)
    """
    if text in (None, "over-optimised"):
        return None
    match = re.fullmatch(r"\s*([^\s<>=]+)\s*([<>]=?)\s*([^\s<>=]+)\s*", text)
    compare = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
    with suppress(ValueError):
        if match and math.isfinite(number := float(match[3])):
            return match[1], compare[match[2]], number
    raise UserError(
        f"--stop-when {printable(text, 60)}: this is neither over-optimised nor a metric and a value in quotes, like "
        '"eval/greedy/accuracy>=0.9"'
    )


def check_texts(config: object) -> None:
    """Refuse empty paths and stop texts, for example from an unset shell variable, and impossible paths."""
    for name, marks in read_marks(type(config)).items():
        text = getattr(config, name) if marks.path is not None else None
        if text == "":
            raise UserError(f"{flag(name)} is empty: omit it, or name something")
        if text is not None:
            local_path(text, flag(name))
    if "" in getattr(config, "stop", ()):
        raise UserError("--stop is empty: omit it, or give a text")


def local_path(text: str, what: str) -> Path:
    """`text` as a path, with ~ expanded to a home directory, whether it exists or not."""
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # no permission to look there, or an unknown home directory
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{what} {printable(text, 60)}: this path cannot be used ({reason})") from error
    return path


def check_ranges(config: object) -> None:
    """Refuse numbers that are not finite, or outside the range in the field's type."""
    for name, marks in read_marks(type(config)).items():
        value = getattr(config, name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value not in marks:
            raise UserError(f"{flag(name)} must be {marks.range or 'finite'}, not {printable(str(value), 40)}")


def check_combinations(config: ModelConfig) -> None:
    """Refuse flags that contradict each other, or that need another flag or a missing package."""
    for name, value in (("attn_implementation", "flash_attention_2"), ("load_in", "8bit")):
        if getattr(config, name) == value and config.dtype == "float32":
            raise UserError(f"{flag(name)} {value} computes in half precision: add --dtype bfloat16")
    if isinstance(config, PolicyConfig):
        _check_training(config)
        if hasattr(config, "max_turns") and getattr(config, "stop", ()):
            raise UserError("--stop ends completions of one turn, and these have several: omit it")
    if getattr(config, "gpu_memory", None) is not None:  # an estimate for another machine, with packages of its own
        return
    if config.load_in is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"--load-in {config.load_in} needs the package bitsandbytes: pip install bitsandbytes")
    if getattr(config, "optimizer", "") == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("--optimizer adamw_8bit needs the package bitsandbytes: pip install bitsandbytes")
    if config.attn_implementation == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise UserError(
            "--attn-implementation flash_attention_2 needs the package flash-attn, a GPU and nvcc: pip install -e "
            '".[flash]" --no-build-isolation, or omit it for sdpa'
        )
    if config.attn_implementation == "flex_attention" and config.device == "cpu":
        raise UserError("--attn-implementation flex_attention has no backward pass on CPUs: omit it for sdpa")


def tell_limits(config: ModelConfig) -> None:
    """Describe the training of a bundled policy, if the flags ask for anything else."""
    if config.model not in TAUGHT or not hasattr(config, "task"):
        return
    tasks, what = TAUGHT[config.model]
    given = {name: getattr(config, name, None) for name in ("data", "corpus", "index", "search_url")}
    others = [name for name, value in given.items() if value and not Path(value).is_relative_to(ROOT / "data")]
    if others or (config.task not in tasks and given["data"] is None):
        others = " ".join(map(flag, others or ["task"]))
        say(
            f"the bundled policy {config.model} (1.8 million parameters) knows only {what}: if {others} asks for "
            "anything else, expect 0 right answers, also after training; name a pretrained model with --model"
        )


def _check_training(config: PolicyConfig) -> None:
    for name in ("wandb_project", "wandb_group"):
        if getattr(config, name) and not config.wandb:
            raise UserError(f"{flag(name)} is for Weights & Biases: add --wandb")
    for name in ("gpus", "gpu_memory"):
        if getattr(config, name) and not config.estimate:
            raise UserError(f"{flag(name)} is for an estimate of memory: add --estimate")
    if config.gpus and config.gpu_memory is None and not config.device.startswith("cuda"):
        raise UserError(f"--gpus {config.gpus}: this run is on {config.device}: add --gpu-memory 80 for GPUs of 80 GB")
    if config.gpus and hasattr(config, "replicas") and config.gpus % (config.tensor_parallel * config.replicas):
        product = f"--tensor-parallel {config.tensor_parallel} times --replicas {config.replicas}"
        raise UserError(f"--gpus {config.gpus} cannot be divided by {product}")
    if size := getattr(config, "minibatch_size", None):
        if size % config.group_size:
            raise UserError(f"--minibatch-size {size} is not a multiple of --group-size {config.group_size}")
        if size > (rows := config.prompts_per_step * config.group_size):
            raise UserError(f"--minibatch-size {size} exceeds the {rows} rows of a rollout")
    if not config.lora_rank:
        new = ("lora_alpha", "lora_targets")
        for name in new if config.has_adapter else (*new, "load_in", "save_merged"):
            if getattr(config, name):
                raise UserError(f"{flag(name)} needs an adapter to train: add --lora-rank 16, for example")
    elif config.model == "new":
        raise UserError("--lora-rank adapts a model that exists: give a --model, or omit it")
    elif config.load_in is not None and config.adapter_path is not None:
        raise UserError(
            f"--load-in {config.load_in}: to merge the adapter of --model into quantised weights would round its "
            "changes away: omit --lora-rank to train it further, or merge it first with --save-merged"
        )
    target = parse_target(getattr(config, "stop_when", None))
    needs = {"--keep-best": getattr(config, "keep_best", None), "--stop-when": target and target[0].startswith("eval/")}
    for name in (name for name, is_given in needs.items() if is_given):
        steps = getattr(config, "steps", math.inf) if getattr(config, "epochs", None) is None else math.inf
        if not 0 < config.eval_every <= steps:
            raise UserError(
                f"{name} compares evaluations, and --eval-every {config.eval_every} makes none during training: "
                "give a number from 1 to --steps"
            )
    if getattr(config, "steps_ahead", 0) and config.epochs is not None:
        raise UserError("--steps-ahead has to know the last step: give --steps in place of --epochs")
    if getattr(config, "tools", None) and not config.tool:
        raise UserError("--no-tool leaves no tool, and --tools gives some: omit one of them")
    if getattr(config, "top_p", 1.0) < 1:
        say(
            "--top-p below 1: tokens are drawn from the most probable ones only, but trained under the full "
            "distribution: the gradient is biased towards tokens that were likely before"
        )


def check_model(config: ModelConfig) -> None:
    """Refuse a directory that does not exist, or that holds neither a model nor an adapter of an existing model."""
    if config.chat_template is not None:
        read_template(config.chat_template)
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
        # the policies that a run saved, if this is its directory: the newest checkpoint last
        steps = sorted(path.glob("checkpoints/step_*"), key=lambda step: (len(step.name), step.name))
        saved = [*(step for step in steps if step.suffix != ".partial"), *path.glob("final")]
        raise UserError(
            f"--model {shown(config.model)} holds no model (config.json) and no adapter ({ADAPTER_SETTINGS})"
            + (f"; did you mean {shown(saved[-1])}?" if saved else "")
        )


def read_template(source: str) -> str:
    """The chat template in a file."""
    try:
        template = Path(source).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--chat-template {shown(source)} cannot be read ({error})") from error
    if not template.strip():
        raise UserError(f"--chat-template {shown(source)} is empty")
    return template


def check_name(name: str | None) -> None:
    if name is not None and (name in ("", ".", "..") or len(Path(name).parts) != 1):
        raise UserError(f"--name {printable(repr(name), 60)} cannot be the name of a directory")


def check_device(name: str, is_here: bool = True) -> None:
    """Refuse a device that PyTorch does not know or this machine does not have; with `is_here` False all but CUDA."""
    if name == "auto":
        return
    try:
        device = torch.device(name)
        num_devices = torch.get_device_module(device).device_count()  # only accelerators have such a module
    except RuntimeError:
        wanted = "cpu, cuda, cuda:<number>, another accelerator that PyTorch knows (mps, xpu), or auto"
        raise UserError(f"--device must be {wanted}, not {printable(name, 40)}") from None
    if not is_here and device.type != "cuda":
        raise UserError(f"--gpu-memory is for an NVIDIA GPU, not for --device {name}: use --device cuda, or omit one")
    if is_here and (device.index or 0) >= num_devices:
        raise UserError(f"--device {name}: this machine has {num_devices} device(s) of the kind {device.type}")


def is_finite(value: object) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def is_text(value: object) -> bool:
    """Whether a value is text that a file can hold: half of a surrogate pair has no UTF-8 encoding."""
    return isinstance(value, str) and (value.isascii() or value.encode(errors="ignore").decode() == value)
