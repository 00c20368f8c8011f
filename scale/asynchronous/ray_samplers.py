"""Processes that sample while this one trains, started by Ray on this machine or on a cluster.

    trainer                                  each of N samplers: a policy of its own
    weights after every update           ->  kept, if they are newer
    the questions of the steps to come   ->  a queue, worked off with the newest weights that are there
    completions, and what drew them      <-  and so on

The queue is bounded: the questions of step t are sent when t - 1 - `max_staleness` updates are done, so no token is
drawn with weights that are more updates old. How old they really are depends on who is faster; the random numbers do
not: what a sampler draws depends on the seed, the step, the question and the weights alone. A sampler that dies is
started again by Ray, and gets the same questions: they are trained on once.

Without RAY_ADDRESS Ray runs on this machine only. With it, the samplers are on the machines of that cluster, which need
the same packages, and this repository in the same place.
"""

import dataclasses
import json
import math
import os
import time
from typing import NamedTuple

import ray
import torch
from lagging_sampler import load_trained, trained

from common.chat import encode_prompt
from common.errors import EngineError, UserError
from common.parallel import world_size
from common.policy import Policy
from common.sampling import begin_rows, continue_rows, in_groups
from common.trajectory import Trajectory

from harness.base.config import DTYPES, RunConfig
from harness.data.order import num_steps, prompts_of_step
from harness.models.loading import load_policy
from harness.run.run import Run
from harness.task.task import Task

OBJECT_STORE = 2**30  # bytes of shared memory on this machine, for the weights that samplers have not yet taken


class Part(NamedTuple):
    """What a sampler returns: some rows of a step."""

    rows: list[Trajectory]
    versions: list[int]  # updates that the weights had, for each `swap_every` tokens of every row
    start: float  # seconds, as time.time() has them
    end: float


class SamplerProcess:
    """A sampler: in a process of its own, it is what Ray calls an actor.

    Args:
        config: how to load the policy.
        temperature, swap_every, dtype: as of the run.
    """

    def __init__(self, config: RunConfig, temperature: float, swap_every: int | None, dtype: str | None):
        torch.set_num_threads(config.threads)
        self._policy, self._swap_every = load_policy(config, temperature), swap_every
        self._policy.compute_dtype = self._policy.compute_dtype if dtype is None else DTYPES[dtype]
        self._newest: tuple[int, list[torch.Tensor]] = (-1, [])

    @ray.method(concurrency_group="weights")  # also while it samples
    def take(self, version: int, weights: list[torch.Tensor]) -> None:
        """Keep the trained weights after `version` updates, unless there are newer ones."""
        self._newest = max(self._newest, (version, weights), key=lambda pair: pair[0])

    def sample(
        self,
        version: int,
        weights: list[torch.Tensor],
        prompts: list[list[int]],
        group_size: int,
        rows: range,
        *,
        max_new_tokens: int,
        prompt_index: list[int],
        **settings,
    ) -> Part:
        """Sample some rows like `common.sampling.sample`, with weights that are at least those given."""
        start = time.time()
        self.take(version, weights)
        trajectories, versions, budget = begin_rows(prompts, group_size, prompt_index, rows), [], 0
        while budget < max_new_tokens and (going := [row for row in trajectories if row.finish_reason != "stop"]):
            number, weights = self._newest
            load_trained(self._policy, weights)
            versions.append(number)
            budget = min(budget + (self._swap_every or max_new_tokens), max_new_tokens)
            continue_rows(self._policy, going, max_new_tokens=budget, **settings)
        return Part(trajectories, versions, start, time.time())


class RaySamplers:
    """Samples in place of `LaggingSampler`. `lanes.jsonl` in the run's directory has what each process did when."""

    def __init__(self, config: RunConfig, run: Run, task: Task, policy: Policy):
        if world_size() > 1:
            raise UserError("--samplers starts the processes that sample: start one process that trains")
        self._config, self._task, self._policy, self.tokenizer = config, task, policy, policy.tokenizer
        self._lanes = (run.directory / "lanes.jsonl").open("a", encoding="utf-8")
        self._asked: dict[int, list[tuple[int, ray.ObjectRef]]] = {}  # by step: who was asked, and the part to come
        self._ages: list[int] = []  # of every token of the newest rollout: how many updates old its weights were
        self._is_training_since = None
        run.contexts.callback(self._lanes.close)
        run.contexts.callback(ray.shutdown)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a report to Ray's makers, otherwise
        here = {"num_cpus": config.samplers, "object_store_memory": OBJECT_STORE, "include_dashboard": False}
        there = os.environ.get("RAY_ADDRESS")
        try:
            ray.init(logging_level="ERROR", log_to_driver=False, **({} if there else here))
        except ConnectionError as error:
            raise UserError(f"no connection to the Ray cluster of RAY_ADDRESS={there}: {error}") from error
        needs = {"num_cpus": 1, "num_gpus": int(config.device == "cuda")}
        for kind, need in zip(("CPU", "GPU"), needs.values(), strict=True):
            if config.samplers * need > (found := ray.cluster_resources().get(kind, 0)):
                raise UserError(f"--samplers {config.samplers}: Ray has {found:.0f} {kind}s, one is for each sampler")
        again = {"max_restarts": -1, "max_task_retries": -1}  # a sampler that has died; what it was asked
        actor = ray.remote(**needs, **again, concurrency_groups={"weights": 1})(SamplerProcess)
        settings = RunConfig(**{field.name: getattr(config, field.name) for field in dataclasses.fields(RunConfig)})
        arguments = settings, config.temperature, config.swap_every, config.sampler_dtype
        self._samplers = [actor.remote(*arguments) for _ in range(config.samplers)]

    def sample(self, *_, key: tuple[int, int], **__) -> list[Trajectory]:
        """The rows of step `key[1]`, whose prompts were sent before; the samplers go on with the next steps."""
        step, config, began = key[1], self._config, time.time()
        self._log("trainer", step, self._is_training_since, began)
        version, weights = step - 1, ray.put([weight.detach().cpu() for weight in trained(self._policy)])
        for sampler in self._samplers:
            sampler.take.remote(version, weights)
        last = num_steps(config, len(self._task.train_rows))
        for later in range(step, min(step + config.max_staleness, last) + 1):
            if later not in self._asked:
                self._ask(later, version, weights)
        parts = []
        try:
            for number, reference in self._asked.pop(step):
                parts.append(ray.get(reference))
                self._log(f"sampler {number}", step, parts[-1].start, parts[-1].end, versions=parts[-1].versions)
        except ray.exceptions.RayError as error:
            raise EngineError(f"a sampler has failed: {str(error).strip().splitlines()[-1]}") from error
        self._ages = [
            version - part.versions[token // (config.swap_every or config.max_new_tokens)]
            for part in parts for row in part.rows for token in range(row.num_action_tokens)
        ]  # fmt: skip
        self._is_training_since = time.time()
        return [row for part in parts for row in part.rows]

    def _ask(self, step: int, version: int, weights: ray.ObjectRef) -> None:
        """Send the questions of a step, each part to the sampler that has least to do."""
        config, task = self._config, self._task
        prompt_index = prompts_of_step(len(task.train_rows), config.prompts_per_step, step, config.seed)
        conversations = [task.messages(task.train_rows[index], config.system_prompt) for index in prompt_index]
        prompts = [encode_prompt(self.tokenizer, messages) for messages in conversations]
        settings = {"max_new_tokens": config.max_new_tokens, "prompt_index": prompt_index, "top_p": config.top_p}
        settings |= {"key": (config.seed, step), "generation_batch_size": config.generation_batch_size}
        self._asked[step] = []
        for groups in in_groups(range(len(prompts)), math.ceil(len(prompts) / len(self._samplers))):
            rows = range(groups[0] * config.group_size, (groups[-1] + 1) * config.group_size)
            number = min(range(len(self._samplers)), key=self._open_parts)
            call = self._samplers[number].sample.remote
            self._asked[step].append((number, call(version, weights, prompts, config.group_size, rows, **settings)))

    def _open_parts(self, number: int) -> int:
        asked = [part for parts in self._asked.values() for who, part in parts if who == number]
        return len(ray.wait(asked, num_returns=len(asked), timeout=0)[1]) if asked else 0

    def keep(self) -> None:
        """Nothing: the samplers get the new weights when the next step begins."""

    def staleness(self, action_mask: torch.Tensor) -> torch.Tensor:
        """How many updates old the weights were that drew each token of the last rollout: (B, T-1)."""
        found = torch.zeros_like(action_mask)
        found[action_mask.bool()] = torch.tensor(self._ages, dtype=found.dtype, device=found.device)
        return found

    def state_dict(self) -> dict:
        """Nothing: a resumed run asks again for what was on its way, with the weights of the checkpoint."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass

    def _log(self, lane: str, step: int, start: float | None, end: float, **more: object) -> None:
        if start is not None:
            self._lanes.write(json.dumps({"lane": lane, "step": step, "start": start, "end": end} | more) + "\n")
            self._lanes.flush()
