"""A run: the directory that it writes, its progress, and when it has to stop.

runs/<experiment>/<name>/config.json  metrics.jsonl  samples.jsonl  events.out...  checkpoints/step_N/  before.json
                         final/  final_merged/  base/  summary.json  curve.png  .lock
"""

import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from common.errors import UserError
from common.evaluate import Evaluation
from common.experience import Experience
from common.policy import Policy
from common.trajectory import Trajectory

from common.plumbing.checkpoints import read_checkpoint, write_checkpoint
from common.plumbing.config import DTYPES, PolicyConfig
from common.plumbing.diagnosis import Diagnosis
from common.plumbing.directory import RunDirectory
from common.plumbing.files import replace_file
from common.plumbing.held_out import read_before
from common.plumbing.history import BEFORE, METRICS, SAMPLES, flush_logs
from common.plumbing.machine import peak_memory_bytes
from common.plumbing.metrics import MetricsLog, finite, progress_line, read_lines
from common.plumbing.samples import describe_best, write_samples
from common.plumbing.saving import save_base, save_merged, save_policy
from common.plumbing.statistics import UpdateStatistics
from common.plumbing.summary import show_gain, summarise_gain, summarise_steps
from common.plumbing.task import Task
from common.plumbing.terminal import say_above_progress
from common.plumbing.weights import count_parameters

MAX_SKIPPED = 3  # consecutive steps with updates that were not finite, after which the run ends


class Run:
    """Where a run writes. `start_run` makes it."""

    def __init__(
        self, directory: RunDirectory, config: PolicyConfig, task: Task | None, machine: dict, wandb: dict | None
    ):
        self.directory = directory.path
        self._lock = directory.lock  # held until the run is closed
        self.config = config
        self.task = task
        self.resumed_at = directory.step  # the step of the checkpoint that it continues from; 0: none
        self.stop_reason: str | None = None  # why training must end after this step
        self._machine = machine  # as described when the run started: the checkout may have changed since
        self._diagnosis = Diagnosis(config)
        self._num_skipped = 0  # consecutive steps
        self._parameters: dict[str, int] = {}  # how many, for the summary
        self._stop_requested = False
        self.is_interrupted = False  # stopped at once, not at the end of a step
        self._bar = None
        self._last_step = 0
        self._step_began = 0.0
        for row in directory.history:
            self._diagnosis.check(row)  # what it has said already
        self._metrics = MetricsLog(self.directory, list(directory.history), wandb, self.tell)

    @property
    def resume_command(self) -> str:
        return f"python {shlex.quote(sys.argv[0])} --resume {shlex.quote(str(self.directory))}"

    def tell(self, sentence: str) -> None:
        """Print above the progress bar. If nobody reads it any more, end the run after this step, with a checkpoint."""
        if not say_above_progress(sentence):
            self._stop_requested = True

    def restore(self, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Give a resumed run's policy and optimizer the state of its checkpoint; does nothing in a new run."""
        if self.resumed_at:
            read_checkpoint(self.directory / "checkpoints" / f"step_{self.resumed_at}", policy, optimizer)

    def steps(self, num_steps: int) -> Iterator[int]:
        """Count the steps that are left, behind a progress bar, and end the run after one that has a reason to.

        Raises:
            KeyboardInterrupt: after a step during which the user has asked to stop.
            UserError: after a step for which `log` has found a `stop_reason`.
        """
        from tqdm import tqdm

        self._last_step = num_steps
        self._bar = tqdm(
            range(self.resumed_at + 1, num_steps + 1),
            initial=self.resumed_at,
            total=num_steps,
            bar_format="{desc} [{elapsed}<{remaining}]",
            dynamic_ncols=True,
            mininterval=0.1 if sys.stderr.isatty() else 10,  # a log file needs no line per step
        )
        for step in self._bar:
            self._step_began = time.perf_counter()
            yield step
            if self.stop_reason is not None:
                raise UserError(self.stop_reason)
            if self._stop_requested:
                raise KeyboardInterrupt
        self._bar = None

    def costs(self, num_tokens: int) -> dict[str, float]:
        """Seconds of this step up to now, tokens per second for so many tokens, and peak memory."""
        seconds = time.perf_counter() - self._step_began
        return {
            "time/step": seconds,
            "time/tokens_per_second": num_tokens / seconds,
            "memory/peak_bytes": peak_memory_bytes(self.config.device),
        }

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one step's metrics, show the progress, say what looks wrong, and see whether training must stop."""
        self._metrics.write(step, metrics)
        if self._bar is not None:
            self._bar.set_description_str(progress_line(step, self._last_step, metrics), refresh=False)
        for sentence in self._diagnosis.check(metrics):
            self.tell(f"step {step}: {sentence}")
        self._num_skipped = self._num_skipped + 1 if metrics.get("loss/skipped") else 0
        if self._num_skipped == MAX_SKIPPED:
            checkpoints = self.directory / "checkpoints"
            hint = f", from a checkpoint if you like: --model {checkpoints}/step_<N>"
            hint += " without --lora-rank" if self.config.lora_rank else ""
            self.stop_reason = (
                f"the gradients of steps {step - MAX_SKIPPED + 1} to {step} were not finite, and were skipped. Start "
                "again with a lower --lr" + (hint if checkpoints.exists() else "")
            )

    def log_samples(
        self,
        step: int,
        trajectories: list[Trajectory],
        experience: Experience,
        statistics: UpdateStatistics,
    ) -> None:
        """Keep what was sampled, and print one completion now and then."""
        every = self.config.samples_every
        if every == 0 or step % every:
            return
        if step % 10 == 0 or step == 1:
            self.tell(f"step {step}: {describe_best(self.task, trajectories)}")
        write_samples(self.directory / SAMPLES, step, self.task, trajectories, experience, statistics)

    def checkpoint(self, step: int, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Write checkpoints/step_N if one is due: every --checkpoint-every steps, at the last one, on Ctrl-C.

        None is due while updates are being skipped: what led to that is nothing to continue from.
        """
        every = self.config.checkpoint_every
        is_due = self._stop_requested or (every and (step % every == 0 or step == self._last_step))
        if is_due and not self._num_skipped:
            save_base(self.config, policy, self.directory / "base")
            checkpoints, keep = self.directory / "checkpoints", self.config.keep_checkpoints
            write_checkpoint(checkpoints, step, policy, optimizer, keep, flush_logs(self.directory))

    @property
    def has_before(self) -> bool:
        """Whether the evaluation before training has been logged; a resumed run can have lost it."""
        return read_before(self.directory / BEFORE) is not None

    def log_before(self, evaluation: Evaluation) -> None:
        """Log the evaluation before training as step 0, and keep it for a run that is resumed."""
        replace_file(self.directory / BEFORE, json.dumps(evaluation).encode())
        if not self.resumed_at:
            self.log(0, {f"eval/{name}": value for name, value in evaluation.metrics.items()})

    def save_final(self, policy: Policy) -> Path:
        """Write final/, which `from_pretrained` loads (with LoRA: the adapter), and what --save-merged asks for."""
        path = self.directory / "final"
        save_base(self.config, policy, self.directory / "base")
        save_policy(policy, path)
        if self.config.save_merged:
            save_merged(path, self.directory / "final_merged", policy.tokenizer, DTYPES[self.config.dtype])
        self._parameters = count_parameters(policy.model)
        return path

    def finish(self, after: Evaluation) -> None:
        """Log the evaluation after training, write the summary and the figure, and print what was gained."""
        self.log(self.config.steps, {f"eval/{name}": value for name, value in after.metrics.items()})
        before = read_before(self.directory / BEFORE)
        results = summarise_gain(self.task, before, after)
        self.write_summary(results)
        show_gain(self.directory, self.task, before, after, results["gain"])

    def write_summary(self, results: dict) -> None:
        """Write summary.json, with `results` first, and curve.png."""
        summary = results | summarise_steps(read_lines(self.directory / METRICS)) | self._parameters
        summary |= {"peak_memory_bytes": peak_memory_bytes(self.config.device)} | self._machine
        (self.directory / "summary.json").write_text(json.dumps(finite(summary), indent=2) + "\n", encoding="utf-8")
        if (self.directory / METRICS).exists():  # without a step there is no curve
            from viewer.curve import draw_curve

            draw_curve(self.directory)

    def close(self) -> None:
        self._metrics.close()
        self._lock.release()

    def request_stop(self, *_) -> None:
        """On Ctrl-C or SIGTERM: in a step, let it end and write a checkpoint; elsewhere, or a second time, stop now."""
        if self._bar is None or self._stop_requested:
            self.is_interrupted = True
            raise KeyboardInterrupt
        self._stop_requested = True
        self.tell("stopping: this step is finished first, and a checkpoint written (Ctrl-C again: at once)")
