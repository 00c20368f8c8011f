"""The update under `--micro-batch-size auto`: where memory runs out it is made again, with smaller micro-batches."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from common.errors import UserError
from common.fast.auto_size import AutoSize, fits, is_out_of_memory
from common.parallel import world_size
from common.policy import Policy

Update = Callable[..., Any]


def within_memory(update: Update) -> Update:
    """Let an `update(config, ...)` halve its micro-batches where memory runs out, if their size is automatic.

    It is then called again, with the weights and the optimizer as they were before. If the update takes several
    optimizer steps, these are copied to the memory of the host beforehand; if it takes one, nothing has changed yet
    when a forward or backward pass fails.

    Where processes train together, one of them cannot begin again while the others wait for its gradients, and what
    shards weights is in the middle of a pass: there the error ends the run.

    Raises:
        UserError: memory ran out in the only optimizer step, which may have changed some of the weights.
    """

    @functools.wraps(update)
    def call(config, *arguments, **named):
        size = config.micro_batch_size
        if not isinstance(size, AutoSize):
            return update(config, *arguments, **named)
        given = (*arguments, *named.values())
        if not _can_begin_again(given):
            return update(dataclasses.replace(config, micro_batch_size=size.now), *arguments, **named)
        (optimizer,) = (value for value in given if isinstance(value, torch.optim.Optimizer))
        optimizer = getattr(optimizer, "optimizer", optimizer)  # without what Accelerate puts around it
        before = _State(optimizer) if _takes_several_steps(config) else None
        results, steps = [], []

        def attempt() -> None:
            try:
                with _without_averaging(given):
                    results.append(update(dataclasses.replace(config, micro_batch_size=size.now), *arguments, **named))
            except Exception as error:
                if steps and before is None and is_out_of_memory(error):
                    raise UserError(
                        "memory ran out in the optimizer's step, which smaller micro-batches do not help: train fewer "
                        "weights (--lora-rank 16, for example), or a smaller model"
                    ) from error
                raise

        hook = optimizer.register_step_pre_hook(lambda *_: steps.append(len(steps)))
        try:
            while not fits(size, None, attempt):
                optimizer.zero_grad()
                if before is not None:
                    before.restore()
        finally:
            hook.remove()
        return results[0]

    return call


def _can_begin_again(given: tuple) -> bool:
    """Whether an update that is given this has no other process, or its own shards, to consider."""
    if not distributed.is_initialized():
        return True
    kinds = {type(value) for value in given if isinstance(value, nn.Module)}
    return world_size() == 1 and kinds <= {Policy, DistributedDataParallel}


@contextmanager
def _without_averaging(given: tuple) -> Iterator[None]:
    """Inside, the DDP of one process leaves gradients as they are; after a pass that fails it would refuse another."""
    with ExitStack() as stack:
        for value in given:
            if isinstance(value, DistributedDataParallel):
                stack.enter_context(value.no_sync())
        yield


def _takes_several_steps(config) -> bool:
    return config.epochs_per_step > 1 or config.minibatch_size not in (
        None,
        config.prompts_per_step * config.group_size,
    )


class _State:
    """A copy, in the memory of the host, of the weights that are trained and of what the optimizer knows of them."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
        self._weights = [(weight, _copy(weight)) for weight in weights]
        self._states = {
            weight: {name: _copy(value) for name, value in optimizer.state[weight].items()}
            for weight in weights
            if weight in optimizer.state
        }

    def restore(self) -> None:
        """A weight of which the optimizer knew nothing, as before the first step, is unknown to it again."""
        state = self._optimizer.state
        with torch.no_grad():
            for weight, before in self._weights:
                weight.copy_(before)
                if weight not in self._states:
                    state.pop(weight, None)
                for name, value in self._states.get(weight, {}).items():
                    if isinstance(value, torch.Tensor):
                        state[weight][name].copy_(value)
                    else:
                        state[weight][name] = value


def _copy(value: object) -> object:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
