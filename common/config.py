"""The settings that every experiment has and none teaches, their checks, and the table that resolves defaults.

An experiment's `Config` inherits from `RunConfig` and adds what it teaches.
"""

import dataclasses
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch

from common.tasks.arithmetic import SYSTEM_PROMPT

ROOT = Path(__file__).resolve().parent.parent
TINY_POLICY = ROOT / "assets" / "tiny_policy"
TRAIN_DATA = ROOT / "data" / "math_tasks.jsonl"
HELDOUT_DATA = ROOT / "data" / "math_tasks_heldout.jsonl"

# What a flag becomes that was left at None, by the kind of policy. A test holds the texts of --help to these figures.
RESOLVED = {
    "tiny": {"lr": 5e-5, "max_new_tokens": 96, "micro_batch_size": 128, "system_prompt": ""},
    "full": {"lr": 1e-6, "max_new_tokens": 512, "micro_batch_size": 4, "system_prompt": SYSTEM_PROMPT},
}
# LoRA learns best at some ten times the learning rate of full fine-tuning, whatever its rank (Schulman and Thinking
# Machines Lab 2025, "LoRA Without Regret").
LORA_LR_FACTOR = 10


class UserError(Exception):
    """Something that the user can put right; shown as one sentence, without a traceback."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """What every program that trains a policy needs."""

    model: str = "tiny"  # the bundled policy "tiny", a hub id such as Qwen/Qwen2.5-0.5B-Instruct, or a directory
    seed: int = 0  # seed of data order, sampling and minibatches
    threads: int = 1  # CPU threads; on busy cores more threads can be much slower than one
    device: str = "auto"  # cpu, cuda, cuda:1; auto: cuda where there is one, else cpu
    # arithmetic, and weights that are not trained; trained weights are float32, and bfloat16 is autocast over them;
    # None: bfloat16 for models other than the bundled one on cuda, else float32
    dtype: Literal["float32", "bfloat16"] | None = None
    # how attention is computed; auto: flash_attention_2 where it is installed and fits (cuda, bfloat16), else sdpa
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    gradient_checkpointing: bool = False  # compute activations again in the backward pass: less memory, more time
    lora_rank: int = 0  # train low-rank adapters of this rank instead of all weights; 0: all weights
    lora_alpha: float | None = None  # adapters are scaled by alpha / rank; None: twice the rank
    load_in: Literal["8bit", "4bit"] | None = None  # hold the weights quantised (bitsandbytes); needs --lora-rank
    save_merged: bool = False  # with --lora-rank: also write final_merged/, a model with the adapter added in
    # held-out questions per evaluation; without --eval-data so many rows of --data are set aside
    eval_prompts: int = 256
    checkpoint_every: int = 20  # steps between checkpoints; 0: only on Ctrl-C
    keep_checkpoints: int = 2  # how many of the newest checkpoints are kept
    wandb: bool = False  # log to Weights & Biases too; without its package, a key or a network the run goes on
    name: str | None = None  # the run's name; None: date, time and seed
    runs_dir: str = "runs"  # where runs are kept: <runs-dir>/<experiment>/<name>/
    resume: str | None = None  # directory of a run to go on with, under its own settings; only --steps may be raised

    @property
    def model_path(self) -> Path | None:
        """The directory that `model` names, or None where it is a hub id or "new"."""
        if self.model == "tiny":
            return TINY_POLICY
        path = Path(self.model).expanduser()
        is_hub_id = self.model == "new" or (self.model.count("/") == 1 and self.model[0] not in "./~")
        return None if is_hub_id and not path.is_dir() else path

    @property
    def kind(self) -> str:
        """Which row of a table of resolved defaults holds: "tiny" also for a policy of the bundled one's shape."""
        if self.model == "new":
            return "new"
        is_tiny = self.model_path is not None and _shape(self.model_path) == _shape(TINY_POLICY)
        return "tiny" if is_tiny else "full"


@dataclass(frozen=True, kw_only=True)
class RunConfig(PolicyConfig):
    """What every experiment with rewards needs beside it."""

    data: str | None = None  # JSONL file, or hub dataset id[:subset], with question and answer; None: the bundled task
    eval_data: str | None = None  # the same for evaluation; None: bundled held-out file, or rows that --data gives up
    max_terms: int | None = None  # keep questions with at most so many numbers (rows need a field num_terms)
    # keep questions whose numbers have at most so many digits (rows need a field num_digits)
    max_digits: int | None = None
    max_question_length: int | None = None  # keep questions of at most so many characters
    system_prompt: str | None = None  # None: none for the bundled policy, for others one that asks for the two tags
    eval_every: int = 10  # steps between evaluations (greedy only); 0: only before and after
    samples_every: int = 1  # steps between entries of samples.jsonl (two groups; every tenth step whole); 0: none
    sampling_rows: int = 128  # completions sampled at once, which bounds the memory of the KV cache


def _shape(model_path: Path) -> tuple[int, int] | None:
    """Vocabulary and width of a Hugging Face model directory."""
    try:
        settings = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
        return settings["vocab_size"], settings["hidden_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


ConfigT = TypeVar("ConfigT", bound=PolicyConfig)


def parse_config(
    config_class: type[ConfigT], argv: Sequence[str] | None, description: str, resolved: dict[str, dict] = RESOLVED
) -> ConfigT:
    """Read the command line, resolve what was left open, and refuse what cannot work, before anything is loaded.

    Args:
        description: shown by `--help`, up to what is left out.
        resolved: the table that resolves flags left at None, by the kind of policy.

    Raises:
        UserError: a value is out of range, or two contradict each other.
    """
    import tyro

    description = description.partition("\nLeft out:")[0]  # what follows is for who reads the file
    config = tyro.cli(config_class, args=argv, description=description)
    if config.resume is not None:
        config = _resumed(config, lambda stored: tyro.cli(config_class, args=argv, default=stored))
    _check_places(config)
    table = resolved.get(config.kind)
    if table is None:
        raise UserError(f"--model {config.model} is for experiment_sft only: it has not learned anything yet")
    config = resolve(config, table)
    check_ranges(
        config,
        positive=("threads", "eval_prompts", "max_terms", "max_digits", "max_question_length", "lora_alpha",
                  "keep_checkpoints", "sampling_rows"),
        not_negative=("seed", "eval_every", "checkpoint_every", "samples_every", "lora_rank"),
    )  # fmt: skip
    _check_combinations(config)
    return config


def resolve(config: ConfigT, table: dict) -> ConfigT:
    """The settings with those filled in that were left open: from the machine, the model, and `table`."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    on_cuda = device.startswith("cuda")
    dtype = config.dtype
    if dtype is None:
        fits = on_cuda and config.kind == "full" and torch.cuda.is_bf16_supported()
        dtype = "bfloat16" if fits or config.load_in == "8bit" else "float32"
    attention = config.attn_implementation
    if attention == "auto":
        has_flash = on_cuda and dtype == "bfloat16" and importlib.util.find_spec("flash_attn") is not None
        attention = "flash_attention_2" if has_flash else "sdpa"
    left_open = {name: value for name, value in table.items() if getattr(config, name) is None}
    if config.lora_rank and "lr" in left_open:
        left_open["lr"] *= LORA_LR_FACTOR
    return dataclasses.replace(config, device=device, dtype=dtype, attn_implementation=attention, **left_open)


def _resumed(config: ConfigT, read_flags_over: Callable[[ConfigT], ConfigT]) -> ConfigT:
    """The settings of the run that `--resume` names.

    Args:
        read_flags_over: reads the command line with the given settings as its defaults, so that what then differs from
            them was given, and is another value.
    """
    directory = Path(config.resume).expanduser()
    try:
        stored = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--resume {config.resume}: no config.json of a run can be read there ({error})") from error
    names = [field.name for field in dataclasses.fields(config) if field.name in stored]
    before = dataclasses.replace(config, **{name: stored[name] for name in names})
    config = read_flags_over(before)
    for name in names:
        old, new = getattr(before, name), getattr(config, name)
        if name != "resume" and new != old and not (name == "steps" and new > old):
            raise UserError(
                f"{flag(name)} {new} differs from the run's {old}: a resumed run keeps its settings, and only --steps "
                "may be raised"
            )
    return config


def _check_places(config: PolicyConfig) -> None:
    """Refuse a device, a model directory or a name that cannot be, before a run's directory is made for it."""
    if config.model_path is not None and not config.model_path.is_dir():
        raise UserError(f"--model {config.model}: there is no such directory (a hub id is owner/name)")
    if config.name is not None and (config.name in ("", ".", "..") or len(Path(config.name).parts) != 1):
        raise UserError(f"--name {config.name!r} cannot be the name of a directory")
    if config.device != "auto":
        try:
            device = torch.device(config.device)
        except RuntimeError:
            device = None
        if device is None or device.type not in ("cpu", "cuda"):
            raise UserError(f"--device must be cpu, cuda, cuda:<number> or auto, not {config.device}")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise UserError(f"--device {config.device}: this machine has {torch.cuda.device_count()} CUDA devices")


def _check_combinations(config: PolicyConfig) -> None:
    """Refuse what needs something else that is not asked for, or not installed."""
    if config.attn_implementation == "flash_attention_2" and config.dtype == "float32":
        raise UserError("--attn-implementation flash_attention_2 computes in half precision: add --dtype bfloat16")
    if config.load_in == "8bit" and config.dtype == "float32":
        raise UserError("--load-in 8bit computes in half precision: leave --dtype out, or make it bfloat16")
    if not config.lora_rank:
        for name in ("lora_alpha", "load_in", "save_merged"):
            if getattr(config, name):
                raise UserError(f"{flag(name)} needs an adapter to train: add --lora-rank 16, for example")
    if config.load_in is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"--load-in {config.load_in} needs the package bitsandbytes: pip install bitsandbytes")


def check_ranges(config: PolicyConfig, positive: Sequence[str] = (), not_negative: Sequence[str] = ()) -> None:
    """Refuse numbers out of range; a flag that is at None, or that this experiment does not have, is in range.

    Raises:
        UserError: naming the flag and its value.
    """
    for names, is_fine, wanted in (
        (positive, lambda value: value > 0, "more than 0, and finite"),
        (not_negative, lambda value: value >= 0, "0 or more, and finite"),
    ):
        for name in names:
            value = getattr(config, name, None)
            if value is not None and not (is_fine(value) and math.isfinite(value)):
                raise UserError(f"{flag(name)} must be {wanted}, not {value}")


def flag(name: str) -> str:
    """
    >>> flag("max_new_tokens")
    '--max-new-tokens'
    """
    return "--" + name.replace("_", "-")


def run_main(main: Callable[[], object]) -> None:
    """Call `main` as a program: what the user can put right is told in one sentence, with exit status 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as interrupt:
        print(f"\n{interrupt or 'interrupted'}", file=sys.stderr)
        sys.exit(130)
