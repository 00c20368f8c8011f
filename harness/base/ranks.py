"""What the processes of a run have to agree on: who speaks, what the main process has decided, and how they end."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import distributed

from common.errors import UserError
from common.parallel import gather, rank, world_size

T = TypeVar("T")


class EndedElsewhereError(Exception):
    """Another process has ended the run, and says why."""


def num_launched() -> int:
    """How many processes the launcher (torchrun, accelerate launch, ...) has started, whether they have met or not."""
    return int(os.environ.get("WORLD_SIZE", 1))


def launcher() -> str:
    """The program that has started this one, as one would type it."""
    if num_launched() == 1:
        return "python"
    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        return "accelerate launch <its options>"
    return f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', num_launched())}"


def is_first_here() -> bool:
    """Whether this process is the first one of its machine."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def is_speaker() -> bool:
    """Whether this process is the one that prints; until the processes have met, the first one of each machine is."""
    return rank() == 0 if distributed.is_initialized() else is_first_here()


def on_main(function: Callable[[], T]) -> T:
    """Call `function` on the main process; all get what it returns, or on its error EndedElsewhereError."""
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
    """End all processes if one finds a UserError in the block, within which they must not communicate."""
    error = None
    try:
        yield
    except UserError as raised:
        error = raised
    sentences = gather(None if error is None else str(error))
    failed = [f"process {number}: {sentence}" for number, sentence in enumerate(sentences) if sentence is not None]
    if failed and rank() > 0:
        raise EndedElsewhereError from error
    if failed:
        raise error or UserError(failed[0])


def check_alike(values: dict[str, object]) -> None:
    """Refuse values that are not the same on all processes that know them."""
    first, *everywhere = gather(values)
    for number, others in enumerate(everywhere, start=1):
        for name in first.keys() & others.keys():
            if others[name] != first[name]:
                sentence = f"{name} is {first[name]} in process 0, but {others[name]} in process {number}"
                raise UserError(sentence) if rank() == 0 else EndedElsewhereError


def has_lost_others(error: BaseException) -> bool:
    """Whether an error means that another process has gone."""
    is_gloo = isinstance(error, RuntimeError) and ("gloo" in str(error) or "Connection closed by peer" in str(error))
    return world_size() > 1 and (is_gloo or isinstance(error, distributed.DistError))
