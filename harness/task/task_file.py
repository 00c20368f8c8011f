"""A task as its file defines it (docs/your_task.md), with every call checked."""

import functools
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType, UnionType

from common.errors import UserError

from harness.base.checks import is_finite, local_path
from harness.base.hub import find_source
from harness.base.terminal import describe_error, say, short
from harness.data.rows import FieldsError, Row, find_problem, placed
from harness.environments.other_packages import is_adapted, load_adapter

BUNDLED = Path(__file__).resolve().parents[2] / "tasks"
ENVIRONMENTS = ("thin_ice",)  # those beside the tasks
# Names of other metrics, or their beginnings, which a description cannot use.
TAKEN = {"length", "length_right", "length_wrong", "turns", "stopped", "truncated", "called", "unaided"}
TAKEN |= {"failed_searches", "malformed_calls", "unknown_calls", "failed_calls", "unanswered_calls"}
TAKEN_PREFIXES = ("accuracy", "reward_", "pass@")
PATIENCE = 10  # seconds that a call of a task's function takes before the user is told


class TaskError(UserError):
    """A fault in a task's functions; after a correction, the interrupted run can be resumed."""


class Watchdog:
    """Tells the user once about each call that takes long; uses a thread, because user code may use SIGALRM."""

    def __init__(self, describe: Callable[..., Exception]):
        self._describe = describe  # what to tell of a call
        self._running: tuple[float, tuple] | None = None  # the start of the running call, and the call
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, *call) -> Iterator[None]:
        """Tell `describe(*call)` if the block takes longer than `PATIENCE`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        self._running = (time.monotonic(), call)
        try:
            yield
        finally:
            self._running = None

    def _watch(self) -> None:
        told = None
        while True:
            running = self._running
            if running is not None and running is not told and time.monotonic() - running[0] > PATIENCE:
                told = running
                tell(self._describe(*running[1]))
            time.sleep(min(0.5, PATIENCE / 5))


class TaskFile:
    """The functions and constants of a task's file; a UserError names a missing or unusable one."""

    FUNCTIONS = (("messages", "row, system_prompt"), ("reward", "row, text"))  # that the file must define
    is_environment = False

    def __init__(self, module: ModuleType, name: str):
        self.name, self._module = name, module
        for function, arguments in self.FUNCTIONS:
            if not callable(getattr(module, function, None)):
                raise UserError(f"{self}: it defines no function {function}({arguments})")
        self.weights = self._read_weights()  # by component, before any flag
        self.system_prompt: str = self._constant("SYSTEM_PROMPT", str, "")
        self.fields: dict[str, type | tuple[type, ...]] = self._constant("FIELDS", dict, {})
        self.kind_fields: tuple[str, ...] = self._constant("KIND_FIELDS", tuple, ())
        self.train_data = find_source(getattr(module, "TRAIN_DATA", None), self.path, f"{self}: TRAIN_DATA")
        self.eval_data = find_source(getattr(module, "EVAL_DATA", None), self.path, f"{self}: EVAL_DATA")
        self._described: set[str] | None = None  # the names that `describe` returned the first time
        self._watchdog = Watchdog(self._is_slow)

    def __str__(self) -> str:
        return f"--task {self.name}"

    @property
    def path(self) -> Path:
        return Path(self._module.__file__)

    @property
    def is_bundled(self) -> bool:
        return self.path.parent == BUNDLED

    def has(self, function: str) -> bool:
        """Whether the file defines a function that a task need not have."""
        return hasattr(self._module, function)

    def messages(self, row: dict, system_prompt: str = "") -> list[dict]:
        """The conversation that asks the question of a row."""
        what = "a list of role and content"
        found = self._call("messages", row, system_prompt, kind=list, what=what)
        turns = [turn if isinstance(turn, dict) else {} for turn in found] or [{}]
        if not all(isinstance(turn.get(key), str) for turn in turns for key in ("role", "content")):
            raise self.error("messages", row, f"must return {what}, not {short(found)}")
        return found

    def question(self, row: dict) -> str:
        """The question of a row, for people: the last turn."""
        return self.messages(row)[-1]["content"]

    def reward(self, row: dict, text: str) -> dict[str, float]:
        """The reward components of a completion; they can be NaN or infinite."""
        found = self._call("reward", row, text, kind=dict, what="a dict of components")
        for component in found.keys() ^ self.weights.keys():
            problem = f"lacks the component {component!r} of REWARD_WEIGHTS"
            if component in found:
                problem = f"has a component {component!r} without a weight: give it one in REWARD_WEIGHTS (0: log it)"
            raise self.error("reward", row, problem)
        return {name: self._number("reward", row, name, found[name]) for name in self.weights}

    def prepare(self, rows: list[dict], texts: list[str]) -> None:
        """Announce completions that are about to be rewarded, if the task defines `prepare`."""
        if rows and self.has("prepare"):
            self._call("prepare", rows, texts)

    def note(self) -> str | None:
        """A message for the user before a run, if the task defines `note`."""
        return self._call("note", kind=str | None, what="a str or None") if self.has("note") else None

    def describe(self, row: dict, text: str) -> dict[str, float]:
        """Other measures of a completion; empty if the task defines no `describe`."""
        if not self.has("describe"):
            return {}
        found = self._call("describe", row, text, kind=dict, what="a dict of numbers")
        self.check_description(row, found)
        return {name: self._number("describe", row, name, value) for name, value in found.items()}

    def check_description(self, row: dict, found: dict) -> None:
        """Refuse names that differ from those of other completions, or that another metric has."""
        self._described = set(found) if self._described is None else self._described
        if differing := set(found) ^ self._described:
            problem = f"must return the same names for every completion; it differs in {', '.join(sorted(differing))}"
            raise self.error("describe", row, problem)
        if wrong := [name for name in found if name in TAKEN or name.startswith(TAKEN_PREFIXES)]:
            raise self.error("describe", row, f"cannot use the name {wrong[0]!r}")

    def solution(self, row: dict) -> str | None:
        """A completion that earns the reward of a row; None if the task has no `solution`, or returns none."""
        return self._call("solution", row, kind=str | None, what="a str") if self.has("solution") else None

    def vote(self, row: dict, text: str) -> str | None:
        """The answer in a completion, in one spelling: the file's `vote`, else as in arithmetic; None: no answer."""
        if self.has("vote"):
            return self._call("vote", row, text, kind=str | None, what="a str or None")
        arithmetic = import_named("arithmetic")
        given = arithmetic.given_answer(text)
        return None if given is None else arithmetic.normalize_answer(given)

    def feedback(self, row: dict, text: str) -> str:
        """What is wrong with a completion, in words, for the policy to read; empty: nothing, or no `feedback`."""
        return self._call("feedback", row, text, kind=str, what="a str") if self.has("feedback") else ""

    def tally(self, row: dict, text: str) -> dict[str, list[bool]]:
        """Verdicts on a completion, by name; an evaluation reports their shares over all questions."""
        return self._call("tally", row, text, kind=dict, what="a dict of lists") if self.has("tally") else {}

    def right_answer(self, row: dict) -> object:
        """The answer to a row, for people: the answer in its solution or, without a solution, its field `answer`.

        The answer is read by `vote`, otherwise from the only `<answer>`; any other text is shown as it is.
        """
        text = self.solution(row)
        if text is None:
            return row.get("answer")
        given = self.vote(row, text) if self.has("vote") else import_named("arithmetic").given_answer(text)
        return text if given is None else given

    def kind(self, row: dict) -> tuple:
        """The kind of question in a row."""
        return tuple(repr(row.get(field)) for field in self.kind_fields)

    def error(self, function: str, row: dict, problem: str) -> TaskError:
        """The fault of one of the file's functions; it names the row."""
        place = repr(row) if isinstance(row, str) else getattr(row, "place", "a row")  # `rows` gets a split
        return TaskError(f"{self}: {function} of {place} {problem}")

    def rows(self, split: str) -> list[Row]:
        """The rows that the file makes itself, for "train" or "eval"; a UserError names one that lacks a field."""
        found = self._call("rows", split, kind=list, what="a list of dicts")
        if not found or not all(isinstance(row, dict) for row in found):
            raise self.error("rows", split, f"must return a list of dicts, not {short(found)}")
        rows = [placed(row, f"{self}, row {number} of {split}") for number, row in enumerate(found, start=1)]
        for row in rows:
            if (problem := find_problem(row, self.fields)) is not None:
                raise FieldsError(row, problem)
        return rows

    def _is_slow(self, function: str, row: dict) -> TaskError:
        return self.error(function, row, f"has been running for {PATIENCE} s; Ctrl-C twice ends it")

    def _call(self, function: str, *arguments, kind: type | UnionType = object, what: str = ""):
        """Call a function of the file; its result must have the type `kind`, which `what` describes in words."""
        first = arguments[0] if arguments else {}
        row = first if isinstance(first, dict | str) else first[0]  # `prepare` gets many rows
        try:
            with self._watchdog.watching(function, row):
                found = getattr(self._module, function)(*arguments)
        except (Exception, SystemExit) as error:  # user code can raise anything
            raise self.error(function, row, f"raised {describe_error(error, self._module)}") from error
        if not isinstance(found, kind):
            raise self.error(function, row, f"must return {what}, not {short(found)}")
        return found

    def _number(self, function: str, row: dict, name: str, value) -> float:
        if not isinstance(value, str):
            with suppress(TypeError, ValueError):
                return float(value)
        raise self.error(function, row, f"gives {name!r} the value {short(value)}, which is not a number")

    def _read_weights(self) -> dict[str, float]:
        found = getattr(self._module, "REWARD_WEIGHTS", {"reward": 1.0} if self.is_environment else None)
        if not isinstance(found, dict) or not found or not all(map(is_finite, found.values())):
            raise UserError(f"{self}: REWARD_WEIGHTS must be a dict of a number for each component, not {short(found)}")
        return {component: float(weight) for component, weight in found.items()}

    def _constant(self, name: str, wanted: type, default):
        value = getattr(self._module, name, default)
        if not isinstance(value, wanted):
            raise UserError(f"{self}: {name} must be a {wanted.__name__}, not {short(value)}")
        return value


def tell(error: Exception) -> None:
    """Say a fault that does not end the run, on every process: others cannot know it."""
    say(str(error), sys.stderr, anyway=True)


def bundled_tasks() -> list[str]:
    """The names of the task files; a package among them is a part of a task, or a program."""
    return sorted(path.stem for path in BUNDLED.glob("*.py") if path.stem not in ("__init__", *ENVIRONMENTS))


def import_named(name: str) -> ModuleType:
    """The module that `--task` names: a bundled one, a user's file, or what an adapter loads."""
    bundled = bundled_tasks()
    if name in (*bundled, *ENVIRONMENTS):
        return importlib.import_module(f"tasks.{name}")
    if is_adapted(name):
        module = load_adapter(name)
        loaded = f"load_adapter({name!r}).Environment"  # for the workers of an environment
        module.SOURCE = f"from {load_adapter.__module__} import load_adapter\nEnvironment = {loaded}".encode()
        return module
    path = local_path(name, "--task")
    if not path.is_file():
        raise UserError(f"--task {name}: there is no such file, and the bundled tasks are: {', '.join(bundled)}")
    return _import_once(path.resolve(), path.stat().st_mtime_ns, name)


@functools.cache  # the command line and the run both ask for this file
def _import_once(path: Path, _changed_at: int, name: str) -> ModuleType:
    module, source = import_file(path, "task", name)
    module.SOURCE = source  # an environment's workers import what this process has imported
    return module


def import_file(path: Path, flag: str, name: str) -> tuple[ModuleType, bytes]:
    """Import a user's file, which `--<flag>` calls `name`; returns module and content, UserError if that fails."""
    module = ModuleType(f"{flag}_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pickle look up their module there
    try:
        # not by an import loader, which would use bytecode of an older version written in the same second
        source = path.read_bytes()
        exec(compile(source, path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:  # user code can raise anything
        raise UserError(f"--{flag} {name}: the file cannot be imported: {describe_error(error, module)}") from error
    return module, source
