"""Starting a program and its run: a new directory or a resumed one, and what the user is told when it ends early."""

import dataclasses
import errno
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from common.errors import UserError

from common.plumbing.config import PolicyConfig
from common.plumbing.directory import make_directory
from common.plumbing.machine import describe_machine
from common.plumbing.resume import open_resumed_run
from common.plumbing.run import Run
from common.plumbing.settings import change_settings, describe_settings, wandb_settings, write_settings
from common.plumbing.signals import signals_to
from common.plumbing.sources import describe_sources
from common.plumbing.task import Task, TaskError
from common.plumbing.terminal import discard_output, prepare_output, say

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # on the disk, in the user's quota, in a file of limited size


def run_main(main: Callable[[], object]) -> None:
    """Call `main` as a program: what the user can correct is told in one sentence, with exit status 2.

    If nobody reads its output any more, as after `| head`, the status is 141, that of a program which SIGPIPE ends.
    """
    prepare_output()
    try:
        status = _call(main)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        status = 141
    if status:
        sys.exit(status)


def _call(main: Callable[[], object]) -> object:
    """The exit status of a program."""
    try:
        main()
    except UserError as error:
        say(f"error: {error}".replace("\n", " "), sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        say(f"\n{interrupt or 'interrupted'}", sys.stderr)
        return 130
    except SystemExit as end:  # after --help, for example
        return end.code
    return 0


@contextmanager
def start_run(experiment: str, config: PolicyConfig, task: Task | None = None) -> Iterator[Run]:
    """Make the run's directory and write its settings, before anything slow happens; or resume a run.

    Within the block the directory is locked, and Ctrl-C and SIGTERM end the step that is running and write a
    checkpoint. A run that ends with an error before anything was logged leaves no directory.

    Raises:
        UserError: a run of that name exists or is in use, the directory cannot be made, or the disk is full.
    """
    from safetensors import SafetensorError

    torch.set_num_threads(config.threads)
    machine = describe_machine()
    run = (_resume_run if config.resume else _make_run)(experiment, config, task, machine)
    with signals_to(run.request_stop):
        try:
            try:
                yield run
            except Exception:
                if run.is_interrupted:  # during an import, for example, which can turn it into an error of its own
                    raise KeyboardInterrupt from None
                if not config.resume and not (run.directory / "metrics.jsonl").exists():
                    shutil.rmtree(run.directory)
                raise
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted; resume with: {run.resume_command}") from None
        except TaskError as error:
            if not run.directory.exists():
                raise
            change_settings(run.directory, task_failed=True)  # so that a corrected one is accepted
            raise UserError(f"{error}. When it is corrected, resume with: {run.resume_command}") from error
        except (OSError, SafetensorError) as error:  # what safetensors raises has no errno; it comes from save_final
            if isinstance(error, OSError) and error.errno not in NO_SPACE:
                raise
            raise UserError(
                f"{run.directory} could not be written ({error}); when there is space, resume with: "
                f"{run.resume_command}"
            ) from error
        finally:
            run.close()


def _make_run(experiment: str, config: PolicyConfig, task: Task | None, machine: dict) -> Run:
    settings = describe_settings(experiment, config, machine) | {"sources": describe_sources(config, task)}
    directory = make_directory(experiment, config)
    try:
        write_settings(directory.path, settings)
    except OSError as error:
        shutil.rmtree(directory.path)
        directory.lock.release()
        raise UserError(f"--runs-dir: {directory.path} cannot be written ({error.strerror})") from error
    flags = dataclasses.asdict(config).items()
    say("settings: " + "  ".join(f"{name}={value}" for name, value in flags if value not in (None, "", False, ())))
    return Run(directory, config, task, machine, wandb_settings(experiment, directory.path, config))


def _resume_run(experiment: str, config: PolicyConfig, task: Task | None, machine: dict) -> Run:
    directory = open_resumed_run(experiment, config, machine, describe_sources(config, task))
    return Run(directory, config, task, machine, wandb_settings(experiment, directory.path, config))
