"""Importing the file of a task, a bundled one by its name or a user's own by its path, and other files of the user."""

import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType

from common.errors import UserError

from common.plumbing.checks import local_path
from common.plumbing.config import RunConfig, shown
from common.plumbing.rows import find_problem
from common.plumbing.task import Row, Task
from common.plumbing.terminal import describe_error

BUNDLED = Path(__file__).resolve().parents[1] / "tasks"


def import_task(config: RunConfig, more_weights: dict[str, float] | None = None) -> Task:
    """The task that `--task` names, with its weights and without its rows.

    Raises:
        UserError: there is no such task, or its file cannot be used.
    """
    return task_of(config.task, config.reward_weight, more_weights)


def task_of(name: str, weights: tuple[str, ...] = (), more_weights: dict[str, float] | None = None) -> Task:
    """The task of this name or path. Arguments and errors as of `Task`."""
    return Task(_import_module(name), shown(name), weights, more_weights)


def bundled_tasks() -> list[str]:
    """The names of the files of common/tasks; a package there is a part of a task, or a program."""
    return sorted(path.stem for path in BUNDLED.glob("*.py") if path.stem != "__init__")


def suggest_task(row: Row, name: str) -> str:
    """The end of a sentence about a row that a bundled task, `name`, cannot use: which ones can; empty if none can."""
    others = set(bundled_tasks()) - {name} if name in bundled_tasks() else ()  # a user's own task is no mistake
    fitting = [f"--task {other}" for other in sorted(others) if _accepts(other, row)]
    return f"; rows like this one are those of {' or '.join(fitting)}" if fitting else ""


def _accepts(name: str, row: Row) -> bool:
    """Whether a row has the fields of a bundled task, and its own solution is right."""
    task = Task(_import_module(name), name)
    try:
        text = task.solution(row) if find_problem(row, task.fields) is None else None
        return text is not None and task.reward(row, text).get("correct") == 1
    except UserError:  # a fault of its functions with such a row
        return False


def _import_module(name: str) -> ModuleType:
    bundled = bundled_tasks()
    if name in bundled:
        return importlib.import_module(f"common.tasks.{name}")
    path = local_path(name, "--task")
    if not path.is_file():
        raise UserError(f"--task {name}: there is no such file, and the bundled tasks are: {', '.join(bundled)}")
    return _import_once(path.resolve(), path.stat().st_mtime_ns, name)


@functools.cache  # the command line and the run ask for the same file
def _import_once(path: Path, _changed_at: int, name: str) -> ModuleType:
    return import_file(path, "task", name)[0]


def import_file(path: Path, flag: str, name: str) -> tuple[ModuleType, bytes]:
    """A user's file, which `--<flag>` calls `name`, as a module, and its content.

    Raises:
        UserError: it cannot be imported.
    """
    module = ModuleType(f"{flag}_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pickle look their module up there
    try:
        # not by an import loader: it would take bytecode of an older version that was written in the same second
        source = path.read_bytes()
        exec(compile(source, path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise UserError(f"--{flag} {name}: the file cannot be imported: {describe_error(error, module)}") from error
    return module, source
