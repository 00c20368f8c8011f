"""A launcher's processes: they connect, share devices, and must be as many as the user asked Accelerate for."""

import dataclasses
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, TypeVar

import psutil
import torch
from torch import distributed

from common.errors import UserError
from common.parallel import data_size

from harness.base.config import ConfigT, PolicyConfig, RunConfig
from harness.base.ranks import num_launched, together
from harness.base.signals import leave
from harness.base.terminal import say

if TYPE_CHECKING:
    from accelerate import Accelerator  # only sharded launches and experiment_accelerate need it

P, T = ParamSpec("P"), TypeVar("T")

TIME_TO_MEET = 600.0  # seconds that the first process waits for the last one
PATIENCE = timedelta(hours=1)  # the limit for later waits: for the longest rollout, or a slow disk
# Accelerate's ways of sharding: their types, and the files that request them
SHARDED = {"fsdp": "FSDP", "deepspeed": "DEEPSPEED"}
FILES = {
    "fsdp": "recipes/accelerate_configs/fsdp2.yaml",
    "deepspeed": "recipes/accelerate_configs/deepspeed_zero2.yaml",
}
WHERE = "in the configuration file or on the command line of accelerate"


def join(config: PolicyConfig) -> None:
    """Connect to the other processes, if that is not done; UserError if the launch is not what was asked for."""
    if distributed.is_initialized():
        return
    if num_launched() > 1:
        meet(config.device)
    asked = requested_launch()
    with together():
        if asked.sharding == "deepspeed":
            raise UserError(
                "DeepSpeed takes its optimizer step in a backward of its own: use experiment_accelerate/train.py, or "
                f"FSDP2 ({FILES['fsdp']})"
            )
        check_request(asked, num_launched(), config.device == "cpu")
        check_parts(config)


def agreed(function: Callable[Concatenate[ConfigT, P], T]) -> Callable[Concatenate[ConfigT, P], T]:
    """Decorate a function of the settings that every process calls: if it fails in one of them, all end."""

    @functools.wraps(function)
    def call(config: ConfigT, *args: P.args, **kwargs: P.kwargs) -> T:
        if num_launched() > 1:
            join(config)
        with together():
            return function(config, *args, **kwargs)

    return call


def start_processes(config: RunConfig) -> None:
    """Connect to the other processes, or run as a single one, in an experiment that synchronises them by itself."""
    meet(config.device, "nccl")
    asked = requested_launch()
    with together():
        if asked.sharding is not None:
            used = "experiment_accelerate" if asked.sharding == "deepspeed" else "experiment_base"
            raise UserError(f"{SHARDED[asked.sharding]} was asked for, and is not used here: start {used}")
        check_request(asked, num_launched(), config.device == "cpu")
        if config.optimizer != "adamw":
            raise UserError(f"--optimizer {config.optimizer} is not for an experiment that divides its work by itself")
        rows = config.prompts_per_step * config.group_size
        check_divides("--prompts-per-step times --group-size", rows, "rows", config)


def told_precision() -> str:
    """Accelerate's mixed_precision, which `accelerate launch` hands on."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def of_this_process(config: ConfigT) -> ConfigT:
    """The settings with this process's device, one GPU for each, and with the arithmetic that Accelerate is told."""
    if told_precision() == "bf16" and config.dtype != "bfloat16":
        if config.resume is not None:
            raise UserError(
                f"--resume {config.resume} is a run in {config.dtype}, and Accelerate is told to compute in bfloat16: "
                f"set mixed_precision no {WHERE}"
            )
        say("Accelerate is told to compute in bf16: --dtype is bfloat16")
        config = dataclasses.replace(config, dtype="bfloat16")
    if num_launched() == 1 or torch.device(config.device).type != "cuda":
        return config
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise UserError(f"process {local_rank} of this machine has no GPU: start at most {torch.cuda.device_count()}")
    return dataclasses.replace(config, device=f"cuda:{local_rank}")


def check_parts(config: PolicyConfig) -> None:
    """Refuse prompts, or pairs, that the processes cannot divide equally."""
    for what in ("prompts", "pairs"):
        if (count := getattr(config, f"{what}_per_step", None)) is not None:
            check_divides(f"--{what}-per-step", count, what, config)


def check_divides(name: str, count: int, what: str, config: PolicyConfig | None = None) -> None:
    """Refuse a count that the processes cannot divide equally: those that run, or those of --estimate --gpus."""
    processes = data_size()
    if config is not None and config.gpus:
        processes = config.gpus // getattr(config, "tensor_parallel", 1)
    if count % processes:
        raise UserError(
            f"{name}: {count} {what} cannot be divided among {processes} processes: use a multiple of {processes}, or "
            "another number of processes"
        )


def meet(name: str, backend: str = "cpu:gloo,cuda:nccl") -> None:
    """Start the process group of ranks on this device, even for a single one; without CUDA through gloo."""
    if distributed.is_initialized():
        return
    place, device = {}, torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    if num_launched() == 1:
        place = {"store": distributed.HashStore(), "rank": 0, "world_size": 1}
    elif num_restarts():  # torchrun's store can still hold the addresses of processes that have ended
        rank, address, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        is_master = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank == 0
        store = distributed.TCPStore(address, port, is_master=is_master, timeout=PATIENCE)
        store = distributed.PrefixStore(f"restart {num_restarts()}", store)
        place = {"store": store, "rank": rank, "world_size": num_launched()}
    with meeting():
        backend = backend if device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, timeout=PATIENCE, **place)


def num_restarts() -> int:
    """How often torchrun has restarted the processes (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


@contextmanager
def meeting() -> Iterator[None]:
    """End the process, with a sentence, if the block does not connect it to the others within `TIME_TO_MEET`."""

    def explain(error: object) -> str:
        place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        return (
            f"the {num_launched()} processes could not meet at {place} ({' '.join(str(error).split())[:200]}): choose "
            "another port (--master-port, or --main_process_port of accelerate launch), and see that each is started"
        )

    def give_up() -> None:
        say("error: " + explain(f"waited for {TIME_TO_MEET:.0f} s"), sys.stderr, anyway=True)
        leave(2)

    timer = threading.Timer(TIME_TO_MEET, give_up)  # torch has no limit if another program holds the port
    timer.daemon = True
    timer.start()
    try:
        yield
    except distributed.DistError as error:
        raise UserError(explain(error)) from error
    finally:
        timer.cancel()


class Requested(NamedTuple):
    """The launch that the user requested from Accelerate."""

    num_processes: int | None  # on all machines together; None: not given
    sharding: str | None  # "fsdp" or "deepspeed"; None: not requested
    accumulation: int = 1  # Accelerate's gradient_accumulation_steps
    on_gpus: bool = False  # whether several GPUs were requested
    precision: str = "no"  # Accelerate's mixed_precision


def requested_launch() -> Requested:
    """Read the request from the environment and from `accelerate launch`'s command line and configuration file."""
    processes = num_launched() if "WORLD_SIZE" in os.environ else 0
    accumulation, on_gpus = int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", 1)), False
    sharding = [name for name in SHARDED if os.environ.get(f"ACCELERATE_USE_{name.upper()}", "").lower() == "true"]
    if (arguments := _arguments_of_accelerate_launch()) is not None:
        from accelerate.commands.config.config_args import default_config_file, load_config_from_file
        from accelerate.commands.launch import launch_command_parser

        args = launch_command_parser().parse_args(arguments)
        asked, on_gpus = args.num_processes or 0, args.multi_gpu
        if args.config_file or (Path(default_config_file).is_file() and not args.cpu):  # as accelerate launch does
            config = load_config_from_file(args.config_file)
            asked, on_gpus = asked or config.num_processes, on_gpus or config.distributed_type == "MULTI_GPU"
            if not args.multi_gpu:  # it overrides the type in the file
                sharding += [name for name, kind in SHARDED.items() if config.distributed_type == kind]
        processes = max(processes, asked)
        accumulation = max(accumulation, args.gradient_accumulation_steps or 1)
    return Requested(processes or None, sharding[0] if sharding else None, accumulation, on_gpus, told_precision())


def check_request(asked: Requested, got: int, on_cpu: bool) -> None:
    """Refuse what training does not support, or another number of processes; with the same result on every rank."""
    if asked.on_gpus and on_cpu:
        say(f"GPUs were asked for and none is used: training runs on the CPU, processes: {got}")
    if asked.precision not in ("no", "bf16"):
        raise UserError(f"mixed_precision {asked.precision} is not supported: set bf16, or no, {WHERE}")
    if asked.accumulation > 1:
        raise UserError(
            f"gradient_accumulation_steps {asked.accumulation} is not supported: set 1 {WHERE}, and use "
            "--micro-batch-size"
        )
    if (wanted := asked.num_processes or got) != got:
        count = f"{wanted} process{'es' if wanted > 1 else ''}"
        alone = ", each for itself" if num_launched() > 1 and got == 1 else ""
        start = "torchrun --nproc-per-node" if on_cpu else "accelerate launch --multi_gpu --num_processes"
        remedy = f"use {start} {wanted} {sys.argv[0]}" if got == 1 else "give a multiple of the number of machines"
        raise UserError(f"{count} were asked for, but Accelerate started {got}{alone}: {remedy}")


def check_launch(asked: Requested, accelerator: "Accelerator") -> None:
    """`check_request`, and refuse sharding other than what was asked for; with the same result on every rank."""
    got, script = accelerator.num_processes, sys.argv[0]
    on_cpu, kind = accelerator.device.type == "cpu", accelerator.distributed_type
    if asked.sharding and kind != SHARDED[asked.sharding]:
        wanted = asked.num_processes or got
        remedy = f"use accelerate launch --config_file {FILES[asked.sharding]} {script}"
        if on_cpu:
            remedy = f"it needs a GPU for each process; on this machine use torchrun --nproc-per-node {wanted} "
            remedy += f"{script}, which does not shard"
        what = f"{SHARDED[asked.sharding]} with {wanted} process{'es' if wanted > 1 else ''}"
        raise UserError(f"{what} was asked for, but Accelerate gave {kind.value} with {got}: {remedy}")
    if kind == "FSDP" and accelerator.state.fsdp_plugin.fsdp_version != 2:
        raise UserError(f"fsdp_version 1 is not supported: set 2 {WHERE}, as {FILES['fsdp']} does")
    plugin = accelerator.state.deepspeed_plugin  # its own configuration file may have another number, or "auto"
    by_deepspeed = plugin.deepspeed_config.get("gradient_accumulation_steps") if plugin else 1
    steps = [asked.accumulation, accelerator.gradient_accumulation_steps, by_deepspeed]
    accumulation = max(number for number in steps if isinstance(number, int))
    asked = asked._replace(accumulation=accumulation, precision=accelerator.mixed_precision)
    check_request(asked, got, on_cpu)


def _arguments_of_accelerate_launch() -> list[str] | None:
    """The arguments of the process that started this one; None if that is not `accelerate launch`."""
    try:
        words = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:  # it has ended, or we may not inspect it
        return None
    names = [Path(word).name for word in words[:4]]  # perhaps after an interpreter and its -m
    if "launch" in names and {"accelerate", "accelerate.commands.accelerate_cli"} & {*names}:
        return words[names.index("launch") + 1 :]
    start = next((name for name in names if name in ("accelerate-launch", "accelerate.commands.launch")), None)
    return None if start is None else words[names.index(start) + 1 :]
