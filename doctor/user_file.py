"""The user's file as a module."""

import contextlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType

from doctor.findings import UnusableError
from doctor.guard import describe_error, printable

FUNCTIONS = (
    "policy_loss",
    "advantages",
    "log_probs",
    "action_mask",
    "generate_inputs",
    "reference_log_probs",
)
LOSSES = ("grpo", "dapo", "drgrpo", "sequence-sum", "sum", "row-sum")  # what LOSS may be; the kinds of denominators.py


def load(path: Path) -> ModuleType:
    """Run the file. Modules are imported from where Python finds them, as those of a task file are.

    Raises:
        UnusableError: there is no such file, it cannot be run, or it defines none of the known functions.
    """
    name = printable(str(path))
    if not path.is_file():
        raise UnusableError(f"{name} {'is no file' if path.exists() else 'does not exist'}: name a Python file")
    if path.suffix == ".ipynb":
        raise UnusableError(f"{name} is a notebook: copy the cells that define the functions into a .py file")
    path = path.resolve()
    module = ModuleType(f"doctor_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up there
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        neighbour = path.parent / f"{getattr(error, 'name', None)}.py"
        hint = f"; it is found with PYTHONPATH={printable(str(path.parent))}" if neighbour.exists() else ""
        raise UnusableError(f"{name} cannot be run: {describe_error(error, path)}{hint}") from error
    if not any(hasattr(module, function) for function in FUNCTIONS):
        own = next((each for each in vars(module) if re.search(r"loss|objective", each, re.IGNORECASE)), None)
        raise UnusableError(
            f"{name} defines none of the functions that the doctor knows ({', '.join(FUNCTIONS)}); "
            + (f"is it {own}? Then add: policy_loss = {own}" if own else "docs/loss_template.py shows them")
        )
    for function in FUNCTIONS:
        if not callable(getattr(module, function, print)):
            raise UnusableError(f"{name}: {function} is not a function")
    for constant, kind in (("ADAPTER", str), ("LOSS", str), ("SETTINGS", dict), ("SKIP", (list, tuple))):
        if not isinstance(getattr(module, constant, kind() if isinstance(kind, type) else ()), kind):
            names = kind.__name__ if isinstance(kind, type) else "list"
            raise UnusableError(f"{name}: {constant} must be a {names}")
    if getattr(module, "LOSS", "grpo") not in LOSSES:
        raise UnusableError(f"{name}: LOSS must be one of {', '.join(LOSSES)}")
    return module
