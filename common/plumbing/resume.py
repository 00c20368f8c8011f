"""Resuming a run: its files are brought back to its newest complete checkpoint."""

from pathlib import Path

from common.errors import UserError

from common.plumbing.checkpoints import newest_checkpoint
from common.plumbing.config import PolicyConfig
from common.plumbing.directory import RunDirectory, lock_directory
from common.plumbing.engine_place import PLACES
from common.plumbing.history import remove_logs, restore_logs
from common.plumbing.settings import automatic_names, read_settings, write_settings
from common.plumbing.sources import check_sources
from common.plumbing.terminal import say


def open_resumed_run(experiment: str, config: PolicyConfig, machine: dict, sources: dict) -> RunDirectory:
    """Lock the run, find the checkpoint to continue from, and bring the run's files back to its step.

    Args:
        sources: what the run is made from now, see `describe_sources`.

    Raises:
        UserError: it is a run of another experiment, is in use, is beyond `--steps`, was made from something else, or
            its files cannot be written.
    """
    directory = Path(config.resume).expanduser()
    settings = read_settings(directory, type(config))
    if settings["experiment"] != experiment:
        raise UserError(f"--resume {directory} is a run of {settings['experiment']}, not of {experiment}")
    lock = lock_directory(directory)
    try:
        step, history = _restore(directory, config, settings, machine, sources)
    except BaseException:
        lock.release()
        raise
    say(f"resuming {directory} " + (f"after step {step}" if step else "from the start: it has no checkpoint"))
    return RunDirectory(directory, lock, step, tuple(history))


def _restore(
    directory: Path, config: PolicyConfig, settings: dict, machine: dict, sources: dict
) -> tuple[int, list[dict]]:
    check_sources(directory, settings.get("sources", {}), sources, has_failed=settings.get("task_failed", False))
    try:
        found = newest_checkpoint(directory / "checkpoints")
        if found is not None and found.step > getattr(config, "steps", found.step):
            raise UserError(f"--resume {directory} is at step {found.step} already, beyond --steps {config.steps}")
        settings.setdefault("processes", 1)
        for name in ("versions", "machine", "commit", "processes"):
            if settings.get(name) != machine[name]:
                say(
                    f"the run began with {name} {settings.get(name)} and resumes with {machine[name]}: "
                    "figures may differ"
                )
        settings |= {"sources": sources, "task_failed": False, "automatic": automatic_names(config)}
        settings |= {name: getattr(config, name) for name in ("steps", *PLACES) if hasattr(config, name)}
        write_settings(directory, settings)
        if found is None:
            remove_logs(directory)
            return 0, []
        return found.step, restore_logs(directory, found.step, found.logs)
    except OSError as error:
        raise UserError(f"--resume {directory}: cannot be written ({error.strerror})") from error
