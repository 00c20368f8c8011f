"""A run: its directory, its progress, and when it has to stop.

runs/<experiment>/<name>/config.json  metrics.jsonl  samples.jsonl  tokens.jsonl  diagnosis.jsonl  events.out...
                         checkpoints/step_N/  before.json  final/  final_merged/  best/  base/  summary.json  curve.png
                         report.html  trace.json.gz  .lock
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common.evaluate import Evaluation
from common.experience import Experience
from common.parallel import is_main
from common.policy import Policy
from common.trajectory import Trajectory

from harness.base.config import PolicyConfig
from harness.base.ranks import on_main
from harness.logs.statistics import UpdateStatistics
from harness.task.task import Task

if TYPE_CHECKING:
    from harness.run.directory import RunDirectory


class Run:
    """What a train.py needs besides the policy, its task and its algorithm. `start_run` makes it.

    `num_steps`: with --epochs; `accelerator`: of a sharded launch.
    """

    # a train.py cannot set any other
    __slots__ = ("_checkpoints", "_clock", "_log", "_num_steps", "_processes", "_rate", "_trainer_state")
    __slots__ += ("contexts", "directory", "resumed_at", "step", "stopping")

    def __init__(
        self, directory: "RunDirectory", config: PolicyConfig, task: Task | None, num_steps: int | None, accelerator
    ):
        # not at the top: --help needs none of it
        from harness.logs.clock import StepClock, StepTrace
        from harness.processes.training import DataParallel
        from harness.run.checkpoints import Checkpoints
        from harness.run.log import RunLog
        from harness.run.schedule import LearningRate
        from harness.run.stopping import Stopping, StopRequest

        self.directory, self.step, self.resumed_at = directory.path, directory.step, directory.step
        self._num_steps = num_steps
        functions = None if task is None else task.scorer.functions
        self._trainer_state = None if functions is None else functions.state  # which reward functions see
        request = StopRequest(self.directory)
        self._log = RunLog(directory, config, task, request.tell)
        self.stopping = Stopping(request, config, task, self._log.newest, self._log.findings)
        schedule = (getattr(config, "lr_schedule", "constant"), getattr(config, "lr_warmup_steps", 0))
        self._rate = LearningRate(*schedule, directory.num_steps)
        self._processes = DataParallel(getattr(config, "optimizer", "adamw"), accelerator)
        self._checkpoints = Checkpoints(self.directory, config, directory.history, request.tell, accelerator)
        first = directory.step + 2  # the step before is slower than all others
        profiled = range(first, first + config.profile if is_main() else first)
        trace = StepTrace(self.directory / "trace.json.gz", profiled, request.tell)
        self._clock = StepClock(config.device, trace)
        self.contexts = ExitStack()  # closed with the run, the newest first
        if directory.lock is not None:
            self.contexts.callback(directory.lock.release)
        self.contexts.callback(self._log.close)
        self.contexts.callback(trace.write)

    @property
    def newest(self) -> dict[str, float]:
        """The last value of each metric."""
        return self._log.newest

    def prepare(
        self, policy: Policy, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """The policy, wrapped so that `backward` averages its gradients over the processes, and its optimizer."""
        return self._processes.prepare(policy, optimizer)

    def restore(self, policy: Policy, optimizer: torch.optim.Optimizer, accelerator=None, kept=None) -> None:
        """Read a resumed run's checkpoint into policy and optimizer; an `accelerator` reads and writes shards.

        `kept`: whatever else later steps depend on; its `state_dict` is in every checkpoint, and read back.
        """
        self._rate.guide(optimizer)
        self._checkpoints.restore(self.resumed_at, policy, optimizer, accelerator, kept)
        self._log.know(policy)

    def steps(self, num_steps: int) -> Iterator[int]:
        """Yield the remaining steps, with a progress bar; Ctrl-C, an error or --stop-when ends it after a step."""
        self._num_steps = num_steps = self._num_steps or num_steps
        if self.stopping.is_over:  # of a run that is resumed
            return
        if change := self._rate.describe_change(self.resumed_at + 1, num_steps):
            self.stopping.request.tell(change)
        for step in self._log.count_steps(self.resumed_at, num_steps):
            self.step = step
            self._clock.start(step)
            self._rate.set(step, num_steps)
            self._tell_functions(step - 1)
            yield step
            self._tell_functions(step)
            self._clock.end(step, is_last=step == num_steps)
            if self.stopping.ends_after_step():
                break

    def _tell_functions(self, num_done: int) -> None:
        if self._trainer_state is not None:
            self._trainer_state.global_step, self._trainer_state.max_steps = num_done, self._num_steps

    def waiting(self) -> AbstractContextManager[None]:
        """Count the time within the block as spent waiting for other processes, see `costs`."""
        return self._clock.waiting()

    def lap(self, phase: str) -> None:
        """Mark the end of a phase of the step: its seconds are logged as `time/<phase>`, see `costs`."""
        self._clock.lap(phase)
        if phase == "log_probs":  # the update follows
            self._checkpoints.begin_update()

    def costs(self, num_tokens: int) -> dict[str, float]:
        """Seconds of this step so far, tokens per second, with `num_tokens` of this process, and peak memory."""
        return self._clock.costs(num_tokens)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one step's metrics, show the progress, report what looks wrong, and check if training must stop."""
        if "time/step" in metrics:
            metrics = metrics | self._rate.metrics()
        self._log.write(step, metrics)
        self.stopping.check(step, metrics, self._log.findings)

    def log_samples(
        self, step: int, trajectories: list[Trajectory], experience: Experience, statistics: UpdateStatistics
    ) -> None:
        """Save the samples, and print one completion now and then."""
        self._log.write_samples(step, trajectories, experience, statistics)

    def checkpoint(self, step: int, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Write checkpoints/step_N when it is due: every --checkpoint-every steps, at the last one, on Ctrl-C."""
        self._processes.check_gradients(step, policy)
        self._checkpoints.add(step, policy, optimizer, self._log.of_step)
        is_last = step == self._num_steps or self.stopping.is_over
        if self.stopping.request.agree() or self._checkpoints.is_due(step, is_last):
            self.keep_progress()

    def keep_progress(self) -> None:
        """Write a checkpoint of the newest complete step, if there is none and no update has begun since."""
        if not self.stopping.num_skipped:
            self._checkpoints.write()

    @property
    def has_before(self) -> bool:
        """Whether the evaluation before training has been logged."""
        return self._log.has_before

    def log_before(self, evaluation: Evaluation) -> None:
        """Log the evaluation before training as step 0, and save it for when the run is resumed."""
        self._log.keep_before(evaluation)
        if not self.resumed_at:
            self.log(0, {f"eval/{name}": value for name, value in evaluation.metrics.items()})

    def save_final(self, policy: Policy) -> Path:
        """Write final/, which `from_pretrained` loads (with LoRA: the adapter), and what --save-merged asks for."""
        return self._checkpoints.save_final(policy)

    def finish(self, after: Evaluation) -> None:
        """Log the evaluation after training, write the summary and the figure, and print the gain."""
        self.log(self.step, {f"eval/{name}": value for name, value in after.metrics.items()})
        on_main(lambda: self._log.compare(after, self._checkpoints.best))

    def write_summary(self, results: dict) -> None:
        """Write summary.json, with `results` first, curve.png and report.html."""
        on_main(lambda: self._log.write_summary(results, self._checkpoints.best))

    def request_stop(self, *_) -> None:
        """On Ctrl-C or SIGTERM, see `StopRequest.receive`."""
        self.stopping.request.receive(is_in_step=self._log.is_counting)
