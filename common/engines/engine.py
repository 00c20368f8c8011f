"""Sampling by an inference engine: a server that holds a copy of the policy's weights, and answers in token ids.

Three things can go wrong without an error: the engine samples with old weights, its log-probs are those of another
distribution, or what it sampled is not what is trained on. So weights are pushed whenever they have changed, log-probs
are compared with the trainer's by whoever trains, and every answer is checked here.
"""

import time
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from common.engines.export import export
from common.engines.http import Client, EngineError
from common.keyed import keyed_generator
from common.parallel import gather, is_main
from common.policy import Policy
from common.sampling import begin_rows, in_groups
from common.trajectory import Trajectory

MOST_REQUESTS = 64  # at the same time, one for each prompt; the engine makes batches of them
SEEDS = 2**62  # that prompts are given; completion j of a prompt has its seed + j
ROUNDING = 1e-4  # nats that rounding can put a log-prob above 0
LOWEST = -1e9  # nats; what is lower, an integer of a thousand digits for example, is no log-prob


class Request(NamedTuple):
    """Completions that an engine is asked for."""

    prompt: list[int]
    count: int
    max_new_tokens: int
    temperature: float  # 0: greedy
    top_p: float
    seed: int
    end_of_turn_ids: list[int]


class Completion(NamedTuple):
    """One answer of an engine."""

    ids: list[int]
    log_probs: list[float]  # nats, one for each id, under what they were drawn from
    has_stopped: bool  # with an end-of-turn token; else the budget was used up


class Sampling:
    """Trajectories that an engine works on, in the background."""

    def __init__(self, engine: "Engine", future: "Future[list[Trajectory]]", seconds: dict[str, float]):
        self._engine, self._future, self._seconds = engine, future, seconds

    def result(self) -> list[Trajectory]:
        """The trajectories of this rank, when they are complete. All ranks call it together.

        Raises:
            EngineError: on every rank, if it is raised on any, so that none waits for one that has ended.
        """
        rows, error = [], None
        try:
            rows = self._future.result()
        except EngineError as raised:
            error = raised
        for sentence in gather(None if error is None else str(error)):
            if sentence is not None:
                raise EngineError(sentence) from error
        self._engine.seconds = self._seconds
        return rows


class Engine(ABC):
    """An inference engine. Its `sample` can be used in place of `common.sampling.sample`.

    Args:
        url: http://host:port.
        folder: where weights are written for the engine, which must see it under the same path.
        dtype: of the engine's weights.

    Raises:
        EngineError: there is no such server, or one that cannot serve here; the sentence says what to do.
    """

    max_length: int  # of a prompt and its completion
    length_flag: ClassVar[str]  # of the server, for that
    environment: ClassVar[dict[str, str]]  # of a server that a run starts

    def __init__(self, url: str, folder: Path, dtype: torch.dtype = torch.float32):
        self.client = Client(url)
        self.folder = folder
        self.dtype = dtype
        self._holds: object = None  # which weights the engine has, see `fingerprint`; None: not known
        self.seconds = {"weights": 0.0, "generation": 0.0}  # of the samples whose `result` was the last one
        self._requests = ThreadPoolExecutor(MOST_REQUESTS, thread_name_prefix="engine")
        self._background = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._newest: Future = Future()  # what the background works on
        self._newest.set_result([])
        self.connect()

    @staticmethod
    @abstractmethod
    def server_flags(folder: Path, port: int, length: int, dtype: torch.dtype, device: str) -> list[str]:
        """Arguments of the engine's Python that start a server of the weights in `folder`.

        Raises:
            EngineError: not on that device.
        """

    @abstractmethod
    def connect(self) -> None:
        """Get to know the server: its model, its longest sequence, and what it was started with."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Let the engine take the weights in `folder`, and forget what it has computed with the ones before."""

    @abstractmethod
    def complete(self, request: Request) -> list[Completion]:
        """Ask for the completions of one prompt."""

    def sample(self, policy: Policy, prompts: list[list[int]], group_size: int, **settings) -> list[Trajectory]:
        """Sample `group_size` completions of every prompt: see `common.sampling.sample`, with these differences.

        Random numbers are the engine's: one seed per prompt, from `key` and the prompt's index, plus the completion's
        index. `generation_batch_size` has no effect: the engine makes its own batches. Under
        `top_p` below 1, log-probs recorded by vLLM are those of the tokens that could be drawn.

        Raises:
            EngineError: a prompt and its budget are too long for the engine, it has failed, or its answer is wrong.
        """
        return self.begin(policy, prompts, group_size, **settings).result()

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
        """`sample` in the background: returns as soon as the engine has the weights, which may change from then on.

        A call waits for the one before. All ranks call it together.

        Args:
            push: False: sample with the weights that the engine has, unless none were pushed yet.
        """
        trajectories = begin_rows(prompts, group_size, prompt_index, rows)
        for prompt in prompts:
            if len(prompt) + max_new_tokens > self.max_length:
                raise EngineError(
                    f"{self.client.about} takes sequences of up to {self.max_length} tokens, not a prompt of "
                    f"{len(prompt)} and a completion of up to {max_new_tokens}: start it with a longer "
                    f"{self.length_flag}"
                )
        wait([self._newest])  # the engine must not be given weights while it samples
        seconds, began = {"weights": 0.0, "generation": 0.0}, time.perf_counter()
        if (push or self._holds is None) and self.push(policy):
            seconds["weights"] = time.perf_counter() - began
        groups = in_groups(trajectories, group_size, rows)
        requests = [
            Request(
                prompt=group[0].ids.copy(),
                count=len(group),
                max_new_tokens=max_new_tokens,
                temperature=0.0 if greedy else policy.temperature,
                top_p=1.0 if greedy else top_p,
                seed=seed_of(key, group[0]),
                end_of_turn_ids=policy.end_of_turn_ids,
            )
            for group in groups
        ]
        num_ids = policy.model.get_input_embeddings().weight.shape[0]
        self._newest = self._background.submit(self._answer, requests, groups, num_ids, seconds)
        return Sampling(self, self._newest, seconds)

    def push(self, policy: Policy) -> bool:
        """Give the engine the policy's weights, if it does not have them; whether that was needed.

        All ranks call it together; the main one writes the weights, and the others wait.
        """
        from safetensors import SafetensorError  # of a full disk

        mark = fingerprint(policy)
        if not any(gather(mark != self._holds)):  # the same on all ranks, of which none samples any more
            return False
        fault = None
        self._holds = None  # a push that fails can leave a part of the new weights, or none at all
        if is_main():
            try:
                export(policy, self.folder, self.dtype)
                self._load()
            except (OSError, SafetensorError) as error:
                fault = f"the weights for {self.client.about} could not be written to {self.folder} ({error})"
            except EngineError as error:
                fault = str(error)
        fault = gather(fault)[0]
        if fault is not None:
            raise EngineError(fault)
        self._holds = mark
        return True

    def _load(self) -> None:
        """Load the exported weights, with one more attempt: a load that is repeated repairs one that was cut off."""
        try:
            self.load(self.folder)
        except EngineError:
            time.sleep(1.0)
            self.load(self.folder)

    def costs(self) -> dict[str, float]:
        """Seconds for the weights and for the generation of the samples whose `result` was the last one."""
        return {f"time/{name}": seconds for name, seconds in self.seconds.items()}

    def close(self) -> None:
        """Let requests that still wait for an answer end."""
        self.client.give_up()
        self._requests.shutdown(wait=False, cancel_futures=True)
        self._background.shutdown(wait=False, cancel_futures=True)

    def _answer(
        self, requests: list[Request], groups: list[list[Trajectory]], num_ids: int, seconds: dict[str, float]
    ) -> list[Trajectory]:
        """Ask for all completions, and write them into their trajectories."""
        began = time.perf_counter()
        answers = list(self._requests.map(self.complete, requests))
        seconds["generation"] = time.perf_counter() - began
        for request, group, completions in zip(requests, groups, answers, strict=True):
            if len(completions) != len(group):
                raise self.wrong(f"{len(completions)} completions instead of {len(group)}")
            for row, completion in zip(group, completions, strict=True):
                self._check(completion, request, num_ids)
                row.finish_reason = "stop" if completion.has_stopped else "length"
                row.act(completion.ids, completion.log_probs)
        return [row for group in groups for row in group]

    def _check(self, completion: Completion, request: Request, num_ids: int) -> None:
        """
        Raises:
            EngineError: it cannot be what was sampled.
        """
        ids, log_probs, has_stopped = completion
        if not isinstance(ids, list) or not isinstance(log_probs, list):
            raise self.wrong("ids or log-probs that are not lists")
        ends = [position for position, token in enumerate(ids) if token in request.end_of_turn_ids]
        if not all(type(token) is int and 0 <= token < num_ids for token in ids):
            raise self.wrong(f"ids that are not tokens of the policy, which has {num_ids}")
        if len(log_probs) != len(ids):
            raise self.wrong(f"{len(log_probs)} log-probs for {len(ids)} tokens")
        if not all(isinstance(value, float | int) and LOWEST < value <= ROUNDING for value in log_probs):
            raise self.wrong("a log-prob that is not finite, or above 0")
        if not 1 <= len(ids) <= request.max_new_tokens:
            raise self.wrong(f"{len(ids)} tokens, with a budget of {request.max_new_tokens}")
        if ends not in ([], [len(ids) - 1]):
            raise self.wrong("tokens after an end of turn")
        if has_stopped != bool(ends) or (not ends and len(ids) < request.max_new_tokens):
            raise self.wrong("a completion whose end does not agree with its reason to finish")

    def wrong(self, what: str) -> EngineError:
        return EngineError(f"{self.client.about} has answered with {what}")


def fingerprint(policy: Policy) -> tuple:
    """Changes whenever a weight does: torch counts the writes into each tensor, and another one is elsewhere.

    Not counted are writes past autograd (`weight.data.copy_`), and memory can be used again: so a few numbers of each
    weight are in it, too.
    """
    weights = list(policy.parameters())
    numbers = [weight.detach().flatten()[:: max(1, weight.numel() // 64)].double().sum() for weight in weights]
    marks = [(weight.data_ptr(), weight._version) for weight in weights]
    return (*marks, *torch.stack(numbers).tolist())


def seed_of(key: tuple[int, ...], row: Trajectory) -> int:
    """The seed of a row: that of its prompt plus its completion's index. Those of two prompts are far apart."""
    return int(keyed_generator("engine", *key, row.prompt_index).integers(SEEDS)) + row.completion_index
