"""The process in which an answer runs: python -m dojo.child ANSWER FOLDER

Reads FOLDER/calls.pt, and writes what each call returns to FOLDER/results.pt. The usual ways to read the exercises, to
start programs and to use the network are closed. This stops a curious answer, and no determined one: it is no sandbox.
"""

import contextlib
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dojo.exercise import FOLDER
from dojo.judge import NOT_WRITTEN, Call, perform

LIMITS = {"RLIMIT_CPU": 30, "RLIMIT_AS": 16 << 30, "RLIMIT_FSIZE": 64 << 20}  # seconds, and bytes
CLOSED = (FOLDER, FOLDER.parents[1] / "tests" / "dojo")  # solutions, and answers that are judged in tests
FORBIDDEN = {"subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "socket.connect"}
FORBIDDEN |= {"os.link", "os.rename", "ctypes.dlopen"}  # other ways to a closed file


def main() -> None:
    answer, folder = map(Path, sys.argv[1:])
    calls = [Call(**call) for call in torch.load(folder / "calls.pt", weights_only=True)]
    torch.set_num_threads(1)
    text = answer.read_bytes()  # as Python reads it, also with a byte order mark
    for name, most in LIMITS.items():
        with contextlib.suppress(ValueError, OSError):  # not every system has every limit
            resource.setrlimit(getattr(resource, name), (most, most))
    sys.addaudithook(make_guard(CLOSED, FORBIDDEN))  # cannot be removed
    module = ModuleType("answer")
    module.__file__ = str(answer)
    sys.modules["answer"] = module
    try:
        exec(compile(text, answer.name, "exec"), module.__dict__)
    except SyntaxError as error:
        sys.exit(f"SyntaxError: {error.msg} (line {error.lineno})")
    torch.save([result_of(module, call) for call in calls], folder / "results.pt")


def result_of(module: ModuleType, call: Call) -> Any:
    if not hasattr(module, call.function):
        return {"error": f"NameError: there is no function {call.function} in the file"}
    try:
        return perform(module, call)
    except NotImplementedError:
        return {"error": NOT_WRITTEN}
    except Exception as error:
        lines, trace = [], error.__traceback__
        while trace:
            lines += [trace.tb_lineno] * (trace.tb_frame.f_code.co_filename == Path(sys.argv[1]).name)
            trace = trace.tb_next
        return {"error": f"{type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")}


def make_guard(closed: tuple[Path, ...], forbidden: set[str]) -> Callable[[str, tuple], None]:
    """An audit hook; its settings are out of the answer's reach."""
    closed, forbidden = tuple(closed), frozenset(forbidden)

    def guard(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            path = Path(arguments[0] if isinstance(arguments[0], str) else arguments[0].decode()).resolve()
            if any(path.is_relative_to(folder) for folder in closed):
                raise PermissionError("the exercises are closed while an answer is judged")
        if event in forbidden:
            raise PermissionError("an answer may not start programs or use the network while it is judged")

    return guard


if __name__ == "__main__":
    main()
