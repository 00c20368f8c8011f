"""Starting a program and its run: a new directory or a resumed one, and the message if the run ends early."""

import dataclasses
import errno
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import distributed

from common.errors import EngineError, UserError
from common.parallel import is_main, rank, world_size

from harness.base import ranks, signals
from harness.base.checks import flag
from harness.base.config import PolicyConfig
from harness.base.machine import describe_machine, is_out_of_memory, out_of_memory
from harness.base.terminal import discard_output, prepare_output, say
from harness.data.order import num_steps
from harness.processes.training import connect
from harness.run.directory import RunDirectory, make_directory, open_resumed_run
from harness.run.run import Run
from harness.run.settings import (
    describe_sources,
    experiment_of,
    read_settings,
    script_of,
    write_settings,
)
from harness.run.watched import watched
from harness.task.task import Task
from harness.task.task_file import TaskError

if TYPE_CHECKING:
    from accelerate import Accelerator  # alone, nothing of it is imported

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # on the disk, in the user's quota, in a file of limited size


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
    accelerator = connect(config, accelerator)
    torch.set_num_threads(config.threads)
    if config.estimate:
        from harness.run.estimate import estimate  # not at the top: it imports much

        estimate(config, task)
        raise SystemExit(0)
    steps = None
    if hasattr(config, "steps") and config.epochs is not None:
        steps = num_steps(config, len(task.train_rows))
        config = dataclasses.replace(config, steps=steps, epochs=None)  # a resumed run can raise --steps as usual
    run = Run(_open_directory(config, task, searched or {}), config, task, steps, accelerator)
    with signals.signals_to(run.request_stop):
        try:
            if config.watch and is_main():
                run.contexts.enter_context(watched(run.directory))
            yield run
        except (Exception, KeyboardInterrupt) as error:
            told = _explain(error, run, config)
            if told is error:
                raise
            raise told from error
        finally:
            run.contexts.close()


def _explain(error: BaseException, run: Run, config: PolicyConfig) -> BaseException:
    """The message for an error that ends a run, with the command that resumes it; otherwise the error itself."""
    from safetensors import SafetensorError

    request = run.stopping.request
    resume = f"resume with: {request.resume_command}"
    # an interrupt can become an error of another kind, for example during an import
    if isinstance(error, KeyboardInterrupt) or request.is_interrupted:
        page = f"\nits page so far: python -m viewer {shlex.quote(str(run.directory))}" if run.newest else ""
        return KeyboardInterrupt(f"interrupted; {resume}{page}")
    is_kept = config.resume or (run.directory / "metrics.jsonl").exists()
    if is_main() and not is_kept:
        shutil.rmtree(run.directory)
    if ranks.has_lost_others(error):
        return UserError(signals.LOST + (f"; {resume}" if run.directory.exists() else ""))
    if is_out_of_memory(error):
        return out_of_memory(config, error, request.resume_command if is_kept else None)
    if isinstance(error, EngineError) and is_kept:
        run.keep_progress()
        return UserError(f"{error}; when the engine can be used again, {resume}")
    if isinstance(error, TaskError) and is_kept:
        # so that resuming accepts a corrected task
        write_settings(run.directory, read_settings(run.directory) | {"task_failed": True})
        return UserError(f"{error}. When it is corrected, {resume}")
    # the errors of safetensors have no errno; they come from save_final
    if isinstance(error, SafetensorError) or (isinstance(error, OSError) and error.errno in NO_SPACE):
        return UserError(f"{run.directory} could not be written ({error}); when there is space, {resume}")
    return error


def _open_directory(config: PolicyConfig, task: Task | None, searched: dict[str, dict]) -> RunDirectory:
    """The run's directory, which the main process makes, or takes back to its checkpoint."""
    machine = describe_machine() | {"processes": world_size(), "script": script_of(config)}
    with ranks.together():
        sources = describe_sources(config, task) | searched
    flags = {flag(name): value for name, value in vars(config).items() if name not in ("device", "threads")}
    ranks.check_alike(flags | {f"the content of {flag(name)}": source["content"] for name, source in sources.items()})
    opened = []

    def open_directory() -> RunDirectory:
        opening = open_resumed_run if config.resume else make_directory
        opened.append(opening(experiment_of(config), config, machine, sources))
        return opened[0]._replace(lock=None)  # a lock cannot be sent to other processes

    directory = ranks.on_main(open_directory)
    return opened[0] if opened else directory
