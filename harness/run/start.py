"""Starting a program and its run: a new directory or a resumed one, and the message if the run ends early."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import distributed

from common.errors import UserError
from common.parallel import is_main, rank

from harness.base import ranks, signals
from harness.base.config import PolicyConfig
from harness.base.terminal import discard_output, prepare_output, say
from harness.data.order import num_steps
from harness.run.run import Run
from harness.task.task import Task

if TYPE_CHECKING:
    from accelerate import Accelerator  # alone, nothing of it is imported


def run_main(main: Callable[[], object]) -> None:
    """Call `main` as a program: an error that the user can correct becomes one sentence and exit status 2."""
    prepare_output()
    try:
        status = _call(main)
        if not status and distributed.is_initialized():
            distributed.destroy_process_group()
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        status = 141
    if ranks.num_launched() > 1:
        signals.leave(status or 0)
    if status:
        sys.exit(status)


def _call(main: Callable[[], object]) -> int:
    """Call `main`; returns the exit status of the program."""
    try:
        main()
        return 0
    except ranks.EndedElsewhereError:
        signals.wait_until_said()
    except KeyboardInterrupt as interrupt:
        signals.ignore_further_signals()
        if signals.may_say_why(otherwise=ranks.is_speaker()):
            say(f"\n{str(interrupt) or 'interrupted'}", sys.stderr, anyway=True)
        return 130
    except SystemExit as end:  # after --help, for example
        return end.code
    except Exception as error:
        if not isinstance(error, UserError) and not ranks.has_lost_others(error):
            raise
        signals.ignore_further_signals()
        if signals.may_say_why():
            sentence = str(error if isinstance(error, UserError) else signals.LOST).replace("\n", " ")
            # the main process may know nothing of another one's error, and be in the middle of a line
            start = f"\nerror: process {rank()}: " if rank() > 0 else "error: "
            say(start + sentence, sys.stderr, anyway=True)
            signals.tell_launcher(sentence)
    return 2


@contextmanager
def start_run(
    config: PolicyConfig,
    task: Task | None = None,
    searched: dict[str, dict] | None = None,
    accelerator: "Accelerator | None" = None,
) -> Iterator[Run]:
    """Connect the launched processes, and make or resume the run's directory; Ctrl-C ends a step with a checkpoint.

    `searched`: see `search_sources`; `accelerator`: of an experiment that has connected its processes itself.
    """
    # not at the top, as below and in `Run`: --help needs none of it
    from harness.processes.training import connect
    from harness.run.directory import open_directory
    from harness.run.ending import explain
    from harness.run.watched import watched

    accelerator = connect(config, accelerator)
    torch.set_num_threads(config.threads)
    if config.estimate:
        from harness.run.estimate import estimate

        estimate(config, task)
        raise SystemExit(0)
    steps = None
    if hasattr(config, "steps") and config.epochs is not None:
        steps = num_steps(config, len(task.train_rows))
        config = dataclasses.replace(config, steps=steps, epochs=None)  # a resumed run can raise --steps as usual
    run = Run(open_directory(config, task, searched or {}), config, task, steps, accelerator)
    with signals.signals_to(run.request_stop):
        try:
            if config.watch and is_main():
                run.contexts.enter_context(watched(run.directory))
            yield run
        except (Exception, KeyboardInterrupt) as error:
            told = explain(error, run, config)
            if told is error:
                raise
            raise told from error
        finally:
            run.contexts.close()
