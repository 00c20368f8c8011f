"""Agreement between the processes of a run: which process prints, what the main process decided, and how they end."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import distributed

from common.errors import UserError
from common.parallel import gather_all, rank, world_size

T = TypeVar("T")


class EndedElsewhereError(Exception):
    """Another process has ended the run and reports why."""


def num_launched() -> int:
    """How many processes the launcher (torchrun, accelerate launch, ...) started, whether connected yet or not."""
    return int(os.environ.get("WORLD_SIZE", 1))


def launcher() -> str:
    """The program that started this process, as a user would type it."""
    if num_launched() == 1:
        return "python"
    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        return "accelerate launch <its options>"
    return f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', num_launched())}"


def is_first_here() -> bool:
    """Whether this process is the first one on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def is_speaker() -> bool:
    """Whether this process prints; until the processes are connected, the first one on each machine does."""
    return rank() == 0 if distributed.is_initialized() else is_first_here()


def on_main(function: Callable[[], T]) -> T:
    """Call `function` on the main process; all processes get its result or, if it fails, an EndedElsewhereError."""
    if world_size() == 1:
        return function()
    message, error = [(True, None)], None
    if rank() == 0:
        try:
            message = [(False, function())]
        except BaseException as raised:
            error = raised
    distributed.broadcast_object_list(message, src=0)
    has_failed, result = message[0]
    if has_failed:
        raise error or EndedElsewhereError
    return result


@contextmanager
def together() -> Iterator[None]:
    """End all processes if any of them raises a UserError in the block, which must not communicate."""
    error = None
    try:
        yield
    except UserError as raised:
        error = raised
    sentences = gather_all(None if error is None else str(error))
    failed = [f"process {number}: {sentence}" for number, sentence in enumerate(sentences) if sentence is not None]
    if failed and rank() > 0:
        raise EndedElsewhereError from error
    if failed:
        raise error or UserError(failed[0])


def check_alike(values: dict[str, object]) -> None:
    """Refuse values that differ between the processes that know them."""
    first, *everywhere = gather_all(values)
    for number, others in enumerate(everywhere, start=1):
        for name in first.keys() & others.keys():
            if others[name] != first[name]:
                sentence = f"{name} is {first[name]} in process 0, but {others[name]} in process {number}"
                raise UserError(sentence) if rank() == 0 else EndedElsewhereError


def has_lost_others(error: BaseException) -> bool:
    """Whether an error means that another process is gone."""
    is_gloo = isinstance(error, RuntimeError) and ("gloo" in str(error) or "Connection closed by peer" in str(error))
    return world_size() > 1 and (is_gloo or isinstance(error, distributed.DistError))
