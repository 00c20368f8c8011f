"""A run: its directory, its progress, and when it has to stop.

runs/<experiment>/<name>/config.json  metrics.jsonl  samples.jsonl  tokens.jsonl  diagnosis.jsonl  events.out...
                         checkpoints/step_N/  before.json  final/  final_merged/  best/  base/  summary.json  curve.png
                         report.html  trace.json.gz  .lock
"""

import json
import math
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from common.errors import UserError
from common.evaluate import Evaluation
from common.experience import Experience
from common.parallel import gather_all, is_main, world_size
from common.policy import Policy
from common.trajectory import Trajectory

from harness.base.checks import parse_target
from harness.base.config import DTYPES, PolicyConfig
from harness.base.files import replace_file
from harness.base.ranks import EndedElsewhereError, launcher, on_main
from harness.base.terminal import printable, progress_bar, say, say_above_progress
from harness.data.held_out import read_before
from harness.data.task import Task
from harness.logs.diagnosis import OVER_OPTIMISED, Diagnosis
from harness.logs.metrics import MetricsLog, StepClock, StepTrace, finite, progress_line, read_lines, shows_samples
from harness.logs.samples import TokenTexts, describe_best, write_samples
from harness.logs.statistics import UpdateStatistics
from harness.logs.summary import show_gain, summarise_gain, summarise_steps
from harness.models.loading import exclude_frozen, in_8_bits
from harness.models.pretrained import count_parameters
from harness.models.saving import save_base, save_merged, save_policy
from harness.run.checkpoints import BEFORE, DIAGNOSIS, METRICS, SAMPLES, TOKENS, read_checkpoint, write_checkpoint
from harness.run.directory import RunDirectory
from harness.run.settings import experiment_of
from harness.run.signals import StopRequest

MAX_SKIPPED = 3  # consecutive steps with updates that are not finite before the run ends


class Run:
    """The outputs of a run. `start_run` makes it."""

    def __init__(self, directory: RunDirectory, config: PolicyConfig, task: Task | None, machine: dict):
        self.config, self.task, self.directory = config, task, directory.path
        self._checkpoints = self.directory / "checkpoints"
        self._lock = directory.lock  # held until the run is closed
        self.step = self.resumed_at = directory.step  # of the checkpoint that it continues from; 0: none
        self.steps_of_epochs: int | None = None  # with --epochs
        self._num_steps_before = directory.num_steps
        self.stop_reason: UserError | None = None  # why training must end after this step
        self._machine = machine  # as described at the start: the checkout may have changed since
        self._diagnosis = Diagnosis(config, [] if task is None else task.paid)
        self._target = parse_target(getattr(config, "stop_when", None))
        self._is_reached = bool(directory.history) and self._reaches(directory.history[-1])
        self._num_skipped = 0  # consecutive steps
        self._parameters: dict[str, int] = {}  # counts, for the summary
        self._texts: TokenTexts | None = None  # None: unknown before `restore`
        self.stop = StopRequest(self.tell, self.resume_command)
        self._bar = None
        self._last_step = 0
        self._clock = StepClock(config.device)
        self._trace = StepTrace(self.directory / "trace.json.gz", self.tell)
        self.contexts = ExitStack()  # closed with the run
        # Writes and reads checkpoints in which each process has its shard; None: all processes have all weights
        self.accelerator = None
        # The results of the newest complete step, as long as nothing has changed them: `checkpoint`'s first arguments
        self._complete: tuple | None = None
        self._trains_one_policy = world_size() == 1  # or has seen that all processes have the same gradients
        self._logged: dict[str, float] = {}  # by the newest step
        self.best = _best_of(directory.history, getattr(config, "keep_best", None))
        self.newest: dict[str, float] = dict(directory.history[-1]) if directory.history else {}  # the last metrics
        for row in directory.history:
            self._diagnosis.check(row)  # already printed
        if is_main():
            wandb = {"project": config.wandb_project or experiment_of(config), "group": config.wandb_group}
            wandb |= {"name": self.directory.name, "config": vars(config)}
            history = list(directory.history)
            self._metrics = MetricsLog(self.directory, history, wandb if config.wandb else None, self.tell)

    @property
    def resume_command(self) -> str:
        return f"{launcher()} {shlex.quote(sys.argv[0])} --resume {shlex.quote(str(self.directory))}"

    def tell(self, sentence: str) -> None:
        """Print above the progress bar. If nobody reads it any more, end the run after this step, with a checkpoint."""
        if not say_above_progress(sentence):  # not `|=`, which would undo a Ctrl-C that comes while it prints
            self.stop.is_made = True

    def prepare(
        self, policy: Policy, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """The policy, wrapped so that `backward` averages its gradients over the processes, and its optimizer.

        Alone, both stay as they are, except for --optimizer adamw_8bit.
        """
        if self.accelerator is not None:
            from harness.processes.accelerator import prepare  # not at the top: it takes two seconds

            return prepare(self.accelerator, policy, optimizer)
        if getattr(self.config, "optimizer", None) == "adamw_8bit":
            optimizer = in_8_bits(optimizer)
        if world_size() == 1:
            return policy, optimizer
        exclude_frozen(policy)  # also a critic's
        return DistributedDataParallel(policy), optimizer

    def restore(self, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Read a resumed run's checkpoint into policy and optimizer."""
        self._optimizer, self._rates = optimizer, [group["lr"] for group in optimizer.param_groups]
        if self.resumed_at:
            path = self._checkpoints / f"step_{self.resumed_at}"
            read_checkpoint(path, policy, optimizer, self.accelerator)
        self._texts = TokenTexts(self.directory / TOKENS, policy.tokenizer, policy.end_of_turn_ids)

    def steps(self, num_steps: int) -> Iterator[int]:
        """Yield the remaining steps, with a progress bar; Ctrl-C or a `stop_reason` ends it after a step."""
        self._last_step = num_steps = self.steps_of_epochs or num_steps
        if self._ends_early:  # a run that was over, and is resumed
            return
        self._tell_new_schedule(num_steps)
        self._bar = progress_bar(self.resumed_at, num_steps, is_shown=is_main())
        # the first step is slower than all others
        profiled = range(self.resumed_at + 2, self.resumed_at + 2 + self.config.profile) if is_main() else ()
        for step in self._bar:
            self.step = step
            self._clock.start()
            self._set_learning_rate(step)
            self._tell_functions(step - 1)
            if step in profiled:
                self._trace.begin_step(step)
            yield step
            self._tell_functions(step)
            if step in profiled:
                self._trace.end_step()
                if step in (profiled[-1], num_steps):
                    self._trace.write()
            if self._ends_early:
                break
            if self.stop_reason is not None:
                raise self.stop_reason if is_main() else EndedElsewhereError
            if self.stop.is_agreed:
                raise KeyboardInterrupt
        self._bar = None

    def _tell_functions(self, num_done: int) -> None:
        """Keep the `trainer_state` of reward functions."""
        if self.task is not None and (functions := self.task.functions) is not None:
            functions.state.global_step, functions.state.max_steps = num_done, self._last_step

    def _set_learning_rate(self, step: int) -> None:
        """Follow --lr-schedule, which depends on the step alone: a resumed run has nothing to restore."""
        if self._has_schedule:
            factor = self._rate_factor(step, self._last_step)
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = factor * rate

    def _rate_factor(self, step: int, num_steps: int) -> float:
        return learning_rate_factor(self.config.lr_schedule, self.config.lr_warmup_steps, step, num_steps)

    def _tell_new_schedule(self, num_steps: int) -> None:
        """Say how another --steps moves the learning rate of a resumed run, whose schedule ends at the last step."""
        before, step = self._num_steps_before, self.resumed_at + 1
        if before and self._has_schedule and step <= num_steps != before:
            rates = ((step, num_steps), (min(step, before), before))
            new, old = (self._rates[0] * self._rate_factor(*each) for each in rates)
            instead_of = "instead of" if step <= before else f"and that of step {before} was"
            if old != new:
                self.tell(
                    f"--lr-schedule {self.config.lr_schedule} falls until the last step, now {num_steps} instead of "
                    f"{before}: the learning rate of step {step} is {new:.3g} {instead_of} {old:.3g}"
                )

    @property
    def _has_schedule(self) -> bool:
        kind, warmup = (getattr(self.config, name, 0) for name in ("lr_schedule", "lr_warmup_steps"))
        return bool(warmup) or kind in ("linear", "cosine")

    @property
    def _ends_early(self) -> bool:
        is_over = getattr(self.config, "stop_when", None) == "over-optimised"
        return self._is_reached or (is_over and OVER_OPTIMISED in self._diagnosis.findings)

    def _reaches(self, metrics: dict[str, float]) -> bool:
        """Whether a step's metrics reach the target of `--stop-when`."""
        if self._target is None:
            return False
        name, compare, number = self._target
        return name in metrics and compare(metrics[name], number)

    def _check_target(self, step: int, metrics: dict[str, float]) -> None:
        """End training at the target of `--stop-when`, or say that a step that ought to have its metric has none."""
        if self._target is None or (step and "time/step" not in metrics):  # the evaluation after training
            return
        name, when = self._target[0], f"--stop-when {printable(self.config.stop_when, 60)}"
        if step in ((0, self.config.eval_every) if name.startswith("eval/") else (1,)) and name not in metrics:
            self.tell(f"{when}: step {step} has no such metric; metrics.jsonl has all names")
            self._target = None
        if on_main(lambda: self._reaches(metrics)):  # costs differ among processes
            self._is_reached = True
            self.tell(f"step {step}: {name} is {metrics[name]:.4g}: training ends ({when})")

    def waiting(self) -> AbstractContextManager[None]:
        """Count the time within the block as spent waiting for other processes, see `costs`."""
        return self._clock.waiting()

    def lap(self, phase: str) -> None:
        """Mark the end of a phase of the step: its seconds are logged as `time/<phase>`, see `costs`."""
        self._clock.lap(phase)
        self._trace.lap(phase)
        if phase == "log_probs":  # the update follows
            self._complete = None

    def costs(self, num_tokens: int) -> dict[str, float]:
        """Seconds of this step so far, tokens per second, with `num_tokens` of this process, and peak memory."""
        return self._clock.costs(num_tokens)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one step's metrics, show the progress, report what looks wrong, and check if training must stop."""
        if self._has_schedule and "time/step" in metrics:
            metrics = metrics | {"lr": self._optimizer.param_groups[0]["lr"]}
        on_main(lambda: self._metrics.write(step, metrics))
        self.newest |= metrics
        self._logged = metrics
        if self._bar is not None:
            more = getattr(self.config, "progress", ())
            for key in set(more) - metrics.keys() if step == self.resumed_at + 1 else ():
                self.tell(f"--progress {printable(key, 60)}: the step has no such metric; metrics.jsonl has all names")
            self._bar.set_description_str(progress_line(step, self._last_step, metrics, more), refresh=False)
        for sentence in self._diagnosis.check({"step": step} | metrics):
            self.tell(f"step {step}: {sentence}")
        on_main(lambda: self._diagnosis.write(self.directory / DIAGNOSIS, step))
        self._check_target(step, metrics)
        self._num_skipped = self._num_skipped + 1 if metrics.get("loss/skipped") else 0
        if self._num_skipped == MAX_SKIPPED:
            why = (
                f"the gradients of steps {step - MAX_SKIPPED + 1} to {step} were not finite, and were skipped. Start "
                "again with a lower --lr"
            )
            if self._checkpoints.exists():
                why += f", from a checkpoint if you like: --model {self._checkpoints}/step_<N>"
                why += " without --lora-rank" if self.config.lora_rank > 0 else ""
            fault = None if self.task is None else self.task.fault  # a reward that is no number is the reason
            self.stop_reason = fault or UserError(why)

    def log_samples(
        self, step: int, trajectories: list[Trajectory], experience: Experience, statistics: UpdateStatistics
    ) -> None:
        """Save the samples, and print one completion now and then."""
        if not self.config.samples_every or step % self.config.samples_every:
            return
        group_size = getattr(self.config, "group_size", 2)  # without one, pairs
        if shows_samples(step) and trajectories[0].question is None:
            self.tell(f"step {step}: {describe_best(self.task, trajectories[:group_size])}")
        path = self.directory / SAMPLES
        lines = write_samples(path, self._texts, step, self.task, group_size, trajectories, experience, statistics)
        if shows_samples(step):
            on_main(lambda: self._metrics.show_samples(step, lines))

    def checkpoint(self, step: int, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Write checkpoints/step_N when it is due: every --checkpoint-every steps, at the last one, on Ctrl-C."""
        self._check_gradients(step, policy)
        self._keep_best(step, policy)
        self._complete = (step, policy, optimizer)
        every = self.config.checkpoint_every
        if self.stop.agree() or (every and (step % every == 0 or step == self._last_step or self._ends_early)):
            self.keep_progress()

    def _check_gradients(self, step: int, policy: Policy) -> None:
        """Refuse a train.py whose processes train apart from each other; the first gradients that are not 0 show it."""
        if self._trains_one_policy or self.accelerator is not None:  # sharded: no process has a whole gradient
            return
        gradients = [weight.grad for weight in policy.parameters()]
        if any(hasattr(gradient, "device_mesh") for gradient in gradients):
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
        self._trains_one_policy = bool(sums.any())

    def _keep_best(self, step: int, policy: Policy) -> None:
        """Write best/ if no earlier step has as high a value of the metric of `--keep-best`."""
        name = getattr(self.config, "keep_best", None)
        if name is None or (every := self.config.eval_every) == 0 or step % every:
            return
        if (value := self._logged.get(name)) is None:
            if step == every:
                self.tell(
                    f"--keep-best {printable(name, 60)}: step {step} has no such metric; metrics.jsonl has all names"
                )
            return
        if self.best is not None and value <= self.best["value"]:
            return
        self.best = {"step": step, "metric": name, "value": value}
        best, partial = self.directory / "best", self.directory / "best.partial"
        on_main(lambda: shutil.rmtree(partial, ignore_errors=True))
        on_main(lambda: save_base(self.config, policy, self.directory / "base"))
        save_policy(policy, partial)
        on_main(lambda: (shutil.rmtree(best, ignore_errors=True), partial.rename(best)))
        self.tell(f"step {step}: {name} {value:.4g} is the highest so far: kept in {best}")

    def keep_progress(self) -> None:
        """Write a checkpoint of the newest complete step, if there is none and no update has begun since."""
        if self._complete is None or self._num_skipped:
            return
        step, policy, optimizer = self._complete
        on_main(lambda: save_base(self.config, policy, self.directory / "base"))
        write_checkpoint(self.directory, step, policy, optimizer, self.config.keep_checkpoints, self.accelerator)
        self._complete = None

    @property
    def has_before(self) -> bool:
        """Whether the evaluation before training has been logged."""
        return on_main(lambda: read_before(self.directory / BEFORE) is not None)

    def log_before(self, evaluation: Evaluation) -> None:
        """Log the evaluation before training as step 0, and save it for when the run is resumed."""
        on_main(lambda: replace_file(self.directory / BEFORE, json.dumps(evaluation).encode()))
        if not self.resumed_at:
            self.log(0, {f"eval/{name}": value for name, value in evaluation.metrics.items()})

    def save_final(self, policy: Policy) -> Path:
        """Write final/, which `from_pretrained` loads (with LoRA: the adapter), and what --save-merged asks for."""
        self._parameters = count_parameters(policy.model)
        path, dtype = self.directory / "final", DTYPES[self.config.dtype]
        on_main(lambda: save_base(self.config, policy, self.directory / "base"))
        save_policy(policy, path)
        if self.config.save_merged:
            on_main(lambda: save_merged(path, self.directory / "final_merged", policy.tokenizer, dtype))
        return path

    def finish(self, after: Evaluation) -> None:
        """Log the evaluation after training, write the summary and the figure, and print the gain."""
        self.log(self.step, {f"eval/{name}": value for name, value in after.metrics.items()})

        def finish() -> None:
            before = read_before(self.directory / BEFORE)
            results = summarise_gain(self.task, before, after)
            self._write_summary(results)
            show_gain(self.directory, self.task, before, after, results["gain"])

        on_main(finish)

    def write_summary(self, results: dict) -> None:
        """Write summary.json, with `results` first, curve.png and report.html."""
        on_main(lambda: self._write_summary(results))

    def _write_summary(self, results: dict) -> None:
        rows = read_lines(self.directory / METRICS)
        if self.best is not None:
            value, where = f"{self.best['metric']} {self.best['value']:.4g}", self.directory / "best"
            say(f"best: step {self.best['step']}, with {value}: {where}")
            results = results | {"best": self.best}
        summary = results | summarise_steps(rows, self.config.device) | self._parameters | self._machine
        (self.directory / "summary.json").write_text(json.dumps(finite(summary), indent=2) + "\n", encoding="utf-8")
        if rows:  # without a step there is nothing to draw
            from viewer import draw_run  # not before a run ends

            draw_run(self.directory)

    def close(self) -> None:
        self.contexts.close()
        self._trace.write()
        if is_main():
            self._metrics.close()
            self._lock.release()

    def request_stop(self, *_) -> None:
        """On Ctrl-C or SIGTERM, see `StopRequest.receive`."""
        self.stop.receive(is_in_step=self._bar is not None)


def learning_rate_factor(kind: str, warmup: int, step: int, num_steps: int) -> float:
    """The learning rate of a step, as a share of --lr: up in `warmup` steps, then as `kind` says.

    >>> [learning_rate_factor("linear", 2, step, 6) for step in range(1, 7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> [round(learning_rate_factor("cosine", 0, step, 4), 2) for step in range(1, 5)]
    [1.0, 0.85, 0.5, 0.15]
    """
    if step <= warmup:
        return step / warmup
    progress = (step - 1 - warmup) / (num_steps - warmup)
    return {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[kind]


def _best_of(history: tuple[dict, ...], metric: str | None) -> dict | None:
    """The first of the steps with the highest value of a metric, which best/ holds; None if no step has it."""
    steps = [row for row in history if metric in row and "time/step" in row]  # not the evaluations before and after
    best = max(steps, key=lambda row: row[metric], default=None)
    return None if best is None else {"step": best["step"], "metric": metric, "value": best[metric]}
