"""The task or the environment that a name or a path stands for."""

from common.errors import UserError

from harness.base.config import shown
from harness.task.environment_file import EnvironmentFile
from harness.task.task_file import TaskFile, import_named


def task_of(name: str, environment_seconds: float | None = None) -> TaskFile:
    """The file of the task with this name or path; with a time limit of its turns, of the environment."""
    module = import_named(name)
    if environment_seconds is None:
        if hasattr(module, "Environment"):
            raise UserError(f"--task {shown(name)} is an environment of many turns: agents/world/train.py plays it")
        return TaskFile(module, shown(name))
    if not hasattr(module, "Environment"):
        raise UserError(f"--environment {shown(name)}: it defines no class Environment (docs/environments.md)")
    return EnvironmentFile(module, shown(name), environment_seconds)


def seconds_of(config: object) -> float | None:
    """The time limit of a turn in settings whose task is an environment."""
    return getattr(config, "environment_seconds", None)
