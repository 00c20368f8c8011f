"""Runs tests of a tree in forks of a process that has imported packages, but nothing of the project; see faults.py."""

import atexit
import contextlib
import cProfile
import ctypes
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import psutil

PRELOADED = ("accelerate", "datasets", "hypothesis", "matplotlib.pyplot", "peft", "pytest", "rich.console", "torch")
PRELOADED += ("torch.distributed.tensor", "transformers", "transformers.generation", "tyro", "xdist")
PRELOADED += tuple(f"transformers.models.{name}" for name in ("auto.modeling_auto", "llama.modeling_llama"))
HANGING = 60  # seconds of the processor that one test may take
TRACE = "FAULTS_TRACE"  # environment variable: the file in which programs write which functions they call

# In a fork


class Recorder:
    """A plugin of pytest: runs the wanted tests only, and writes a line when a test begins and when it has ended."""

    def __init__(self, path: Path, wanted: list[str] | None):
        self.path, self.wanted, self.outcome, self.seconds = path, wanted, "", 0.0

    def pytest_collection_modifyitems(self, items: list) -> None:
        if self.wanted is not None:
            by_name = {item.nodeid: item for item in items}
            items[:] = [by_name[name] for name in self.wanted if name in by_name]

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.write(report.nodeid, "failed", 0.0)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcome, self.seconds = "passed", 0.0
        self.write(nodeid, "started", 0.0)

    def pytest_runtest_logreport(self, report) -> None:
        self.seconds += report.duration
        self.outcome = report.outcome if report.outcome != "passed" else self.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(nodeid, self.outcome, self.seconds)

    def write(self, *entry: str | float) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


class Tracer:
    """A plugin of pytest: writes which functions of the tree each test calls, in this process and all its threads."""

    def __init__(self, tree: Path, path: Path):
        self.tree, self.path, self.profiles = f"{tree}/", path, []

    def start(self, *_) -> None:
        self.profiles.append(cProfile.Profile(builtins=False))
        threading.setprofile(self.start)  # a new thread calls it first, and gets a profile of its own
        self.profiles[-1].enable()

    def dump(self, test: str, phase: str) -> None:
        codes = [entry.code for profile in list(self.profiles) for entry in profile.getstats()]
        codes = [code for code in codes if not isinstance(code, str) and code.co_filename.startswith(self.tree)]
        names = sorted({f"{code.co_filename[len(self.tree) :]}:{code.co_qualname}" for code in codes})
        for profile in self.profiles:
            profile.clear()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([test, phase, [name for name in names if not name.startswith("tests/")]]) + "\n")

    def pytest_runtest_logreport(self, report) -> None:
        self.dump(report.nodeid, report.when)


def load_forked(tree: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("forked", tree / "tests" / "forked.py")
    module = sys.modules["forked"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_tests(tree: Path, files: list[str], words: list[str], plugins: list) -> None:
    """Become `python -m pytest FILES` in the tree."""
    import pytest

    if (tree / "tests" / "forked.py").exists():
        load_forked(tree).start_server = lambda: lambda: None  # ours is there already
    for plugin in plugins[1:]:
        plugin.start()
    os._exit(pytest.main(["-n", "0", "-p", "no:cacheprovider", *words, *files], plugins))


def serve_programs(tree: Path, address: str) -> None:
    """Become the server of tests/forked.py. It forks from this process, and programs can be traced."""
    server = load_forked(tree)
    become = server.become

    def traced(request: dict) -> None:
        if path := request["environment"].get(TRACE):
            tracer = Tracer(tree, Path(path))
            test, _, phase = request["environment"].get("PYTEST_CURRENT_TEST", "").rpartition(" (")
            atexit.register(tracer.dump, test, phase.removesuffix(")"))
            tracer.start()
        become(request)

    server.become, subprocess.Popen = traced, server.Popen
    server.Popen.inherited = server.read_once(os.environ)
    if asked := server.serve(server.listen(address)):
        server.run(asked)
    os._exit(0)


# In the process that plants


class Runs:
    """Runs tests of a tree, one process at a time. Afterwards `seconds` has those of the processor."""

    def __init__(self, tree: Path, folder: Path, is_slow: bool):
        self.words = ["-m", ""] * is_slow  # pyproject.toml leaves the slow tier out
        self.tree, self.entries, self.trace = tree, folder / "entries.jsonl", folder / "trace.jsonl"
        self.log, self.server, self.seconds = folder / "output.log", None, 0.0
        for name in PRELOADED:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # garbage collection in a fork then copies no pages
        if (tree / "tests" / "forked.py").exists():
            address = os.environ["FORK_SERVER"] = f"{tempfile.mkdtemp()}/socket"
            stdin, self._open = os.pipe()  # the server ends when it is closed
            self.server = self._fork(stdin, serve_programs, tree, address)
            while not os.path.exists(address):
                time.sleep(0.1)

    def run(self, tests: list[str], cap: float, is_traced: bool = False) -> tuple[dict[str, list], str]:
        """Run tests until one fails, or all of some files, traced.

        Returns {test: [outcome, seconds]}, and why it was ended ("cap" or "hangs"), if it was.
        """
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        self.entries.write_text("")
        self.trace.write_text("")
        os.environ[TRACE] = str(self.trace) * is_traced
        words = [*self.words, *["-x"] * (not is_traced)]
        plugins = [Recorder(self.entries, None if is_traced else tests)]
        plugins += [Tracer(self.tree, self.trace)] * is_traced
        before, start = cpu_seconds(self.server), 0.0
        with open(os.devnull) as nothing:
            process = self._fork(nothing.fileno(), run_tests, self.tree, files, words, plugins)
        size, ended, self.seconds = 0, "", 0.0
        while not ended and (status := os.waitpid(process.pid, os.WNOHANG)) == (0, 0):
            time.sleep(0.2)
            self.seconds = max(self.seconds, cpu_seconds(process) + cpu_seconds(self.server) - before)
            if self.entries.stat().st_size != size:
                size, start = self.entries.stat().st_size, self.seconds
            if not is_traced:
                ended = "hangs" if self.seconds - start > HANGING else "cap" if self.seconds > cap else ""
        for each in [*members(process), *members(self.server)[1:]]:  # programs that a test left behind, too
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        if ended:
            os.waitpid(process.pid, 0)
        lines = self.entries.read_text("utf-8").rpartition("\n")[0].splitlines()
        found = {test: [outcome, seconds] for test, outcome, seconds in map(json.loads, lines)}
        if not ended and not found and status[1]:  # pytest itself could not begin
            found = {"tests/conftest.py": ["failed", 0.0]}
        return found, ended

    def _fork(self, stdin: int, function: Callable[..., None], *arguments) -> psutil.Process:
        """Call a function, which does not return, in a fork that has a session of its own and no open files."""
        if pid := os.fork():
            return psutil.Process(pid)
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # when this process ends
            os.chdir(self.tree)
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for number, stream in enumerate((stdin, log, log)):
                os.dup2(stream, number)
            os.closerange(3, 1000)
            function(*arguments)
        finally:
            os._exit(70)


def members(process: psutil.Process | None) -> list[psutil.Process]:
    """A process with its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)] if process else []
    return []


def cpu_seconds(process: psutil.Process | None) -> float:
    """Processor seconds of a process and its descendants, also of those that have ended."""
    seconds = 0.0
    for each in members(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            seconds += sum(each.cpu_times()[:4])
    return seconds
