"""Stopping a run: on Ctrl-C, on SIGTERM, or when nobody reads what it prints any more."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.parallel import gather

from common.plumbing.ending import is_under_torchrun, may_say_why
from common.plumbing.ranks import num_launched
from common.plumbing.signals import call_after_signal, signals_to
from common.plumbing.terminal import say

SAME_CTRL_C = 2.0  # seconds in which signals to several processes count as one
# Seconds after which torchrun kills what it has asked to end; its option --shutdown-timeout cannot be seen from here
GRACE = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))


class StopRequest:
    """Whether a run has been asked to stop, in this process and in any.

    Args:
        tell: prints a sentence.
    """

    def __init__(self, tell: Callable[[str], None]):
        self._tell = tell
        self._received_at = -SAME_CTRL_C
        self.is_made = False
        self.is_agreed = False  # by all processes
        self.is_interrupted = False  # stopped at once, not at the end of a step

    def agree(self) -> bool:
        """Whether any process has been asked; all call it together."""
        self.is_agreed = any(gather(self.is_made))
        return self.is_agreed

    def receive(self, is_in_step: bool) -> None:
        """On a signal: in a step, let it end and write a checkpoint; elsewhere, or a second time, stop now."""
        now = time.monotonic()
        if num_launched() > 1 and now < self._received_at + SAME_CTRL_C:
            return  # the terminal signals every process, and then torchrun passes its own signal on
        self._received_at = now
        if not is_in_step or self.is_made:
            self.is_interrupted = True
            raise KeyboardInterrupt
        self.is_made = True
        limit = f" if that takes less than {GRACE:g} s and no process is lost" if is_under_torchrun() else ""
        self._tell(f"stopping: this step is finished first, and a checkpoint written{limit} (Ctrl-C again: at once)")


@contextmanager
def stoppable(handler: Callable[..., None], resume_command: str) -> Iterator[None]:
    """Let `handler` receive Ctrl-C and SIGTERM, and say how to resume before a launcher kills a process that is slow.

    It is slow in a long step, or when it waits for a process that has gone.
    """

    warning = (
        f"\nerror: the step has not ended {GRACE - 5:g} s after the signal, and the launcher will kill it after "
        f"{GRACE:g} s, unless it was told to wait longer; resume with: {resume_command}"
    )

    def warn() -> None:
        if may_say_why():
            say(warning, sys.stderr, anyway=True)

    with signals_to(handler):
        if not is_under_torchrun():
            yield
            return
        with call_after_signal(GRACE - 5, warn):
            yield


def no_finite_gradient(step: int, num_skipped: int, directory: Path, has_lora: bool) -> str:
    """Why a run ends whose last updates were all skipped, and how to go on."""
    checkpoints = directory / "checkpoints"
    hint = f", from a checkpoint if you like: --model {checkpoints}/step_<N>" if checkpoints.exists() else ""
    hint += " without --lora-rank" if hint and has_lora else ""
    return (
        f"the gradients of steps {step - num_skipped + 1} to {step} were not finite, and were skipped. Start again "
        f"with a lower --lr{hint}"
    )
