"""What a launch was asked for, and whether Accelerate started that: where it cannot, it starts less without a word.

On a machine without a GPU, for example, `accelerate launch --cpu --num_processes 2` of Accelerate 1.15 starts one
process, and a configuration file for FSDP gives plain data parallelism.
"""

import os
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
from accelerate import Accelerator, DistributedType

from common.errors import UserError

KINDS = {"fsdp": DistributedType.FSDP, "deepspeed": DistributedType.DEEPSPEED}
FILES = {"fsdp": "accelerate_configs/fsdp2.yaml", "deepspeed": "accelerate_configs/deepspeed_zero2.yaml"}
WHERE = "in the configuration file or on the command line of accelerate"


class Requested(NamedTuple):
    num_processes: int | None  # on all machines together; None: not said
    sharding: str | None  # "fsdp" or "deepspeed"; None: not asked for
    accumulation: int = 1  # Accelerate's gradient_accumulation_steps


def requested_launch() -> Requested:
    """What the environment asks for, and the command line of `accelerate launch` with its configuration file."""
    processes = int(os.environ.get("WORLD_SIZE", 0))
    accumulation = int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", 1))
    sharding = [name for name in KINDS if os.environ.get(f"ACCELERATE_USE_{name.upper()}", "").lower() == "true"]
    arguments = _arguments_of_accelerate_launch()
    if arguments is not None:
        from accelerate.commands.config.config_args import default_config_file, load_config_from_file
        from accelerate.commands.launch import launch_command_parser

        args = launch_command_parser().parse_args(arguments)
        asked = args.num_processes or 0
        if args.config_file or (Path(default_config_file).is_file() and not args.cpu):  # as accelerate launch decides
            config = load_config_from_file(args.config_file)
            asked = asked or config.num_processes
            if not args.multi_gpu:  # which overrides the type in the file
                sharding += [name for name, kind in KINDS.items() if config.distributed_type == kind]
        processes = max(processes, asked)
        accumulation = max(accumulation, args.gradient_accumulation_steps or 1)
    return Requested(processes if processes > 0 else None, sharding[0] if sharding else None, accumulation)


def check_launch(accelerator: Accelerator) -> None:
    """Refuse a launch that is not what was asked for, or that the training does not support; on every rank alike.

    Raises:
        UserError: other processes than asked for, or without the sharding that was asked for; gradient accumulation by
            Accelerate, fp16 or fp8, FSDP 1.
    """
    asked, got, script = requested_launch(), accelerator.num_processes, sys.argv[0]
    on_cpu = accelerator.device.type == "cpu"
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise UserError(
            f"mixed_precision {accelerator.mixed_precision} is not supported, because it needs a scaled loss: set "
            f"bf16, or no, {WHERE}"
        )
    plugin = accelerator.state.deepspeed_plugin  # its own configuration file may have another number
    steps = plugin.deepspeed_config.get("gradient_accumulation_steps") if plugin else 1
    steps = max(asked.accumulation, accelerator.gradient_accumulation_steps, steps if isinstance(steps, int) else 1)
    if steps > 1:
        raise UserError(
            f"gradient_accumulation_steps {steps} is not supported, because Accelerate would divide a loss by it that "
            f"is a mean already: set 1 {WHERE}, and --micro-batch-size for less memory"
        )
    processes = asked.num_processes or got
    count = f"{processes} process{'es' if processes > 1 else ''}"
    if asked.sharding and accelerator.distributed_type != KINDS[asked.sharding]:
        here = f"use torchrun --nproc-per-node {processes} {script}, which does not shard"
        there = f"use accelerate launch --config_file {FILES[asked.sharding]} {script}"
        raise UserError(
            f"{KINDS[asked.sharding].value} with {count} was asked for, but Accelerate gave "
            f"{accelerator.distributed_type.value} with {got}: "
            + (f"it needs a GPU for each process; on this machine {here}" if on_cpu else there)
        )
    if accelerator.distributed_type == DistributedType.FSDP and accelerator.state.fsdp_plugin.fsdp_version != 2:
        raise UserError(f"fsdp_version 1 is not supported: set 2 {WHERE}, as {FILES['fsdp']} does")
    if processes != got and got > 1:
        raise UserError(
            f"{count} were asked for, but Accelerate started {got}: give a multiple of the number of machines"
        )
    if processes != got:
        alone = ", each for itself" if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
        start = "torchrun --nproc-per-node" if on_cpu else "accelerate launch --multi_gpu --num_processes"
        raise UserError(f"{count} were asked for, but Accelerate started 1{alone}: use {start} {processes} {script}")


def _arguments_of_accelerate_launch() -> list[str] | None:
    """Those of the process that started this one; None if that is not `accelerate launch`."""
    try:
        words = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:  # it has ended, or may not be looked at
        return None
    names = [Path(word).name for word in words]
    for start in (0, 1, 2):  # without the interpreter, after it, and after its -m
        match names[start : start + 2]:
            case ["accelerate" | "accelerate.commands.accelerate_cli", "launch"]:
                return words[start + 2 :]
            case ["accelerate-launch" | "accelerate.commands.launch", *_]:
                return words[start + 1 :]
    return None
