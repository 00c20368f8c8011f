"""Starting a program and its run: a new directory or a resumed one, and what the user is told when it ends early."""

import dataclasses
import errno
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import torch

from common.errors import UserError

from common.plumbing.config import PolicyConfig
from common.plumbing.machine import describe_machine
from common.plumbing.resume import open_resumed_run
from common.plumbing.run import Run
from common.plumbing.settings import describe_settings, wandb_settings, write_settings
from common.plumbing.signals import signals_to
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

    Within the block Ctrl-C and SIGTERM end the step that is running and write a checkpoint. A run that ends with a
    user's error before anything was logged leaves no directory.

    Raises:
        UserError: a run of that name exists, the directory cannot be made, or the disk is full.
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
                raise
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted; resume with: {run.resume_command}") from None
        except UserError as error:
            if not config.resume and not (run.directory / "metrics.jsonl").exists():
                shutil.rmtree(run.directory)
            elif isinstance(error, TaskError):
                raise UserError(f"{error}. When it is corrected, resume with: {run.resume_command}") from error
            raise
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
    name = config.name or f"{datetime.now():%Y%m%d-%H%M%S}-seed{config.seed}"
    directory = Path(config.runs_dir).expanduser() / experiment / name
    settings = describe_settings(experiment, config, machine)
    try:
        directory.mkdir(parents=True)
        try:
            write_settings(directory, settings)
        except OSError:
            shutil.rmtree(directory)
            raise
    except FileExistsError:
        if not directory.is_dir():
            raise UserError(f"--runs-dir: {directory} cannot be made (a file is in the way)") from None
        raise UserError(
            f"the run {directory} exists already; choose another --name, or resume it: --resume {directory}"
        ) from None
    except OSError as error:
        raise UserError(f"--runs-dir: {directory} cannot be written ({error.strerror})") from error
    flags = dataclasses.asdict(config).items()
    say("settings: " + "  ".join(f"{name}={value}" for name, value in flags if value not in (None, "", False, ())))
    return Run(directory, config, task, machine, 0, [], wandb_settings(experiment, directory, config))


def _resume_run(experiment: str, config: PolicyConfig, task: Task | None, machine: dict) -> Run:
    resumed = open_resumed_run(experiment, config, machine)
    wandb = wandb_settings(experiment, resumed.directory, config)
    return Run(resumed.directory, config, task, machine, resumed.step, resumed.history, wandb)
