"""Resuming a run: its files are brought back to its newest complete checkpoint."""

from pathlib import Path
from typing import NamedTuple

from common.errors import UserError

from common.plumbing.checkpoints import newest_checkpoint
from common.plumbing.config import PolicyConfig
from common.plumbing.metrics import keep_until
from common.plumbing.settings import read_settings, write_settings
from common.plumbing.terminal import say


class ResumedRun(NamedTuple):
    directory: Path
    step: int  # of the checkpoint; 0: there is none
    history: list[dict]  # the lines of metrics.jsonl up to that step


def open_resumed_run(experiment: str, config: PolicyConfig, machine: dict) -> ResumedRun:
    """Find the checkpoint to continue from, and truncate the run's files to its step.

    Raises:
        UserError: it is a run of another experiment, is beyond `--steps`, or its files cannot be written.
    """
    directory = Path(config.resume).expanduser()
    settings = read_settings(directory)
    if settings["experiment"] != experiment:
        raise UserError(f"--resume {directory} is a run of {settings['experiment']}, not of {experiment}")
    found = newest_checkpoint(directory / "checkpoints")
    step = 0 if found is None else found[0]
    if step > getattr(config, "steps", step):
        raise UserError(f"--resume {directory} is at step {step} already, beyond --steps {config.steps}")
    for name in ("versions", "machine", "commit"):
        if settings[name] != machine[name]:
            say(f"the run began with {name} {settings[name]} and resumes with {machine[name]}: figures may differ")
    try:
        history = keep_until(directory / "metrics.jsonl", step if step else -1)
        keep_until(directory / "samples.jsonl", step)
        if getattr(config, "steps", None) != settings.get("steps"):
            write_settings(directory, settings | {"steps": config.steps})
    except OSError as error:
        raise UserError(f"--resume {directory}: cannot be written ({error.strerror})") from error
    say(f"resuming {directory} " + (f"after step {step}" if step else "from the start: it has no checkpoint"))
    return ResumedRun(directory, step, history)
