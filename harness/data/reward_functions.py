"""`--reward-functions`: rewards in the form of TRL, `f(prompts, completions, **columns) -> list[float]`, in a file.

TRL calls a reward once for many completions, with conversations as lists of messages and each field of the data as a
list; other trainers' ids, states and loggers (`completion_ids`, `trainer_state`, `log_metric`) are not given here.
"""

import asyncio
import inspect
from collections.abc import Callable
from types import ModuleType

from common.errors import UserError

from harness.base.checks import is_finite, local_path
from harness.base.terminal import describe_error, printable, short
from harness.data.rows import Row
from harness.data.task import TaskError, import_file

NOT_COLUMNS = {"prompt", "completion", "prompts", "completions", "completion_ids"}
Function = Callable[..., list[float]]


class RewardFunctions:
    """The public functions of a file that take `completions`, by name; each is a component of the reward."""

    def __init__(self, name: str):
        self._flag = f"--reward-functions {name}"
        path = local_path(name, "--reward-functions")
        if not path.is_file():
            raise UserError(f"{self._flag}: there is no such file")
        self._module: ModuleType = import_file(path.resolve(), "reward-functions", name)[0]
        self._functions: dict[str, Function] = {
            found: function
            for found, function in vars(self._module).items()
            if not found.startswith("_") and callable(function) and "completions" in _parameters(function)
        }
        if not self._functions:
            raise UserError(f"{self._flag}: it has no function with a parameter completions, and a name without _")

    @property
    def names(self) -> list[str]:
        return list(self._functions)

    def score(self, prompts: list[list[dict]], rows: list[Row], texts: list[str]) -> list[dict[str, float]]:
        """The components of each completion, by name; a TaskError names the function and the row."""
        found = {name: self._call(name, prompts, rows, texts) for name in self._functions}
        return [{name: values[index] for name, values in found.items()} for index in range(len(rows))]

    def _call(self, name: str, prompts: list[list[dict]], rows: list[Row], texts: list[str]) -> list[float]:
        columns = {key: [row.get(key) for row in rows] for key in rows[0] if key not in NOT_COLUMNS}
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        try:
            values = self._functions[name](prompts=prompts, completions=completions, **columns)
            values = list(asyncio.run(values) if inspect.isawaitable(values) else values)
        except (Exception, SystemExit) as error:  # user code can raise anything
            if len(rows) > 1:  # which row is it?
                for single in zip(prompts, rows, texts, strict=True):
                    self._call(name, *([entry] for entry in single))
            raise self._error(name, rows[0], f"raised {describe_error(error, self._module)}") from error
        if len(values) != len(rows):
            raise self._error(name, rows[0], f"returned {len(values)} rewards for {len(rows)} completions")
        for row, value in zip(rows, values, strict=True):
            if not is_finite(value):
                raise self._error(name, row, f"gave {short(value)}, which is not a finite number")
        return [float(value) for value in values]

    def _error(self, name: str, row: Row, problem: str) -> TaskError:
        return TaskError(f"{self._flag}: {printable(name, 60)} of {row.place} {problem}")


def _parameters(function: Function) -> dict:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of a class or a function without a signature
        return {}
