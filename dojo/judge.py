"""Judges an answer: what an exercise calls, what must come out, and the first case in which it does not.

A check.py defines

    CALLS                         the calls of the answer's functions, by name and arguments
    expected(call)                what each must return, by a slow loop; without it, what solution.py returns
    accept(call, result)          optional: whether a result that differs is right too
    MISTAKES                      optional: {sentence: function of a call}; an answer that returns what this function
                                  returns, where it is wrong, gets its sentence
    ANSWER, or CHOICES            of a prediction: the right letter, and a sentence for each wrong one

The answer runs in a process of its own (dojo/child.py), which only returns values; they are compared here.
"""

import copy
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dojo.exercise import Exercise

SECONDS = 30.0  # for all calls of an answer; the bundled solutions need a second
RTOL, ATOL = 1e-4, 1e-6
NOT_WRITTEN = "NotImplementedError"


@dataclass(frozen=True)
class Call:
    """A call of a function of the answer.

    Args:
        function: its name.
        arguments: by name: tensors, numbers, texts, and lists and dictionaries of them.
        gradient: the argument by which the sum of the result is differentiated; the result is then a dictionary with
            `value` and `gradient`.
        about: what is special about this case, for the sentence of an answer that fails it.
    """

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    gradient: str | None = None
    about: str = ""


@dataclass(frozen=True)
class Verdict:
    is_right: bool
    sentence: str


def judge(
    exercise: Exercise, answer: Path, run: Callable[[Path, list[Call]], list[Any] | str] | None = None
) -> Verdict:
    """Run the answer, and compare; `run` is `call_apart`, except in tests."""
    check = load(exercise.folder / "check.py")
    if exercise.kind == "predict":
        return judge_prediction(check, answer.read_text(encoding="utf-8-sig", errors="replace").strip().lower())
    returned = (run or call_apart)(answer, check.CALLS)
    if isinstance(returned, str):
        return Verdict(False, returned)
    solution = load(exercise.folder / "solution.py")
    expected = getattr(check, "expected", lambda call: perform(solution, call))
    for call, result in zip(check.CALLS, returned, strict=True):
        if isinstance(result, dict) and result.get("error") == NOT_WRITTEN:
            return Verdict(False, f"{call.function} is not written yet")
        if isinstance(result, dict) and "error" in result:
            return Verdict(False, f"{shown_call(call)} raised {result['error']}")
        wanted = expected(call)
        if not same(wanted, result) and not is_accepted(check, call, result):
            for sentence, mistaken in getattr(check, "MISTAKES", {}).items():
                if is_mistake(mistaken, call, wanted, result):
                    return Verdict(False, f"{sentence}\n{difference(call, wanted, result)}")
            return Verdict(False, difference(call, wanted, result))
    return Verdict(True, "")


def difference(call: Call, wanted: Any, result: Any) -> str:
    if call.gradient and isinstance(result, dict):  # one of the two is enough
        is_value_right = "value" in wanted and same(wanted["value"], result.get("value"))
        name = "gradient" if is_value_right or "value" not in wanted else "value"
        head = "the value is right, but " * is_value_right
        call = call if name == "gradient" else replace(call, gradient=None)
        return f"{head}{shown_call(call)} must be {shown(wanted[name])}, and is {shown(result.get(name))}"
    return f"{shown_call(call)} must be {shown(wanted)}, and is {shown(result)}"


def judge_prediction(check: ModuleType, letter: str) -> Verdict:
    if letter == check.ANSWER:
        return Verdict(True, "")
    letters = sorted([check.ANSWER, *check.CHOICES])
    return Verdict(False, check.CHOICES.get(letter, f"answer.txt must hold one letter, {letters[0]} to {letters[-1]}"))


def is_accepted(check: ModuleType, call: Call, result: Any) -> bool:
    try:
        return hasattr(check, "accept") and bool(check.accept(call, result))
    except Exception:  # the answer may return anything
        return False


def is_mistake(mistaken: Callable[[Call], Any], call: Call, wanted: Any, result: Any) -> bool:
    """Whether the answer has made this mistake here, where it can be told from the right value."""
    try:
        value = mistaken(call)
    except Exception:  # a mistake in another function of the exercise need not know this call
        return False
    return not same(value, wanted) and same(value, result)


def load(path: Path) -> ModuleType:
    """One of our own files as a module; never the reader's."""
    module = ModuleType(f"dojo_{path.parent.name}_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), module.__dict__)
    return module


def perform(module: ModuleType, call: Call) -> Any:
    """Make a call, in this process or in that of the answer."""
    torch.manual_seed(0)
    arguments = copy.deepcopy(call.arguments)  # an answer may change them
    if call.gradient is None:
        return plain(getattr(module, call.function)(**arguments))
    leaf = arguments[call.gradient].requires_grad_()
    value = getattr(module, call.function)(**arguments)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{call.function} must return a tensor, not a {type(value).__name__}")
    gradient = torch.autograd.grad(value.sum(), leaf, allow_unused=True)[0] if value.requires_grad else None
    return {"value": plain(value), "gradient": torch.zeros_like(leaf) if gradient is None else gradient}


def plain(value: Any) -> Any:
    """Without gradients; only what can be sent."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [plain(x) for x in value]
    if isinstance(value, dict):
        return {str(key): plain(x) for key, x in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a {type(value).__name__} was returned, not a tensor, a number, a text, or a list of them")


def same(wanted: Any, result: Any) -> bool:
    """Equal up to rounding, with the same shape; a tensor may be a list or a number instead."""
    if isinstance(wanted, dict):
        return isinstance(result, dict) and all(key in result and same(x, result[key]) for key, x in wanted.items())
    if isinstance(wanted, str) or wanted is None:
        return wanted == result
    try:
        a, b = (torch.as_tensor(x).double() for x in (wanted, result))
    except (TypeError, ValueError, RuntimeError):
        is_list = isinstance(wanted, list) and isinstance(result, list) and len(wanted) == len(result)
        return is_list and all(map(same, wanted, result))
    return a.shape == b.shape and bool(torch.allclose(a, b, rtol=RTOL, atol=ATOL, equal_nan=True))


def call_apart(answer: Path, calls: list[Call]) -> list[Any] | str:
    """The results of all calls, perhaps a dictionary with an `error`; or a sentence if the file fails as a whole."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save([vars(call) for call in calls], Path(folder) / "calls.pt")
        command = [sys.executable, "-m", "dojo.child", str(answer.resolve()), folder]
        path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
        settings = {"cwd": folder, "env": os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}}
        said, results = Path(folder) / "stderr", Path(folder) / "results.pt"
        with said.open("w") as errors:
            settings |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": errors}
            try:
                status = subprocess.run(command, timeout=SECONDS, **settings).returncode
            except subprocess.TimeoutExpired:
                return f"{answer.name} did not return within {SECONDS:g} seconds"
        if not results.exists():
            last = (said.read_text(errors="replace").strip().splitlines() or ["nothing was printed"])[-1]
            return f"{answer.name} ended with exit status {status}: {last}"
        try:
            found = torch.load(results, weights_only=True)
        except Exception:  # the answer has written something else there
            found = None
        is_complete = isinstance(found, list) and len(found) == len(calls)
        return found if is_complete else f"{answer.name} has written to the file in which its results are returned"


def shown_call(call: Call) -> str:
    what = f"{call.function}({', '.join(f'{name}={shown(x)}' for name, x in call.arguments.items())})"
    what = f"the gradient of {what} by {call.gradient}" if call.gradient else what
    return what + (f" ({call.about})" if call.about else "")


def shown(value: Any) -> str:
    """In small numbers."""
    if isinstance(value, torch.Tensor):
        return shown(value.tolist())
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(x)}" for key, x in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(shown, value)) + "]"
    return f"{value + 0.0:.4g}" if isinstance(value, float) else repr(value)  # no -0
