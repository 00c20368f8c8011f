"""A task as its file defines it (docs/your_task.md), with every call checked."""

import functools
import importlib
import math
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType, UnionType
from typing import TYPE_CHECKING

from common.environment import OUTCOMES
from common.errors import UserError
from common.parallel import call_once, gather, gather_rows, own_part
from common.trajectory import Trajectory

from harness.base.checks import is_finite, local_path, parse_numbers
from harness.base.config import RunConfig, shown
from harness.base.hub import find_source
from harness.base.terminal import describe_error, say, short
from harness.data.answer_judge import PREFERENCE, Judge
from harness.data.rows import Row, find_problem, placed
from harness.data.schemas import read_as

if TYPE_CHECKING:
    from harness.data.reward_functions import RewardFunctions

BUNDLED = Path(__file__).resolve().parents[2] / "tasks"
# Names of other metrics, or their beginnings, which a description cannot use.
TAKEN = {"length", "length_right", "length_wrong", "turns", "stopped", "truncated", "called", "unaided"}
TAKEN |= {"failed_searches"} | {f"{outcome}_calls" for outcome in OUTCOMES}
TAKEN_PREFIXES = ("accuracy", "reward_", "pass@")
PATIENCE = 10  # seconds that a call of a task's function takes before the user is told


class TaskError(UserError):
    """A fault in a task's functions; after a correction, the interrupted run can be resumed."""


class Task:
    """The functions and constants of a task's file; a UserError names a missing or unusable one.

    `weights` are NAME=NUMBER, as in `--reward-weight`; `more_weights` belong to components that the experiment adds.
    """

    def __init__(
        self,
        module: ModuleType,
        name: str,
        weights: tuple[str, ...] = (),
        more_weights: dict[str, float] | None = None,
    ):
        self._name, self._module = name, module
        for function, arguments in (("messages", "row, system_prompt"), ("reward", "row, text")):
            if not callable(getattr(module, function, None)):
                raise UserError(f"{self}: it defines no function {function}({arguments})")
        self.weights = self._read_weights(weights, more_weights or {})
        self._components = module.REWARD_WEIGHTS.keys()  # those that the task's `reward` returns
        self.system_prompt: str = self._constant("SYSTEM_PROMPT", str, "")
        self.fields: dict[str, type | tuple[type, ...]] = self._constant("FIELDS", dict, {})
        self.kind_fields: tuple[str, ...] = self._constant("KIND_FIELDS", tuple, ())
        self.path = Path(module.__file__)
        self.train_data = find_source(getattr(module, "TRAIN_DATA", None), self.path, f"{self}: TRAIN_DATA")
        self.eval_data = find_source(getattr(module, "EVAL_DATA", None), self.path, f"{self}: EVAL_DATA")
        self.data, self.held_out_data = None, None  # the files in use, set by `load_task` like the rows
        self.tools: list[dict] | None = None  # JSON schemas that every prompt presents
        self.judge: Judge | None = None  # a reward model, whose scores are another component
        self.functions: RewardFunctions | None = None  # in TRL's form; their values are further components
        self.asked_with = ""  # the system prompt of the questions that these functions see
        self._has_unpaid = False  # whether a completion had no reward with a weight, which is said once
        self.train_rows: list[Row] = []
        self.eval_rows: list[Row] = []
        self.eval_sets: dict[str, list[Row]] = {}  # further held-out questions, by name
        self.eval_sources: dict[str, str] = {}  # and their sources
        self.fits_context = False  # whether all rows are known to fit
        self.fault: TaskError | None = None  # the first number that is not finite
        self._described: set[str] | None = None  # the names that `describe` returned the first time
        self._running: tuple[float, str, Row] | None = None  # start, name and row of the running function
        self._watcher: threading.Thread | None = None

    def __str__(self) -> str:
        return f"--task {self._name}"

    def messages(self, row: dict, system_prompt: str = "") -> list[dict]:
        """The conversation that asks the question of a row."""
        what = "a list of role and content"
        found = self._call("messages", row, system_prompt, kind=list, what=what)
        turns = [turn if isinstance(turn, dict) else {} for turn in found] or [{}]
        if not all(isinstance(turn.get(key), str) for turn in turns for key in ("role", "content")):
            raise self._error("messages", row, f"must return {what}, not {short(found)}")
        return found

    def reward(self, row: dict, text: str) -> dict[str, float]:
        """The task's own reward components of a completion; a total is the sum of all, weighted by `weights`."""
        found = self._call("reward", row, text, kind=dict, what="a dict of components")
        for component in found.keys() ^ self._components:
            problem = f"lacks the component {component!r} of REWARD_WEIGHTS"
            if component in found:
                problem = f"has a component {component!r} without a weight: give it one in REWARD_WEIGHTS (0: log it)"
            raise self._error("reward", row, problem)
        rewards = {name: self._number("reward", row, name, found[name]) for name in self._components}
        for component, value in rewards.items():
            if self.weights[component] and not math.isfinite(value) and self.fault is None:
                problem = f"gives {component!r} the value {value}"  # the run counts the updates that it skips
                self.fault = self._error("reward", row, problem)
                self._tell("reward", row, f"{problem}; an update with it is skipped")
        return rewards

    def prepare(self, rows: list[dict], texts: list[str]) -> None:
        """Announce completions that are about to be rewarded, if the task defines `prepare`."""
        if rows and hasattr(self._module, "prepare"):
            self._call("prepare", rows, texts)

    def reward_all(self, rows: list[Row], texts: list[str], completions: list[Trajectory]) -> list[dict[str, float]]:
        """All reward components of each completion, in order: the task's own, and those of `reward_together`."""
        self.prepare(rows, texts)  # lets slow judging run in parallel; most tasks do nothing here
        own = [self.reward(row, text) for row, text in zip(rows, texts, strict=True)]
        together = self.reward_together(rows, texts, completions)
        found = [rewards | more for rewards, more in zip(own, together, strict=True)]
        unpaid = [row for row, rewards in zip(rows, found, strict=True) if not any(map(self.weights.get, rewards))]
        if self.functions is not None and unpaid and not self._has_unpaid:
            self._has_unpaid = True
            say(f"{self}: every reward of {unpaid[0].place} that has a weight is None, and counts as 0", sys.stderr)
        return found

    def reward_together(
        self, rows: list[Row], texts: list[str], completions: list[Trajectory]
    ) -> list[dict[str, float]]:
        """The components of the judge and of `--reward-functions`, which get all completions at once, in order.

        The functions see what the policy was asked; the judge sees no system turn, which is meant for the policy. A
        component that does not apply to a completion is left out.
        """
        rewards: list[dict[str, float]] = [{} for _ in rows]
        if self.judge is not None:
            asked = [self.messages(row) for row in rows]
            scores = call_once(lambda: self.judge.score(asked, texts) if rows else [])
            rewards = [{PREFERENCE: score} for score in scores]
        if self.functions is not None:
            found = self._call_functions(rows, texts, completions)
            rewards = [one | other for one, other in zip(rewards, found, strict=True)]
        return rewards

    def _call_functions(self, rows: list[Row], texts: list[str], completions: list[Trajectory]) -> list[dict]:
        """The values of the reward functions; if a group is divided among ranks, they get the groups of all ranks."""
        given = list(zip(rows, texts, [completion.completion_ids for completion in completions], strict=True))
        is_divided = any(gather(bool(completions) and completions[0].completion_index > 0))
        given = gather_rows(given) if is_divided else given

        def call() -> list[tuple[dict[str, float], dict[str, object]]]:
            if not given:
                return []
            asked, said, ids = map(list, zip(*given, strict=True))
            return self.functions.score([self.messages(row, self.asked_with) for row in asked], asked, said, ids)

        found = call_once(call, for_all=is_divided)
        own = own_part(found) if is_divided else found
        for completion, (_, logged) in zip(completions, own, strict=True):
            completion.logged = logged
        return [values for values, _ in own]

    def note(self) -> str | None:
        """A message for the user before a run, if the task defines `note`."""
        return self._call("note", kind=str | None, what="a str or None") if hasattr(self._module, "note") else None

    def describe(self, row: dict, text: str) -> dict[str, float]:
        """Other measures of a completion; empty if the task defines no `describe`."""
        if not hasattr(self._module, "describe"):
            return {}
        found = self._call("describe", row, text, kind=dict, what="a dict of numbers")
        self._described = set(found) if self._described is None else self._described
        if differing := set(found) ^ self._described:
            problem = f"must return the same names for every completion; it differs in {', '.join(sorted(differing))}"
            raise self._error("describe", row, problem)
        if wrong := [name for name in found if name in TAKEN or name.startswith(TAKEN_PREFIXES)]:
            raise self._error("describe", row, f"cannot use the name {wrong[0]!r}")
        return {name: self._number("describe", row, name, value) for name, value in found.items()}

    def solution(self, row: dict) -> str | None:
        """A completion that earns the reward of a row; None if the task has no `solution`, or returns none."""
        known = hasattr(self._module, "solution")
        return self._call("solution", row, kind=str | None, what="a str") if known else None

    def solves(self, row: dict) -> bool:
        """Whether the solution of a row is right."""
        text = self.solution(row)
        return text is not None and self.reward(row, text).get("correct") == 1

    @property
    def is_bundled(self) -> bool:
        return self.path.parent == BUNDLED

    @property
    def has_vote(self) -> bool:
        return hasattr(self._module, "vote")

    def vote(self, row: dict, text: str) -> str | None:
        """The answer in a completion, in one spelling, for tasks that define `vote`; None: no answer."""
        return self._call("vote", row, text, kind=str | None, what="a str or None")

    def tally(self, row: dict, text: str) -> dict[str, list[bool]]:
        """Verdicts on a completion, by name; an evaluation reports their shares over all questions."""
        known = hasattr(self._module, "tally")
        return self._call("tally", row, text, kind=dict, what="a dict of lists") if known else {}

    def right_answer(self, row: dict) -> object:
        """The answer to a row, for people: the answer in its solution or, without a solution, its field `answer`.

        The answer is read by `vote`, otherwise from the only `<answer>`; any other text is shown as it is.
        """
        text = self.solution(row)
        if text is None:
            return row.get("answer")
        given = self.vote(row, text) if self.has_vote else import_named("arithmetic").given_answer(text)
        return text if given is None else given

    @property
    def paid(self) -> list[str]:
        """The components with a weight, without those that the experiment adds."""
        functions = self.functions.names if self.functions else []
        return [name for name in (*self._components, PREFERENCE, *functions) if self.weights.get(name)]

    def total_reward(self, rewards: dict[str, float]) -> float:
        """The weighted sum of a completion's reward components."""
        return sum(weight * rewards.get(component, 0.0) for component, weight in self.weights.items() if weight)

    def try_out(self, row: dict) -> None:
        """Reward and describe an empty completion, so that a task that cannot work is refused early."""
        self.reward(row, "")
        self.describe(row, "")
        self.fault = None

    def question(self, row: dict) -> str:
        """The question of a row, for people: the last turn."""
        return self.messages(row)[-1]["content"]

    def kind(self, row: dict) -> tuple:
        """The kind of question in a row."""
        return tuple(repr(row.get(field)) for field in self.kind_fields)

    def _call(self, function: str, *arguments, kind: type | UnionType = object, what: str = ""):
        """Call a function of the file; its result must have the type `kind`, which `what` describes in words."""
        first = arguments[0] if arguments else {}
        row = first if isinstance(first, dict) else first[0]  # `prepare` gets many rows
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()
        self._running = (time.monotonic(), function, row)
        try:
            found = getattr(self._module, function)(*arguments)
        except (Exception, SystemExit) as error:  # user code can raise anything
            raise self._error(function, row, f"raised {describe_error(error, self._module)}") from error
        finally:
            self._running = None
        if not isinstance(found, kind):
            raise self._error(function, row, f"must return {what}, not {short(found)}")
        return found

    def _watch(self) -> None:
        """Tell the user once about each call that takes long; uses a thread, because user code may use SIGALRM."""
        told = None
        while True:
            running = self._running
            if running is not None and running is not told and time.monotonic() - running[0] > PATIENCE:
                told = running
                self._tell(*running[1:], f"has been running for {PATIENCE} s; Ctrl-C twice ends it")
            time.sleep(min(0.5, PATIENCE / 5))

    def _number(self, function: str, row: dict, name: str, value) -> float:
        if not isinstance(value, str):
            with suppress(TypeError, ValueError):
                return float(value)
        raise self._error(function, row, f"gives {name!r} the value {short(value)}, which is not a number")

    def _tell(self, function: str, row: dict, problem: str) -> None:
        say(str(self._error(function, row, problem)), sys.stderr, anyway=True)  # other processes cannot know this

    def _error(self, function: str, row: dict, problem: str) -> TaskError:
        return TaskError(f"{self}: {function} of {getattr(row, 'place', 'a row')} {problem}")

    def _read_weights(self, given: tuple[str, ...], more_weights: dict[str, float]) -> dict[str, float]:
        """The weights of all reward components: the task's, then the experiment's, then those `given` by the user."""
        own = getattr(self._module, "REWARD_WEIGHTS", None)
        if not isinstance(own, dict) or not own or not all(map(is_finite, own.values())):
            raise UserError(f"{self}: REWARD_WEIGHTS must be a dict of a number for each component, not {short(own)}")
        if taken := own.keys() & {"total", *more_weights}:
            raise UserError(f"{self}: the name {min(taken)!r} is taken: give the reward component another one")
        weights = {component: float(weight) for component, weight in (own | more_weights).items()}
        for component, weight in parse_numbers("--reward-weight", given).items():
            if component not in weights:
                raise UserError(f"--reward-weight {component}: {self} has the components {', '.join(weights)}")
            weights[component] = weight
        return weights

    def _constant(self, name: str, wanted: type, default):
        value = getattr(self._module, name, default)
        if not isinstance(value, wanted):
            raise UserError(f"{self}: {name} must be a {wanted.__name__}, not {short(value)}")
        return value


def import_task(config: RunConfig, more_weights: dict[str, float] | None = None) -> Task:
    """The task that `--task` names, with its weights but without its rows."""
    task = task_of(config.task, config.reward_weight, more_weights)
    if not any(task.weights.values()):
        judge = "give a --reward-model, or raise one with --reward-weight"
        raise UserError(f"{task}: the weights of all components are 0, so that nothing would be learned: {judge}")
    return task


def task_of(name: str, weights: tuple[str, ...] = (), more_weights: dict[str, float] | None = None) -> Task:
    """The task with this name or path; arguments and errors are the same as for `Task`."""
    return Task(import_named(name), shown(name), weights, more_weights)


def bundled_tasks() -> list[str]:
    """The names of the task files; a package among them is a part of a task, or a program."""
    return sorted(path.stem for path in BUNDLED.glob("*.py") if path.stem != "__init__")


def import_named(name: str) -> ModuleType:
    """The module that `--task` names: a bundled one, or a user's file."""
    bundled = bundled_tasks()
    if name in bundled:
        return importlib.import_module(f"tasks.{name}")
    path = local_path(name, "--task")
    if not path.is_file():
        raise UserError(f"--task {name}: there is no such file, and the bundled tasks are: {', '.join(bundled)}")
    return _import_once(path.resolve(), path.stat().st_mtime_ns, name)


@functools.cache  # the command line and the run both ask for this file
def _import_once(path: Path, _changed_at: int, name: str) -> ModuleType:
    return import_file(path, "task", name)[0]


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


def suggest_task(row: Row, name: str) -> str:
    """The end of a sentence about a row that the bundled task `name` cannot use: the tasks that can judge it, if any.

    Tasks whose fields the row has come before tasks for which it has to be read by another schema.
    """
    bundled = bundled_tasks()
    fitting: dict[bool, list[str]] = {True: [], False: []}
    for other in map(task_of, bundled if name in bundled else ()):  # a user's own task is not a mistake
        with suppress(UserError):  # its functions cannot handle such a row
            read = placed(row, row.place)
            is_read = read_as(read, other.fields)[0] is None
            if is_read and other.solves(read) and unpaid_form(other, read) is None:
                fitting[find_problem(row, other.fields) is None].append(str(other))
    found = fitting[True] or fitting[False]
    return f"; rows like this one belong to {' or '.join(found)}" if found else ""


def unpaid_form(task: Task, row: Row) -> str | None:
    """The right answer in a form that the prompt asks for or that LaTeX has, if the task does not pay for it."""
    asked = " ".join(message["content"] for message in task.messages(row))
    gold = str(task.right_answer(row))
    forms = [f"\\boxed{{{gold}}}"] if "\\boxed" in asked or "\\" in gold else []
    forms += [f"#### {gold}"] if "####" in asked else []
    return next((form for form in forms if task.reward(row, form).get("correct") == 0), None)
