"""Sampling by an inference engine: a server that holds a copy of the policy's weights and answers in token ids.

Three things can go wrong without an error: the engine samples with old weights, it returns log-probs of another
distribution, or training does not use the tokens that it sampled. So weights are pushed after every change, the
training code compares log-probs with the trainer's, and this class checks every answer.
"""

import asyncio
import math
import time
from concurrent.futures import Future, wait
from pathlib import Path
from typing import NamedTuple

import torch

from common.errors import EngineError
from common.keyed import keyed_generator
from common.parallel import gather_all, is_main
from common.policy import Policy
from common.sampling import begin_rows, in_groups
from common.trajectory import Trajectory

from harness.engines.client import Completion, RefusedError
from harness.engines.folder import export, export_divided
from harness.engines.sglang import SGLang
from harness.engines.vllm import VLLM

MOST_REQUESTS = 64  # at the same time, one per prompt; the engine batches them
SEEDS = 2**62  # range of seeds for prompts; completion j of a prompt has its seed + j
ROUNDING = 1e-4  # nats that rounding can lift a log-prob above 0


class Sampling(NamedTuple):
    """Trajectories that an engine is generating in the background."""

    engine: "Engine"
    future: "Future[list[Trajectory]]"
    seconds: dict[str, float]

    def result(self, sleeps: bool = True) -> list[Trajectory]:
        """Wait for the trajectories of this rank. All ranks call it together; if one rank fails, all do.

        With `sleeps`, an engine that sleeps during updates then goes to sleep.
        """
        rows, error = [], None
        try:
            rows = self.future.result()
        except EngineError as raised:
            error = raised
        raise_together(error)
        self.engine.seconds = self.seconds
        if sleeps and self.engine.sleeps:
            self.engine.sleep()
        return rows


class Engine:
    """An inference engine at http://host:port. Its `sample` can replace `common.sampling.sample`.

    Weights of `dtype` are written into `folder`, which the engine must see under the same path. If it `sleeps`, it has
    no weights and no cache between the `result` of a sampling and the next one, which pushes them again.
    """

    def __init__(self, url: str, folder: Path, dtype: torch.dtype = torch.float32, sleeps: bool = False):
        self.server, self.sleeps = connect(url, dtype), sleeps
        self.length_flag = self.server.length_flag
        self.folder, self.dtype = folder, dtype
        self.max_length = self.server.max_length  # prompt plus completion
        self.seconds = {"weights": 0.0, "generation": 0.0}  # for the samples whose `result` was the last one
        self._holds: object = None  # the engine's weights, see `fingerprint`; None: unknown
        self._newest: Future = Future()  # the sampling in progress
        self._newest.set_result([])

    def sample(self, policy: Policy, prompts: list[list[int]], group_size: int, **settings) -> list[Trajectory]:
        """Sample `group_size` completions of every prompt like `common.sampling.sample`, with these differences:

        Random numbers come from the engine: one seed per prompt, from `key` and the prompt's index, plus the
        completion's index. `generation_batch_size` has no effect: the engine forms its own batches. Under `top_p` below
        1, vLLM records the log-probs of the truncated distribution.
        """
        return self.begin(policy, prompts, group_size, **settings).result(sleeps=False)  # more may be asked at once

    def begin(
        self,
        policy: Policy,
        prompts: list[list[int]],
        group_size: int,
        *,
        max_new_tokens: int,
        key: tuple[int, ...],
        prompt_index: list[int] | None = None,
        rows: range | None = None,
        top_p: float = 1.0,
        greedy: bool = False,
        push: bool = True,
        **_,
    ) -> Sampling:
        """`sample` in the background: returns as soon as the engine has the weights, which may then change.

        A call waits for the previous one. All ranks call it together. Without `push` the engine keeps its current
        weights, unless it has none yet.
        """
        trajectories = begin_rows(prompts, group_size, prompt_index, rows)
        longest = max(map(len, prompts), default=0)
        if longest + max_new_tokens > self.max_length:
            raise EngineError(
                f"{self.server.about} takes sequences of up to {self.max_length} tokens, not a prompt of "
                f"{longest} and a completion of up to {max_new_tokens}: start it with a longer {self.length_flag}"
            )
        wait([self._newest])  # the engine must not receive weights while it samples
        seconds, began = {"weights": 0.0, "generation": 0.0}, time.perf_counter()
        if (push or self._holds is None) and self.push(policy):
            seconds["weights"] = time.perf_counter() - began
        settings = {
            "max_tokens": max_new_tokens,
            "temperature": 0.0 if greedy else policy.temperature,
            "top_p": 1.0 if greedy else top_p,
            "stop_token_ids": policy.end_of_turn_ids,
        }
        if policy.stop_texts:
            settings |= {"stop": list(policy.stop_texts), "include_stop_str_in_output": True}
        groups = in_groups(trajectories, group_size, rows)
        num_ids = policy.model.get_input_embeddings().weight.shape[0]
        self._newest = self.server.submit(self._answer(groups, key, settings, policy.tokenizer, num_ids, seconds))
        return Sampling(self, self._newest, seconds)

    def push(self, policy: Policy) -> bool:
        """Give the policy's weights to the engine if it has others; returns whether that was necessary.

        All ranks call it together; the main rank writes the weights while the others wait, or gather them with it.
        """
        from safetensors import SafetensorError  # raised on a full disk

        mark = fingerprint(policy)
        if not any(gather_all(mark != self._holds)):  # the same on all ranks; none of them is still sampling
            return False
        self._holds, error = None, None  # a failed push can leave some of the new weights, or none at all
        is_divided = any(hasattr(weight, "full_tensor") for weight in policy.parameters())
        try:
            if is_divided:
                export_divided(policy, self.folder, self.dtype)
            elif is_main():
                export(policy, self.folder, self.dtype)
            if is_main():
                if self.sleeps:
                    torch.cuda.empty_cache()  # the trainer keeps what it has freed, and the engine needs it now
                self.server.load(self.folder)
        except (OSError, SafetensorError) as fault:
            where = f"for {self.server.about} could not be written to {self.folder}"
            error = EngineError(f"the weights {where} ({fault})")
        except EngineError as fault:
            error = fault
        raise_together(error)
        self._holds = mark
        return True

    def sleep(self) -> None:
        """Let the engine free its weights, so that even unchanged ones are pushed again. All ranks call it together."""
        self._holds, error = None, None
        try:
            if is_main():
                self.server.sleep()
        except EngineError as fault:
            error = fault
        raise_together(error)

    def costs(self) -> dict[str, float]:
        """Seconds spent on weights and on generation, for the samples whose `result` was the last one."""
        return {f"time/{name}": seconds for name, seconds in self.seconds.items()}

    def close(self) -> None:
        """End the requests that are still waiting for an answer."""
        self.server.close()

    async def _answer(
        self,
        groups: list[list[Trajectory]],
        key: tuple[int, ...],
        settings: dict,
        tokenizer,
        num_ids: int,
        seconds: dict,
    ) -> list[Trajectory]:
        """Ask for all completions, and write them into their trajectories."""
        began, gate = time.perf_counter(), asyncio.Semaphore(MOST_REQUESTS)

        async def complete(group: list[Trajectory]) -> list[Completion]:
            async with gate:
                return await self.server.complete(group[0].ids, len(group), seed_of(key, group[0]), settings)

        answers = await asyncio.gather(*map(complete, groups))
        seconds["generation"] = time.perf_counter() - began
        for group, completions in zip(groups, answers, strict=True):
            if len(completions) != len(group):
                raise self.server.wrong(f"{len(completions)} completions instead of {len(group)}")
            for row, completion in zip(group, completions, strict=True):
                self._check(completion, settings, tokenizer, num_ids)
                row.finish_reason = "stop" if completion.has_stopped else "length"
                row.act(completion.ids, completion.log_probs)
        return [row for group in groups for row in group]

    def _check(self, completion: Completion, settings: dict, tokenizer, num_ids: int) -> None:
        """Raise EngineError if the completion cannot be a valid sample."""
        ids, log_probs, has_stopped = completion
        max_new_tokens, stops = settings["max_tokens"], settings.get("stop", ())
        ends = [position for position, i in enumerate(ids) if i in settings["stop_token_ids"]]
        are_ids = all(0 <= i < num_ids for i in ids)
        before, text = "", ""
        if stops and are_ids:
            before, text = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:-1], ids))
        if has_stopped:
            text = " " + text  # vLLM keeps the space before the first word, which some tokenizers drop
        is_ended = bool(ends) or any(stop in text for stop in stops)
        for is_right, what in (
            (are_ids, f"ids that are not tokens of the policy, which has {num_ids}"),
            (len(log_probs) == len(ids), f"{len(log_probs)} log-probs for {len(ids)} tokens"),
            (all(-math.inf < value <= ROUNDING for value in log_probs), "a log-prob that is not finite, or above 0"),
            (1 <= len(ids) <= max_new_tokens, f"{len(ids)} tokens, with a budget of {max_new_tokens}"),
            (ends in ([], [len(ids) - 1]), "tokens after an end of turn"),
            (not any(stop in before for stop in stops), "tokens after a stop text"),
            (
                has_stopped == is_ended and (is_ended or len(ids) == max_new_tokens),
                "a completion whose end does not agree with its reason to finish",
            ),
        ):
            if not is_right:
                raise self.server.wrong(what)


def connect(url: str, dtype: torch.dtype) -> VLLM | SGLang:
    """The client for the server at `url`. SGLang's has no /version."""
    try:
        return VLLM(url, dtype)
    except RefusedError as error:
        if error.status != 404:
            raise
        return SGLang(url, dtype)


def raise_together(error: EngineError | None) -> None:
    """Raise this rank's error, or else the first error of another rank. All ranks call it together."""
    for sentence in gather_all(None if error is None else str(error)):
        if sentence is not None:
            raise EngineError(sentence) from error


def fingerprint(policy: Policy) -> tuple:
    """Changes whenever a weight does: torch counts the writes to each tensor, and a new tensor has a new address.

    Writes that bypass autograd (`weight.data.copy_`) are not counted, and memory can be reused, so a few values of each
    weight are included, too.
    """
    weights = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in policy.parameters()]
    numbers = [weight.detach().flatten()[:: max(1, weight.numel() // 64)].double().sum() for weight in weights]
    marks = [(weight.data_ptr(), weight._version) for weight in weights]
    return (*marks, *torch.stack(numbers).tolist())


def seed_of(key: tuple[int, ...], row: Trajectory) -> int:
    """The seed of a row: its prompt's seed plus the completion's index. The seeds of two prompts are far apart."""
    return int(keyed_generator("engine", *key, row.prompt_index).integers(SEEDS)) + row.completion_index
