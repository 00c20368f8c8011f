"""Why a run ends before its last step: somebody asks for it, its metrics say so, or it cannot learn any more."""

import os
import shlex
import sys
import time
from pathlib import Path

from common.errors import UserError
from common.parallel import gather_all, is_main

from harness.base.checks import parse_target
from harness.base.config import PolicyConfig
from harness.base.ranks import EndedElsewhereError, launcher, num_launched, on_main
from harness.base.terminal import printable, say_above_progress
from harness.logs.diagnosis import OVER_OPTIMISED
from harness.task.task import Task

MAX_SKIPPED = 3  # consecutive steps with updates that are not finite before the run ends
SAME_CTRL_C = 2.0  # signals to several processes within so many seconds count as one
# torchrun kills a process so many seconds after asking it to end; its option --shutdown-timeout is not visible here
GRACE = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))


class StopRequest:
    """Whether somebody asked the run in a directory to stop, in this process or in any other."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._received_at = -SAME_CTRL_C
        self.is_made = False
        self.is_agreed = False  # by all processes
        self.is_interrupted = False  # stopped at once, not at the end of a step

    @property
    def resume_command(self) -> str:
        return f"{launcher()} {shlex.quote(sys.argv[0])} --resume {shlex.quote(str(self.directory))}"

    def tell(self, sentence: str) -> None:
        """Print above the progress bar. If nobody reads it any more, end the run after this step, with a checkpoint."""
        if not say_above_progress(sentence):  # not `|=`, which would undo a Ctrl-C that comes while it prints
            self.is_made = True

    def agree(self) -> bool:
        """Whether any process was asked to stop; all call it together."""
        self.is_agreed = any(gather_all(self.is_made))
        return self.is_agreed

    def receive(self, is_in_step: bool) -> None:
        """Handle a signal: in a step, finish it and write a checkpoint; elsewhere, or a second time, stop now."""
        now = time.monotonic()
        if num_launched() > 1 and now < self._received_at + SAME_CTRL_C:
            return  # the terminal signals every process, and then torchrun passes on its own signal
        self._received_at = now
        if not is_in_step or self.is_made:
            self.is_interrupted = True
            raise KeyboardInterrupt
        self.is_made = True
        sentence = "stopping: this step is finished first, and a checkpoint written (Ctrl-C again: at once)"
        if num_launched() > 1 and "TORCHELASTIC_RUN_ID" in os.environ:  # also accelerate launch, which uses torchrun
            sentence += f"; the launcher kills a step that takes longer than {GRACE:g} s: then resume with: "
            sentence += self.resume_command
        self.tell(sentence)


class Stopping:
    """Decides whether a run ends after a step: `newest` are the metrics that a resumed run has reached."""

    def __init__(
        self, request: StopRequest, config: PolicyConfig, task: Task | None, newest: dict[str, float], found: set[str]
    ):
        self.request = request
        self._config, self._task = config, task
        self._when: str | None = getattr(config, "stop_when", None)
        self._target = parse_target(self._when)
        self.is_over = self._reaches(newest) or self._is_over_optimised(found)
        self.num_skipped = 0  # consecutive steps
        self._error: UserError | None = None

    def check(self, step: int, metrics: dict[str, float], found: set[str]) -> None:
        """Look at a step's metrics, and at what the diagnosis found in them."""
        self._check_target(step, metrics)
        self.is_over = self.is_over or self._is_over_optimised(found)
        self.num_skipped = self.num_skipped + 1 if metrics.get("loss/skipped") else 0
        if self.num_skipped == MAX_SKIPPED:
            fault = None if self._task is None else self._task.scorer.fault  # a reward that is no number is the reason
            self._error = fault or self._describe_skipped(step)

    def ends_after_step(self) -> bool:
        """Whether training is over; an error or a KeyboardInterrupt ends the run as well."""
        if self.is_over:
            return True
        if self._error is not None:
            raise self._error if is_main() else EndedElsewhereError
        if self.request.is_agreed:
            raise KeyboardInterrupt
        return False

    def _is_over_optimised(self, found: set[str]) -> bool:
        return self._when == "over-optimised" and OVER_OPTIMISED in found

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
        name, when = self._target[0], f"--stop-when {printable(self._when, 60)}"
        expected = (0, self._config.eval_every) if name.startswith("eval/") else (1,)
        if step in expected and name not in metrics:
            self.request.tell(f"{when}: step {step} has no such metric; metrics.jsonl has all names")
            self._target = None
        if on_main(lambda: self._reaches(metrics)):  # costs differ among processes
            self.is_over = True
            self.request.tell(f"step {step}: {name} is {metrics[name]:.4g}: training ends ({when})")

    def _describe_skipped(self, step: int) -> UserError:
        why = (
            f"the gradients of steps {step - MAX_SKIPPED + 1} to {step} were not finite, and were skipped. Start again "
            "with a lower --lr"
        )
        if (checkpoints := self.request.directory / "checkpoints").exists():
            why += f", from a checkpoint if you like: --model {checkpoints}/step_<N>"
            why += " without --lora-rank" if self._config.lora_rank > 0 else ""
        return UserError(why)
