"""The directory of an evaluation: locked while a process works in it, and only for the settings that it began with.

config.json  completions.jsonl  results.json  failures.txt  .lock
"""

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from common.errors import UserError

from harness.base.checks import flag
from harness.base.config import ModelConfig
from harness.base.terminal import printable, say
from harness.data.task import Task
from harness.run.directory import BEFORE_SETTINGS, lock_directory
from harness.run.machine import describe_machine
from harness.run.settings import check_sources, describe_sources, write_settings

FREE = {"output", "compare", "threads"}  # the last rounds differently: `tell_changes` says that it has changed
PARENT = Path("runs") / "evaluate"


def default_directory(seed: int) -> Path:
    """A new one, named by date, time and seed as a run's is."""
    name = f"{datetime.now():%Y%m%d-%H%M%S}-seed{seed}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(PARENT / name for name in names if not (PARENT / name).exists())


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make the directory, and let no other process work in it within the block."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {directory} cannot be made ({error.strerror})") from error
    lock = lock_directory(directory, "writing an evaluation there")
    try:
        yield
    finally:
        lock.release()


def begin(directory: Path, config: ModelConfig, task: Task) -> dict:
    """Write the settings of a new evaluation, or compare those of the one that is continued; returns them."""
    sources = describe_sources(config, task)
    settings = dataclasses.asdict(config) | describe_machine() | {"sources": sources, "command": sys.argv}
    settings = json.loads(json.dumps(settings))  # tuples become lists, as in the file
    stored = _stored(directory)
    if stored is None:
        write_settings(directory, settings)
        return settings
    names = [field.name for field in dataclasses.fields(config) if field.name not in FREE]
    for name in names:
        if stored.get(name) != settings[name]:
            values = [printable(json.dumps(entry), 80) for entry in (settings[name], stored.get(name))]
            known = f"{values[1]} in {directory}: repeat that setting, or choose another --output"
            raise UserError(f"{flag(name)} {values[0]} differs from {known}")
    check_sources(directory, stored.get("sources", {}), sources, has_failed=False)
    return stored


def tell_changes(directory: Path, stored: dict) -> None:
    """Say what has changed since the evaluation that is continued began."""
    for name, value in describe_machine().items():
        if stored.get(name) != value:
            say(f"{directory} began with {name} {stored.get(name)}, and goes on with {value}: figures may differ")


def _stored(directory: Path) -> dict | None:
    """The settings of the evaluation that the directory holds; None if it is empty."""
    path = directory / "config.json"
    if not path.exists():
        others = sorted({entry.name for entry in directory.iterdir()} - BEFORE_SETTINGS)
        if others:
            names = printable(", ".join(others), 60)
            raise UserError(f"--output {directory} holds other files ({names}) and no evaluation: choose another")
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): choose another --output") from error
    if "num_samples" not in stored:
        raise UserError(f"--output {directory} is not that of an evaluation (see its config.json): choose another")
    return stored
