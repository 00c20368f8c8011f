"""A sampler that is behind the trainer: it draws tokens with the weights of earlier steps, perhaps in other arithmetic.

In an asynchronous system the sampler works while the trainer trains. Here both are one process, and the lag is exact:
the policy gets the weights of an earlier step, samples, and gets its own back.

A completion that takes long sees several versions of the weights, if the system loads new ones in mid-completion
(in-flight weight updates: PipelineRL, arXiv 2509.19128; AReaL, arXiv 2505.24298). `swap_every` plays this: the first
tokens are drawn with the oldest weights, the next ones with those of one step later, up to the newest.
"""

import importlib.util
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from common.errors import UserError
from common.policy import Policy
from common.sampling import begin_rows, continue_rows, sample
from common.trajectory import Trajectory

from harness.base.config import DTYPES, RunConfig
from harness.processes.processes import requested_launch
from harness.run.run import Run
from harness.task.task import Task

if TYPE_CHECKING:
    from ray_samplers import RaySamplers


def make_sampler(config: RunConfig, run: Run, task: Task, policy: Policy) -> "LaggingSampler | RaySamplers":
    """What samples: this process with a lag, or the processes of --samplers."""
    if not config.samplers:
        return LaggingSampler(policy, config.lag, config.swap_every, config.sampler_dtype)
    if importlib.util.find_spec("ray") is None:
        raise UserError('--samplers needs Ray: pip install -e ".[ray]"')
    from ray_samplers import RaySamplers

    return RaySamplers(config, run, task, policy)


class LaggingSampler:
    """Samples like `common.sampling.sample`, with the weights that `policy` had `lag` steps ago.

    Args:
        policy: the one that is trained; the sampler borrows it, and leaves it as it was.
        lag: in steps. In the first steps, which have no weights that old, it is as many steps as there were.
        swap_every: number of tokens after which a completion goes on with the weights of one step later; None: never.
        dtype: of the sampler's arithmetic, "float32" or "bfloat16"; None: the policy's.
    """

    def __init__(self, policy: Policy, lag: int, swap_every: int | None = None, dtype: str | None = None):
        if requested_launch().sharding is not None:
            raise UserError("scale/asynchronous keeps the whole weights of steps: start it without FSDP and DeepSpeed")
        self._policy, self._swap_every, self.tokenizer = policy, swap_every, policy.tokenizer
        self._dtype = policy.compute_dtype if dtype is None else DTYPES[dtype]
        self._earlier: deque[list[torch.Tensor]] = deque(maxlen=lag)  # trained weights before each step, oldest first

    def keep(self) -> None:
        """Keep the policy's weights, before an update."""
        self._earlier.append([weight.detach().clone() for weight in trained(self._policy)])

    def sample(
        self,
        prompts: list[list[int]],
        group_size: int,
        *,
        max_new_tokens: int,
        prompt_index: list[int],
        **settings,
    ) -> list[Trajectory]:
        """Arguments and result as of `common.sampling.sample`; each token has the log-prob of the weights that drew it.

        After a swap the keys and values of the tokens before it are computed again with the new weights, as AReaL does;
        PipelineRL keeps those of the old weights.
        """
        oldest = len(self._earlier)
        if not self._swap_every:
            with self._weights_of(oldest):
                settings |= {"max_new_tokens": max_new_tokens, "prompt_index": prompt_index}
                return sample(self._policy, prompts, group_size, **settings)
        rows = begin_rows(prompts, group_size, prompt_index)
        for age in range(oldest, -1, -1):
            budget = (oldest - age + 1) * self._swap_every if age else max_new_tokens
            going = [row for row in rows if row.finish_reason != "stop"]
            with self._weights_of(age):
                continue_rows(self._policy, going, max_new_tokens=min(budget, max_new_tokens), **settings)
        return rows

    def staleness(self, action_mask: torch.Tensor) -> torch.Tensor:
        """How many steps old the weights were that drew each token of the last rollout: (B, T-1), 0 at other tokens."""
        number = action_mask.cumsum(dim=1) - 1  # of each action token within its completion, from 0
        swaps = number // (self._swap_every or number.shape[1])
        return (len(self._earlier) - swaps).clamp(min=0) * action_mask

    def state_dict(self) -> dict[str, list]:
        """What a checkpoint holds, so that a resumed run samples with the same weights."""
        return {"earlier_weights": list(self._earlier)}

    def load_state_dict(self, state: dict[str, list]) -> None:
        self._earlier.extend(state["earlier_weights"])

    @contextmanager
    def _weights_of(self, age: int) -> Iterator[None]:
        """Inside this context the policy has the weights of `age` steps ago, and the sampler's arithmetic."""
        policy, dtype = self._policy, self._policy.compute_dtype
        newest = [weight.detach().clone() for weight in trained(policy)] if age else []
        try:
            policy.compute_dtype = self._dtype
            if age:
                load_trained(policy, self._earlier[-age])
            yield
        finally:  # also if Ctrl-C ends the sampling
            policy.compute_dtype = dtype
            if age:
                load_trained(policy, newest)


def trained(policy: Policy) -> list[torch.nn.Parameter]:
    return [weight for weight in policy.parameters() if weight.requires_grad]


@torch.no_grad()
def load_trained(policy: Policy, weights: Sequence[torch.Tensor]) -> None:
    for weight, value in zip(trained(policy), weights, strict=True):
        weight.copy_(value)
