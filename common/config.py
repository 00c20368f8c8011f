"""The settings that every experiment has and none teaches, their checks, and the table that resolves defaults.

An experiment's `Config` inherits from `RunConfig` and adds what it teaches.
"""

import dataclasses
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
    "tiny": {"lr": 5e-5, "max_new_tokens": 96, "system_prompt": ""},
    "full": {"lr": 1e-6, "max_new_tokens": 512, "system_prompt": SYSTEM_PROMPT},
}


class UserError(Exception):
    """Something that the user can put right; shown as one sentence, without a traceback."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """What every program that trains a policy needs."""

    model: str = "tiny"  # the bundled policy "tiny", a hub id such as Qwen/Qwen2.5-0.5B-Instruct, or a directory
    seed: int = 0  # of everything random: data order, sampling, minibatches
    threads: int = 1  # CPU threads; on busy cores more threads can be much slower than one
    device: str = "auto"  # cpu, cuda, cuda:1; auto: cuda where there is one, else cpu
    dtype: Literal["float32", "bfloat16"] = "float32"  # arithmetic; bfloat16 is autocast, with weights in float32
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"  # how attention is computed
    eval_prompts: int = 256  # held-out questions of an evaluation; a user's data without eval data gives up so many
    checkpoint_every: int = 0  # steps between checkpoints of the policy; 0: only the final one
    name: str | None = None  # of the run; None: date, time and seed
    runs_dir: str = "runs"  # where runs are kept: <runs-dir>/<experiment>/<name>/

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
    max_terms: int | None = None  # keep questions with at most so many numbers (needs num_terms)
    max_digits: int | None = None  # keep questions whose numbers have at most so many digits (needs num_digits)
    max_question_length: int | None = None  # keep questions of at most so many characters
    system_prompt: str | None = None  # None: none for the bundled policy, for others one that asks for the two tags
    eval_every: int = 10  # steps between evaluations (greedy only); 0: only before and after
    samples_every: int = 1  # steps between entries of samples.jsonl (two groups; every tenth step whole); 0: none


def _shape(model_path: Path) -> tuple[int, int] | None:
    """Vocabulary and width of a Hugging Face model directory."""
    try:
        settings = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
        return settings["vocab_size"], settings["hidden_size"]
    except (OSError, ValueError, KeyError):
        return None


ConfigT = TypeVar("ConfigT", bound=PolicyConfig)


def parse_config(
    config_class: type[ConfigT], argv: Sequence[str] | None, description: str, resolved: dict[str, dict] = RESOLVED
) -> ConfigT:
    """Read the command line, resolve what was left open, and refuse what cannot work, before anything is loaded.

    Args:
        description: shown by `--help`.
        resolved: the table that resolves flags left at None, by the kind of policy.

    Raises:
        UserError: a value is out of range, or two contradict each other.
    """
    import tyro

    config = tyro.cli(config_class, args=argv, description=description, config=(tyro.conf.FlagConversionOff,))
    _check_places(config)
    table = resolved.get(config.kind)
    if table is None:
        raise UserError(f"--model {config.model} is for experiment_sft only: it has not learned anything yet")
    left_open = {name: value for name, value in table.items() if getattr(config, name) is None}
    if config.device == "auto":
        left_open["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    config = dataclasses.replace(config, **left_open)
    check_ranges(
        config,
        positive=("threads", "eval_prompts", "max_terms", "max_digits", "max_question_length"),
        not_negative=("seed", "eval_every", "checkpoint_every", "samples_every"),
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
    if config.attn_implementation == "flash_attention_2" and config.dtype != "bfloat16":
        raise UserError("--attn-implementation flash_attention_2 computes in half precision: add --dtype bfloat16")


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
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
