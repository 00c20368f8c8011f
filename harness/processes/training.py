"""Processes that train one policy together: their gradients are averaged, so that all take the same step."""

import sys
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from common.errors import UserError
from common.parallel import gather_all, world_size
from common.policy import Policy

from harness.base.config import PolicyConfig
from harness.processes.data_parallel import exclude_frozen, in_8_bits
from harness.processes.processes import join, requested_launch

if TYPE_CHECKING:
    from accelerate import Accelerator  # only sharded launches and experiment_accelerate need it


def connect(config: PolicyConfig, accelerator: "Accelerator | None") -> "Accelerator | None":
    """Connect to the other processes as the launch asks for, unless the experiment has done so with an accelerator.

    Returns the accelerator if weights are sharded, else None.
    """
    is_sharded = requested_launch().sharding is not None
    if accelerator is None:
        join(config)
        if is_sharded:
            from harness.processes.accelerator import start_accelerator  # not at the top: it takes two seconds

            accelerator = start_accelerator(config)
    return accelerator if is_sharded else None


class DataParallel:
    """The processes of a run; `accelerator` is that of a sharded launch, None where each process has all weights."""

    def __init__(self, optimizer: str, accelerator=None):
        self._optimizer, self._accelerator = optimizer, accelerator
        # Whether all processes are known to have the same gradients; of a sharded one no process has all
        self._is_known = world_size() == 1 or accelerator is not None

    def prepare(
        self, policy: Policy, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """The policy, wrapped so that `backward` averages its gradients over the processes, and its optimizer.

        Alone, both stay as they are, except for --optimizer adamw_8bit.
        """
        if self._accelerator is not None:
            from harness.processes.accelerator import prepare  # not at the top: it takes two seconds

            return prepare(self._accelerator, policy, optimizer)
        if self._optimizer == "adamw_8bit":
            optimizer = in_8_bits(optimizer)
        if world_size() == 1:
            return policy, optimizer
        exclude_frozen(policy)  # also a critic's
        return DistributedDataParallel(policy), optimizer

    def check_gradients(self, step: int, policy: Policy) -> None:
        """Refuse a train.py whose processes train apart from each other; the first gradients that are not 0 show it."""
        gradients = [weight.grad for weight in policy.parameters()]
        if self._is_known or any(hasattr(gradient, "device_mesh") for gradient in gradients):
            return
        # not their norm, which is 1 wherever it was clipped
        sums = [0.0 if gradient is None else float(gradient.sum(dtype=torch.float64)) for gradient in gradients]
        sums = torch.tensor(gather_all(sums))  # (processes, weights)
        if not sums.isfinite().all():  # the update was skipped
            return
        if not torch.allclose(sums, sums[:1], rtol=0, atol=1e-4 * float(sums.abs().max())):
            raise UserError(
                f"step {step}: the processes have different gradients, so each would train a policy of its own. In "
                f"{sys.argv[0]}, call run.prepare, train the model that it returns, and divide by minibatch.num_rows, "
                "as experiment_base/train.py does; or start one process, with python"
            )
        self._is_known = bool(sums.any())
