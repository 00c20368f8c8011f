"""A run's directory, locked: made for a new run, or taken back to its newest checkpoint to resume a run."""

import shutil
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from common.errors import UserError
from common.parallel import world_size

from harness.base import ranks
from harness.base.config import PolicyConfig, shown
from harness.base.flags import flag, group_fields
from harness.base.machine import describe_machine
from harness.base.places import current_name, train_file
from harness.base.terminal import printable, say
from harness.run.checkpoints import Checkpoint, newest_checkpoint, restore_logs
from harness.run.settings import (
    MAY_CHANGE,
    changed_settings,
    check_sources,
    describe_settings,
    describe_sources,
    experiment_of,
    read_settings,
    script_of,
    write_settings,
)
from harness.task.task import Task

LOCK = ".lock"  # the operating system releases it when the process ends, for whatever reason
# Settings that `introduce` says in words, or need not say
NOT_LISTED = {"model", "device", "dtype", "threads", "seed", "task", "steps", "prompts_per_step", "pairs_per_step"}
NOT_LISTED |= {"group_size", "name", "runs_dir", "verbose"}
BEFORE_SETTINGS = {LOCK, "config.json.partial"}  # files that a kill can leave before a run begins


class RunDirectory(NamedTuple):
    path: Path
    lock: FileLock | None  # None: the main process, which is another one, holds it
    machine: dict  # as described at the start: the checkout may change later
    step: int = 0  # of the checkpoint that the run continues from; 0: there is none
    history: tuple[dict, ...] = ()  # the lines of metrics.jsonl up to that step
    num_steps: int | None = None  # its --steps until now


def open_directory(config: PolicyConfig, task: Task | None, searched: dict[str, dict]) -> RunDirectory:
    """The run's directory, which the main process makes, or takes back to its checkpoint."""
    machine = describe_machine() | {"processes": world_size(), "script": script_of(config)}
    with ranks.together():
        sources = describe_sources(config, task) | searched
    flags = {flag(name): value for name, value in vars(config).items() if name not in ("device", "threads")}
    ranks.check_alike(flags | {f"the content of {flag(name)}": source["content"] for name, source in sources.items()})
    opened = []

    def open_here() -> RunDirectory:
        opening = open_resumed_run if config.resume else make_directory
        opened.append(opening(experiment_of(config), config, machine, sources))
        return opened[0]._replace(lock=None)  # a lock cannot be sent to other processes

    directory = ranks.on_main(open_here)
    return opened[0] if opened else directory


def make_directory(experiment: str, config: PolicyConfig, machine: dict, sources: dict) -> RunDirectory:
    """Make and lock `<runs-dir>/<experiment>/<name>`, and write config.json."""
    name = config.name or f"{datetime.now():%Y%m%d-%H%M%S}-seed{config.seed}"
    directory = first = Path(config.runs_dir).expanduser() / experiment / name
    number = 1
    try:
        while not _is_new(directory):
            if config.name is not None:
                raise UserError(
                    f"the run {directory} exists already; choose another --name, or resume it: --resume {directory}"
                )
            number += 1
            directory = first.with_name(f"{name}-{number}")
        lock = lock_directory(directory)
        try:
            settings = describe_settings(config, machine) | {"sources": sources}
            write_settings(directory, settings)
        except OSError:
            shutil.rmtree(directory)
            raise
    except OSError as error:
        raise UserError(f"--runs-dir: {directory} cannot be written ({error.strerror})") from error
    introduce(config, settings)
    return RunDirectory(directory, lock, machine)


def introduce(config: PolicyConfig, settings: dict) -> None:
    """Say what the run does, on what and for how long, and which settings are not the defaults; or all of them."""
    say(printable(settings["about"] or settings["experiment"], 200))
    threads = "1 thread" if config.threads == 1 else f"{config.threads} threads"
    words = [f"policy {shown(config.model)} on {config.device} ({threads}, {config.dtype})", f"seed {config.seed}"]
    words += [f"task {shown(config.task)}"] if hasattr(config, "task") else []
    words += [f"{settings['processes']} processes"] if settings.get("processes", 1) > 1 else []
    if hasattr(config, "steps"):
        counted = (("prompts_per_step", "questions"), ("pairs_per_step", "pairs"), ("group_size", "completions each"))
        each = [f"{getattr(config, name)} {what}" for name, what in counted if hasattr(config, name)]
        words += [f"{config.steps} step{'s' * (config.steps != 1)}{' of ' * bool(each)}{', '.join(each)}"]
    say(printable("; ".join(words), 400))
    if not config.verbose:
        changed = [f"{name}={_brief(getattr(config, name))}" for name in settings["changed"] if name not in NOT_LISTED]
        say(f"settings: {'  '.join(changed) or 'the defaults'}  (--verbose shows all)")
        return
    say("settings:")
    for group, fields in group_fields(config).items():
        values = [(field.name, getattr(config, field.name), field.default) for field in fields]
        if listed := [f"{name}={value}" for name, value, default in values if value or (default and value != default)]:
            say(f"  {group:15}" + "  ".join(listed))


def _brief(value: object) -> str:
    text = shown(value) if isinstance(value, str) else " ".join(value) if isinstance(value, tuple) else str(value)
    return printable(text, 60)


def _is_new(directory: Path) -> bool:
    """Make a directory, unless it exists; returns whether it did not."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir()
    except FileExistsError:
        if directory.is_dir():
            return False
        raise
    return True


def open_resumed_run(experiment: str, config: PolicyConfig, machine: dict, sources: dict) -> RunDirectory:
    """Lock the run, and take its files back to its newest checkpoint; a UserError leaves them unchanged."""
    directory = Path(config.resume).expanduser()
    settings = read_settings(directory)
    name = settings["experiment"]
    if current_name(name) != experiment:
        raise UserError(f"--resume {directory} is a run of {name}, not of {experiment}")
    lock = lock_directory(directory)
    try:
        num_steps = settings.get("steps")
        step, history = _restore(directory, config, settings, machine, sources)
    except BaseException as error:
        lock.release()
        if isinstance(error, OSError):
            raise UserError(f"--resume {directory}: cannot be written ({error.strerror})") from error
        raise
    is_over = step and step == getattr(config, "steps", None)
    end = ", its last one: it is only evaluated again; a higher --steps trains on" if is_over else ""
    if name != experiment:
        say(f"{name} is now {train_file(name)}, and its new runs go to {shown(config.runs_dir)}/{experiment}/")
    say(f"resuming {directory} " + (f"after step {step}{end}" if step else "from the start: it has no checkpoint"))
    return RunDirectory(directory, lock, machine, step, tuple(history), num_steps)


def lock_directory(directory: Path, doing: str = "running or resuming this run") -> FileLock:
    """Lock a directory, or refuse if another process holds the lock, which is `doing` something there."""
    lock = FileLock(directory / LOCK, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"{directory} is in use: another process is {doing}") from None
    except OSError as error:
        raise UserError(f"{directory} cannot be written ({error.strerror})") from error
    return lock


def _restore(directory: Path, config: PolicyConfig, settings: dict, machine: dict, sources: dict) -> tuple[int, list]:
    """The step of the newest checkpoint, and the lines of metrics.jsonl up to it."""
    check_sources(directory, settings.get("sources", {}), sources, has_failed=settings.get("task_failed", False))
    found = newest_checkpoint(directory / "checkpoints") or Checkpoint(0, directory, logs={})
    if found.step > getattr(config, "steps", found.step):
        raise UserError(f"--resume {directory} is at step {found.step} already, beyond --steps {config.steps}")
    history = restore_logs(directory, found)
    unknown = {"processes": 1, "script": machine["script"]}  # in older runs
    for name in ("versions", "machine", "commit", "processes", "script"):
        before = settings.get(name, unknown.get(name))
        if before != machine[name]:
            say(f"the run began with {name} {before} and resumes with {machine[name]}: figures may differ")
    changed = ("steps", *MAY_CHANGE)
    settings |= {name: getattr(config, name) for name in changed if hasattr(config, name)}
    settings |= {"changed": changed_settings(config)}
    settings |= {"experiment": current_name(settings["experiment"])}
    write_settings(directory, settings | {"sources": sources, "task_failed": False})
    return found.step, history
