"""A task as its file defines it, with every call checked: what a user's file gets wrong is told in one sentence.

The README's section "Your own task" lists what such a file defines.
"""

import math
import numbers
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from common.environment import OUTCOMES
from common.errors import UserError

from common.plumbing.checks import is_finite, is_text, parse_numbers
from common.plumbing.hub import find_source
from common.plumbing.signals import call_after
from common.plumbing.terminal import describe_error, say, short

# Names of other metrics, and beginnings of such names, which a description cannot have.
TAKEN = {"length", "length_right", "length_wrong", "turns", "stopped", "truncated", "called", "unaided"}
TAKEN |= {"failed_searches"} | {f"{outcome}_calls" for outcome in OUTCOMES}
TAKEN_PREFIXES = ("accuracy", "reward_", "pass@")
PATIENCE = 10  # seconds that a call of a task's function may take before the user is told


class TaskError(UserError):
    """A fault of a task's functions; a run that it ends can be resumed once it is corrected."""


class Row(dict):
    """A row of data that knows where it is from, for error messages, and its question once the task has asked it."""

    place, question = "a row", ""  # the place is file and line


class Task:
    """The functions and constants of a task's file.

    Args:
        module: the file, imported.
        name: what the user calls it.
        weights: NAME=NUMBER, as in `--reward-weight`.
        more_weights: of components that the experiment gives; the task's functions know nothing of them.

    Raises:
        UserError: the file lacks a function or a constant, or one of them cannot be used.
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
        self._components, self.weights = _reward_weights(str(self), module, weights, more_weights or {})
        self.system_prompt: str = self._constant("SYSTEM_PROMPT", str, "")
        self.fields: dict[str, type | tuple[type, ...]] = self._constant("FIELDS", dict, {})
        for field, wanted in self.fields.items():
            if not all(
                isinstance(kind, type) and kind is not Any
                for kind in (wanted if isinstance(wanted, tuple) else (wanted,))
            ):
                raise UserError(f"{self}: FIELDS must name a type, or a tuple of types, for {field!r}")
        self.kind_fields: tuple[str, ...] = self._constant("KIND_FIELDS", tuple, ())
        if not all(isinstance(name, str) for name in self.kind_fields):
            raise UserError(f"{self}: KIND_FIELDS must name fields, not {short(self.kind_fields)}")
        self.path = Path(module.__file__)
        self.train_data, self.eval_data = (
            find_source(getattr(module, name, None), self.path, f"{self}: {name}")
            for name in ("TRAIN_DATA", "EVAL_DATA")
        )
        self.data, self.held_out_data = None, None  # the files that are used, filled by `load_task` like the rows
        self.tools: list[dict] | None = None  # schemas of those that every prompt presents
        self.train_rows: list[Row] = []
        self.eval_rows: list[Row] = []
        self.fits_context = False  # whether it is known that all rows do
        self._has_warned = False  # of a number that is not finite
        self._described: set[str] | None = None  # the names that `describe` gave the first time

    def __str__(self) -> str:
        return f"--task {self._name}"

    def messages(self, row: dict, system_prompt: str = "") -> list[dict]:
        """The conversation that asks the question of a row."""
        found = self._call("messages", row, system_prompt)
        is_fine = isinstance(found, list) and found and all(
            isinstance(turn, dict) and all(is_text(turn.get(key)) for key in ("role", "content"))
            for turn in found
        )  # fmt: skip
        if not is_fine:
            raise self._error("messages", row, f"must return a list of role and content, not {short(found)}")
        return found

    def reward(self, row: dict, text: str) -> dict[str, float]:
        """The reward components of a completion; a total is their sum, weighted by `weights`."""
        found = self._call("reward", row, text)
        if not isinstance(found, dict):
            raise self._error("reward", row, f"must return a dict of components, not {short(found)}")
        for component in set(self._components) - found.keys():
            raise self._error("reward", row, f"lacks the component {component!r} of REWARD_WEIGHTS")
        for component in found.keys() - set(self._components):
            raise self._error(
                "reward",
                row,
                f"has a component {component!r} without a weight: give it one in REWARD_WEIGHTS (0: log it)",
            )
        rewards = {name: self._number("reward", row, name, found[name]) for name in self._components}
        for component, value in rewards.items():
            if self.weights[component] and not math.isfinite(value) and not self._has_warned:
                self._has_warned = True  # one sentence is enough; the run counts the updates that it skips
                self._tell("reward", row, f"gives {component!r} the value {value}; an update with it is skipped")
        return rewards

    def prepare(self, rows: list[dict], texts: list[str]) -> None:
        """Tell the task of completions that it will be asked to reward, if it defines `prepare`."""
        if rows and hasattr(self._module, "prepare"):
            self._call("prepare", rows, texts)

    def note(self) -> str | None:
        """What the task wants the user to know before a run, if it defines `note`."""
        if not hasattr(self._module, "note"):
            return None
        found = self._call("note")
        if found is not None and not isinstance(found, str):
            raise self._error("note", {}, f"must return a str or None, not {short(found)}")
        return found

    def describe(self, row: dict, text: str) -> dict[str, float]:
        """What else the task measures of a completion; empty if it defines no `describe`."""
        if not hasattr(self._module, "describe"):
            return {}
        found = self._call("describe", row, text)
        if not isinstance(found, dict):
            raise self._error("describe", row, f"must return a dict of numbers, not {short(found)}")
        self._described = set(found) if self._described is None else self._described
        if set(found) != self._described:
            names = ", ".join(sorted(map(str, set(found) ^ self._described)))
            raise self._error(
                "describe", row, f"must return the same names for every completion; it differs in {names}"
            )
        if wrong := [name for name in found if not is_text(name) or name in TAKEN or name.startswith(TAKEN_PREFIXES)]:
            raise self._error("describe", row, f"cannot use the name {wrong[0]!r}")
        return {name: self._number("describe", row, name, value) for name, value in found.items()}

    def solution(self, row: dict) -> str | None:
        """A completion that earns the reward of a row; None if the task defines no `solution`."""
        if not hasattr(self._module, "solution"):
            return None
        found = self._call("solution", row)
        if not isinstance(found, str):
            raise self._error("solution", row, f"must return a str, not {short(found)}")
        return found

    @property
    def has_vote(self) -> bool:
        return hasattr(self._module, "vote")

    def vote(self, row: dict, text: str) -> str | None:
        """What a completion answers, in one spelling, for tasks that define `vote`; None: nothing."""
        found = self._call("vote", row, text)
        if found is not None and not isinstance(found, str):
            raise self._error("vote", row, f"must return a str or None, not {short(found)}")
        return found

    def right_answer(self, row: dict) -> object:
        """The answer to a row, for people: what its solution answers, if the task can tell, else its field `answer`."""
        text = self.solution(row)
        voted = self.vote(row, text) if text is not None and self.has_vote else None
        return row.get("answer", text) if voted is None else voted

    def total_reward(self, rewards: dict[str, float]) -> float:
        """The weighted sum of a completion's reward components."""
        return sum(weight * rewards.get(component, 0.0) for component, weight in self.weights.items() if weight)

    def try_out(self, row: dict) -> None:
        """Reward and describe an empty completion, so that a task that cannot work is refused early."""
        self.reward(row, "")
        self.describe(row, "")
        self._has_warned = False

    def question(self, row: dict) -> str:
        """What a row asks, for people: the last turn of its conversation."""
        return self.messages(row)[-1]["content"]

    def kind(self, row: dict) -> tuple:
        """What kind of question a row asks."""
        return tuple(repr(row.get(field)) for field in self.kind_fields)

    def _call(self, function: str, *arguments):
        first = arguments[0] if arguments else {}
        row = first if isinstance(first, dict) else first[0]  # `prepare` is told of many
        slow = f"has been running for {PATIENCE} s; Ctrl-C twice ends it"
        try:
            with call_after(PATIENCE, lambda: self._tell(function, row, slow)):
                return getattr(self._module, function)(*arguments)
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            raise self._error(function, row, f"raised {describe_error(error, self._module)}") from error

    def _number(self, function: str, row: dict, name: str, value) -> float:
        if not isinstance(value, numbers.Real) and not hasattr(value, "item"):
            raise self._error(function, row, f"gives {name!r} the value {short(value)}, which is not a number")
        try:
            return float(value)
        except Exception:  # of the value's own class
            raise self._error(function, row, f"gives {name!r} a value that is not one number: {short(value)}") from None

    def _tell(self, function: str, row: dict, problem: str) -> None:
        say(str(self._error(function, row, problem)), sys.stderr, anyway=True)  # another process does not know it

    def _error(self, function: str, row: dict, problem: str) -> TaskError:
        return TaskError(f"{self}: {function} of {getattr(row, 'place', 'a row')} {problem}")

    def _constant(self, name: str, wanted: type, default):
        value = getattr(self._module, name, default)
        if not isinstance(value, wanted):
            raise UserError(f"{self}: {name} must be a {wanted.__name__}, not {short(value)}")
        return value


def _reward_weights(
    name: str, module: ModuleType, given: tuple[str, ...], more_weights: dict[str, float]
) -> tuple[tuple[str, ...], dict[str, float]]:
    """The reward components that the task itself gives, and the weights of all.

    Args:
        name: what the user calls the task.
        given: NAME=NUMBER, as in `--reward-weight`.
        more_weights: of components that the experiment gives.

    Raises:
        UserError: naming the component.
    """
    own = getattr(module, "REWARD_WEIGHTS", None)
    if not isinstance(own, dict) or not own or not all(is_text(k) and is_finite(v) for k, v in own.items()):
        raise UserError(f"{name}: REWARD_WEIGHTS must be a dict of a number for each component, not {short(own)}")
    if "total" in own:
        raise UserError(f"{name}: no component can be called 'total', which is their weighted sum")
    if taken := own.keys() & more_weights.keys():
        raise UserError(f"{name}: the experiment itself rewards {min(taken)!r}: give the task's component another name")
    weights = {component: float(weight) for component, weight in (own | more_weights).items()}
    for component, weight in parse_numbers("--reward-weight", given).items():
        if component not in weights:
            raise UserError(f"--reward-weight {component}: {name} has the components {', '.join(weights)}")
        weights[component] = weight
    if not any(weights.values()):
        raise UserError(f"{name}: the weights of all components are 0, so that nothing would be learned")
    return tuple(own), weights
