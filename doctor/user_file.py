"""The user's file as a module; calls of its functions turn errors into one sentence."""

import inspect
import re
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from doctor.findings import CHECKS, UnusableError

LOSSES = ("grpo", "dapo", "drgrpo", "sequence-sum", "sum", "row-sum")  # values of LOSS


class UserFile:
    """Runs the file. Modules are imported from where Python finds them, as for a task file.

    `announce` is called with a description before every call of the user's code.
    """

    def __init__(self, path: Path, announce: Callable[[str], None]):
        if not path.is_file() or path.suffix == ".ipynb":
            why = "is a notebook" if path.is_file() else "is no file"
            raise UnusableError(f"{path} {why}: name a Python file")
        self.path, self.announce = path.resolve(), announce
        self.module = module = ModuleType(f"doctor_{path.stem}")
        module.__file__ = str(self.path)
        sys.modules[module.__name__] = module  # dataclasses look up their module there
        announce(str(path))
        try:
            exec(compile(self.path.read_bytes(), self.path, "exec"), module.__dict__)
        except BaseException as error:  # user code can raise anything
            neighbour = self.path.parent / f"{getattr(error, 'name', None)}.py"
            hint = f"; it is found with PYTHONPATH={neighbour.parent}" if neighbour.exists() else ""
            raise UnusableError(f"{path} cannot be run: {self._describe(error)}{hint}") from error
        if not any(hasattr(module, function) for function in CHECKS):
            own = next((each for each in vars(module) if re.search(r"loss|objective", each, re.IGNORECASE)), None)
            raise UnusableError(
                f"{path} defines none of the functions that the doctor knows ({', '.join(CHECKS)}); "
                + (f"is it {own}? Then add: policy_loss = {own}" if own else "docs/loss_template.py shows them")
            )
        self.declared = getattr(module, "LOSS", "")
        self.settings = getattr(module, "SETTINGS", {})
        self.skipped = getattr(module, "SKIP", [])
        if self.declared not in ("", *LOSSES):
            raise UnusableError(f"{path}: LOSS must be one of {', '.join(LOSSES)}")
        checks = {check for checks in CHECKS.values() for check in checks.split()}
        for check in self.skipped:
            if check not in checks:
                names = ", ".join(sorted(checks))
                raise UnusableError(f"{path}: SKIP names {check}, which is no check; they are: {names}")

    def call(self, what: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call a user's function; `what` names the function and the purpose."""
        self.announce(what)
        try:
            return function(*args, **kwargs)
        except BaseException as error:  # user code can raise anything
            raise UnusableError(f"{what} raised {self._describe(error)}") from error

    def call_by_name(self, name: str, values: dict[str, Any], num_in_order: int) -> Any:
        """Call a function other than `policy_loss`, whatever names it uses for the first `num_in_order` values."""
        parameters = parameters_of(getattr(self.module, name))
        rest = list(parameters)[num_in_order:]
        unknown = [each for each in rest if each not in values and parameters[each].default is inspect.Parameter.empty]
        if len(parameters) < num_in_order or unknown:
            names = f"({', '.join(values)}), not ({', '.join(parameters)})"
            raise UnusableError(f"{name} must take {names}; see docs/loss_template.py")
        by_name = {each: values[each] for each in rest if each in values}
        return self.call(name, getattr(self.module, name), *list(values.values())[:num_in_order], **by_name)

    def tensor(self, name: str, values: dict[str, Any], num_in_order: int, shape: tuple, about: str = "") -> Any:
        """Like `call_by_name`, for a function that has to return a tensor of this shape."""
        result = self.call_by_name(name, values, num_in_order)
        result = result[0] if isinstance(result, tuple) and result else result
        result = torch.from_numpy(result) if type(result).__module__ == "numpy" else result
        if not isinstance(result, torch.Tensor) or tuple(result.shape) != shape:
            shown = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise UnusableError(f"{name} must return a tensor of shape {shape}{about}, not {shown}")
        return result

    def _describe(self, error: BaseException) -> str:
        """An error in one line, with the line of the user's file that raised it."""
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(self.path)]
        text = str(error)
        if isinstance(error, SyntaxError):
            lines, text = [error.lineno], error.msg
        place = f" (line {lines[-1]} of {self.path.name})" if lines else ""
        text = "".join(
            each if each.isprintable() else "\ufffd" for each in textwrap.shorten(text, 200, placeholder=" ...")
        )
        return f"{type(error).__name__}{': ' if text else ''}{text}{place}"


def parameters_of(function: Callable) -> dict[str, inspect.Parameter]:
    """The parameters that a function accepts by name."""
    parameters = inspect.signature(function).parameters
    return {name: each for name, each in parameters.items() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
