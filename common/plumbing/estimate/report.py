"""What `--estimate` prints: memory by part and launch, whether it fits, the time of a step, and what would help."""

from pathlib import Path

import psutil
import torch

from common.chat import encode_prompt
from common.errors import UserError
from common.parallel import is_main, world_size

from common.plumbing.config import PolicyConfig, shown
from common.plumbing.estimate.advice import helpful
from common.plumbing.estimate.memory import LAUNCHES, PARTS, Memory, setting_of
from common.plumbing.estimate.shape import Shape, rank_of
from common.plumbing.estimate.timing import measure
from common.plumbing.pretrained import read_template, read_tokenizer
from common.plumbing.task import Task
from common.plumbing.terminal import say

LONGEST = 32  # rows whose prompts are encoded: those with the longest texts
CGROUP = Path("/sys/fs/cgroup/memory.max")
FULL = 0.95  # of a device's memory: above it, fragmentation alone can be too much
GB = 1e9


def estimate(config: PolicyConfig, task: Task | None) -> None:
    """Print what the run needs. Nothing is trained or written, and no weights are read.

    Raises:
        UserError: the model's config or tokenizer cannot be read.
    """
    shape = Shape(config)
    prompt = 0 if task is None else longest_prompt(config, task)
    setting = setting_of(config, shape, prompt)
    if not is_main():
        return
    processes = max(2, world_size(), torch.cuda.device_count())
    columns = [Memory(shape, setting, launch, 1 if launch == "one" else processes) for launch in LAUNCHES]
    device, total = device_memory(config.device)
    rank = rank_of(config)
    trained = shape.adapter_parameters(rank) if rank else shape.num_parameters
    say(f"{shown(config.model)}: {shape.num_parameters:,} parameters, {trained:,} trained; {config.dtype} on {device}")
    sampled = f"prompts of up to {prompt} tokens, completions of up to {setting.completion}"
    say(f"{setting.rows} rows per step ({sampled if task is not None else f'of up to {setting.completion} tokens'})")
    _print_table(columns, total)
    peak = columns[0].peak
    share = peak / total
    fits = "fits" if share <= FULL else "does not fit" if share > 1 else "hardly fits"
    say(f"one process {fits}: {peak / GB:.1f} of {total / GB:.1f} GB ({share:.0%}), most in: {columns[0].peak_phase}")
    _print_time(config, shape, setting)
    found = helpful(shape, setting)[:3]
    say("less memory: " + ("; ".join(f"{flags} ({size / GB:.2g} GB)" for flags, size in found) or "no flag helps much"))


def longest_prompt(config: PolicyConfig, task: Task) -> int:
    """In tokens, of all rows of training and evaluation."""
    has_tokenizer = config.adapter_path is not None and (config.adapter_path / "tokenizer_config.json").is_file()
    tokenizer = read_tokenizer(str(config.adapter_path) if has_tokenizer else config.base, config.base_path is not None)
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template)
    if tokenizer.chat_template is None:
        raise UserError(f"--model {shown(config.model)} has no chat template: give it one with --chat-template FILE")
    rows = sorted([*task.train_rows, *task.eval_rows], key=lambda row: -len(row.question))[:LONGEST]
    messages = [task.messages(row, config.system_prompt) for row in rows]
    return max(len(encode_prompt(tokenizer, each, task.tools)) for each in messages)


def device_memory(device: str) -> tuple[str, float]:
    """Its name, and how many bytes of memory it has, or this process may have."""
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        return properties.name, properties.total_memory
    limits = [psutil.virtual_memory().total]
    try:
        import resource
    except ImportError:  # Windows
        pass
    else:
        limits.append(resource.getrlimit(resource.RLIMIT_AS)[0])
    if CGROUP.is_file() and (text := CGROUP.read_text(encoding="utf-8").strip()).isdecimal():
        limits.append(int(text))
    return device, min(limit for limit in limits if limit > 0)  # -1: there is none


def _print_table(columns: list[Memory], total: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("GB per device", box=None, padding=(0, 2, 0, 0))
    for memory in columns:
        name = LAUNCHES[memory.launch]
        table.add_column("one" if name is None else f"{name} x{memory.processes}", justify="right", no_wrap=True)
    for part in PARTS:
        table.add_row(part, *(f"{memory.part(part) / GB:.2f}" for memory in columns))
    table.add_row("peak", *(f"{memory.peak / GB:.2f}" for memory in columns))
    table.add_row("of the device", *(f"{memory.peak / total:.0%}" for memory in columns))
    Console(width=120).print(table)


def _print_time(config: PolicyConfig, shape: Shape, setting) -> None:
    try:
        seconds = measure(config, shape, setting)
    except (RuntimeError, MemoryError):
        say(f"a step: not measured, because {config.device} has no memory for two layers of this model")
        return
    tokens = setting.rows * setting.completion
    phases = ", ".join(f"{name} {value:.3g}" for name, value in vars(seconds).items() if value)
    say(
        f"a step of {tokens:,} tokens: at most about {seconds.total:.3g} s ({phases}), from a measurement of two layers"
    )
