"""The process in which an entry of the speedrun trains: python -P speedrun_child.py FOLDER TRAIN_PY FLAGS ...

Imports what every entry imports, stops itself so that the clock can start, and then runs TRAIN_PY as python would. From
then on the usual ways to other files, to the network and to further processes are closed. Code that doesn't ask
Python, such as a compiled library's, passes: this is no sandbox.
"""

import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

SYSTEM = ("/dev", "/etc", "/lib", "/lib64", "/proc", "/sys", "/usr")
FORBIDDEN = {"subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"}
FORBIDDEN |= {"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"}
CHANGES = {"os.rename": 2, "os.link": 2, "os.symlink": 2, "os.mkdir": 1, "os.truncate": 1}  # their number of paths


def main() -> None:
    folder, script = sys.argv[1:3]
    prepare()
    if hasattr(os, "sched_setaffinity"):  # not on macOS
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sys.argv = sys.argv[2:]
    repository = str(Path(__file__).resolve().parents[1])
    sys.addaudithook(make_guard(folder, (sys.prefix, sys.base_prefix, *SYSTEM), repository))  # cannot be removed
    os.kill(os.getpid(), signal.SIGSTOP)
    runpy.run_path(script, run_name="__main__")


def prepare() -> None:
    """Import what takes long: nobody should win by importing less."""
    for name in ("torch.utils.tensorboard", "transformers.models.auto.tokenization_auto", "tyro"):
        import_module(name)
    import_module("transformers.models.llama.modeling_llama")


def make_guard(folder: str, readable: Iterable[str], closed: str) -> Callable[[str, tuple], None]:
    """An audit hook: files are written only below `folder`, and read only below it and `readable`, except `closed`."""
    folder, closed = map(os.path.realpath, (folder, closed))
    places = [folder, closed, *map(os.path.realpath, readable)]
    forbidden, changes = frozenset(FORBIDDEN), dict(CHANGES)

    def guard(event: str, arguments: tuple) -> None:
        if event in forbidden:
            raise PermissionError(f"an entry is one process without a network, and may not use {event}")
        if event == "open":
            paths, is_written = arguments[:1], bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        elif event in changes:
            paths, is_written = arguments[: changes[event]], True
        else:
            return
        for path in paths:
            if isinstance(path, int) or path is None:  # a file that is open already
                continue
            path = os.path.realpath(os.fsdecode(path))
            place = max((x for x in places if path == x or path.startswith(x + os.sep)), key=len, default=closed)
            if place == closed or (is_written and place != folder and path != os.devnull):
                raise PermissionError(f"an entry has its own folder, and may not open {path}")

    return guard


if __name__ == "__main__":
    main()
