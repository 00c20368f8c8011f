"""The processes that a launcher has started: they meet, and share the devices of their machine."""

import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed

from common.errors import UserError
from common.parallel import world_size

from common.plumbing.config import ConfigT
from common.plumbing.ending import leave
from common.plumbing.ranks import num_launched, together
from common.plumbing.signals import call_after
from common.plumbing.terminal import say

TIME_TO_MEET = 600.0  # seconds for which the first process waits for the last one
PATIENCE = timedelta(hours=1)  # for which they wait later: for the longest rollout, or a slow disk


def start_processes(config: ConfigT) -> ConfigT:
    """Meet the other processes, or be one alone; the settings with the device of this one.

    Raises:
        UserError: they cannot meet, or cannot share the devices or the rows of a step.
    """
    config = dataclasses.replace(config, device=own_device(config.device))
    if torch.device(config.device).type == "cuda":
        torch.cuda.set_device(torch.device(config.device).index or 0)
    meet("nccl" if config.device.startswith("cuda") else "gloo")
    with together():
        check_divides("--prompts-per-step times --group-size", config.prompts_per_step * config.group_size, "rows")
    return config


def own_device(device: str) -> str:
    """The device of this process, where the flag, or the run that is resumed, says `device`: of several, one GPU each.

    Raises:
        UserError: there are fewer GPUs than processes.
    """
    if num_launched() == 1 or torch.device(device).type != "cuda":
        return device
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise UserError(f"process {local_rank} of this machine has no GPU: start at most {torch.cuda.device_count()}")
    return f"cuda:{local_rank}"


def meet(backend: str) -> None:
    """Start the process group, through which ranks talk to each other; also that of one process.

    Raises:
        UserError: the processes did not meet.
    """
    if distributed.is_initialized():
        return
    place = {"store": distributed.HashStore(), "rank": 0, "world_size": 1} if num_launched() == 1 else {}
    try:
        with meeting():
            distributed.init_process_group(backend, timeout=PATIENCE, **(place or _place_after_restart()))
    except ValueError as error:  # a variable of the launcher is missing
        raise could_not_meet(error) from error


def num_restarts() -> int:
    """How often torchrun has started the processes again (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def _place_after_restart() -> dict:
    """Where processes meet that were started again: torchrun's store can hold the addresses of those that ended."""
    if not num_restarts():
        return {}
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_master = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and os.environ["RANK"] == "0"
    store = distributed.TCPStore(address, port, is_master=is_master, timeout=PATIENCE)
    store = distributed.PrefixStore(f"restart {num_restarts()}", store)
    return {"store": store, "rank": int(os.environ["RANK"]), "world_size": num_launched()}


@contextmanager
def meeting() -> Iterator[None]:
    """End the process if it does not meet the others in the block within `TIME_TO_MEET`.

    Raises:
        UserError: they cannot meet.
    """

    def give_up() -> None:
        waited = TimeoutError(f"waited for {TIME_TO_MEET:.0f} s")
        say(f"error: {could_not_meet(waited)}", sys.stderr, anyway=True)
        leave(2)

    try:
        with call_after(TIME_TO_MEET, give_up):  # torch has no limit for a port where a stranger is silent
            yield
    except distributed.DistError as error:
        raise could_not_meet(error) from error


def could_not_meet(error: Exception) -> UserError:
    place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    return UserError(
        f"the {num_launched()} processes could not meet at {place} ({' '.join(str(error).split())[:200]}): choose "
        "another port (--master-port, or --main_process_port of accelerate launch), and see that each is started"
    )


def check_divides(name: str, count: int, what: str) -> None:
    """
    Raises:
        UserError: the processes cannot have equal parts.
    """
    if count % world_size():
        raise UserError(
            f"{name}: {count} {what} cannot be divided among {world_size()} processes: use a multiple of "
            f"{world_size()}, or another number of processes"
        )
