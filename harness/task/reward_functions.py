"""`--reward-functions`: rewards in the form of TRL, `f(prompts, completions, **columns) -> list[float]`, in a file.

A function is called once for many completions, with the arguments that it names; with `**columns` it gets all of these:

- `prompts` and `completions`: messages, or texts for a function that reads no messages; `completion_ids`;
- `trainer_state`, with `global_step` (completed steps) and `max_steps`; `log_extra` and `log_metric`;
- the fields of the data.
"""

import asyncio
import copy
import dis
import functools
import gc
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from common.errors import UserError

from harness.base.checks import is_finite, local_path
from harness.base.terminal import describe_error, printable, say, short
from harness.data.rows import Row
from harness.task.task_file import TaskError, import_file

Function = Callable[..., Any]
Logged = list[dict[str, object]]

ANSWERS = {"completions", "completion_ids"}  # a function with one of these parameters is a reward
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
NOT_COLUMNS = {"prompt", "completion", *GIVEN}  # of the data
_ANY = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
# Parameters of functions of other forms, e.g. verl's compute_score(data_source, solution_str, ground_truth, extra_info)
_TEXTS = {"solution_str", "response", "completion", "output", "text", "prediction", "answer_text"}
_GOLDS = {"ground_truth", "gold", "answer", "solution", "label", "target", "reference", "expected"}

# Completions on which reward functions are tried: empty, short, long, with tags, digits and the row's own answer
INVENTED = (
    "",
    "ANSWER",
    "<think>\nfirst 1 + 2 = 3\n</think>\n<answer>\nANSWER\n</answer>",
    "The answer is $\\boxed{ANSWER}$.",
    "<think>" + "but wait, " * 40,
    "3 * 4 = 12\n#### ANSWER",
    "<answer>ANSWER</answer>",
    '```json\n{"answer": "ANSWER"}\n```',
)


class Batch(NamedTuple):
    """Completions that are rewarded together: one entry each, those of a group adjacent."""

    prompts: list[list[dict]]
    rows: list[Row]
    texts: list[str]
    ids: list[list[int]]  # of the sampled tokens


class _FaultError(Exception):
    """What is wrong with a function, and the row that shows it; None: it is not known which."""

    def __init__(self, row: Row | None, problem: str):
        self.row, self.problem = row, problem


class RewardFunctions:
    """The rewards of a file by name; each is a component.

    They are the file's `REWARDS`, a list of functions or of their names. Without it: all callables with a public name
    and a parameter `completions` or `completion_ids`, but no class, no second name, and none that another one calls.
    """

    def __init__(self, name: str):
        self._flag = f"--reward-functions {name}"
        path = local_path(name, "--reward-functions")
        if not path.is_file():
            raise UserError(f"{self._flag}: there is no such file")
        self._module = import_file(path.resolve(), "reward-functions", name)[0]
        self._functions = self._listed() if hasattr(self._module, "REWARDS") else self._found()
        self._parameters = {
            name: _parameters(function, self._module) or _signature(function)
            for name, function in self._functions.items()
        }
        self._forms: dict[str, str] = {}  # "messages" or "texts": what a function reads, as soon as it is known
        self._loop: asyncio.AbstractEventLoop | None = None  # one for all calls: a session or a lock belongs to a loop
        self.columns: list[str] = []  # the fields of all rows: also given in a batch whose rows lack them
        self.state = SimpleNamespace(global_step=0, max_steps=1)

    @property
    def names(self) -> list[str]:
        return list(self._functions)

    def trial(
        self, rows: list[Row], group_size: int, right_answer: Callable[[Row], object]
    ) -> tuple[list[Row], list[str]]:
        """Some of the rows, each once for every completion of its group, and an invented completion for each."""
        count = min(max(2, -(-len(INVENTED) // group_size)), len(rows))  # of groups
        rows = [rows[index * len(rows) // count] for index in range(count) for _ in range(group_size)]
        answers = [str(right_answer(row)) for row in rows]
        return rows, [INVENTED[index % len(INVENTED)].replace("ANSWER", answer) for index, answer in enumerate(answers)]

    def check(self, prompts: list[list[dict]], rows: list[Row], texts: list[str]) -> None:
        """Refuse parameters that nothing can fill, and call each function on invented completions."""
        given = [*GIVEN, *(key for key in self.columns if key not in NOT_COLUMNS)]
        for name, parameters in self._parameters.items():
            needed = (key for key, one in parameters.items() if one.default is one.empty and one.kind not in _ANY)
            if missing := [key for key in needed if key not in given]:
                raise UserError(
                    f"{self._flag}: {name} asks for {' and '.join(missing)}, but there are only "
                    f"{printable(', '.join(given), 200)}: rename the parameter or the field of the data, give it a "
                    "default, or leave the function out (REWARDS = [...] in the file lists the others)"
                )
            self._call(name, Batch(prompts, rows, texts, [[*text.encode()] for text in texts]), is_trial=True)

    def score(
        self, prompts: list[list[dict]], rows: list[Row], texts: list[str], ids: list[list[int]]
    ) -> list[tuple[dict[str, float], dict[str, object]]]:
        """The components of each completion, and what the functions have logged about it: in order, and by name.

        A component that is None does not apply, and is left out, as in TRL. A TaskError names the function and the row.
        """
        rewards: list[dict[str, float]] = [{} for _ in rows]
        logged: Logged = [{} for _ in rows]
        for name in self._functions:
            values, entries = self._call(name, Batch(prompts, rows, texts, ids))
            for index, value in enumerate(values):
                rewards[index] |= {} if value is None else {name: value}
                logged[index] |= entries[index]
        return list(zip(rewards, logged, strict=True))

    def _call(self, name: str, batch: Batch, is_trial: bool = False) -> tuple[list[float | None], Logged]:
        """Call a function with messages, or with texts from now on, if it opens no message and works with texts.

        If it does not even look at a conversation (or catches the error of looking), a trial compares both forms.
        """
        form, found, fault = self._forms.get(name), None, None
        seen: set[str] = set()
        try:
            found = self._run(name, batch, form, seen)
        except _FaultError as first:
            fault = first
        other = "messages" if form == "texts" else "texts"
        if form is None and "message" in seen:
            self._forms[name] = "messages"
        elif form != "messages" and (fault or (form is None and (seen or is_trial))):
            try:
                again = self._run(name, batch, other)
                if fault or seen or again[0] != found[0]:
                    found, fault = again, None
                    self._forms[name] = other
                    form = form or "messages"
                    say(f"{self._flag}: {name} gets prompts and completions as {other}: it cannot read {form}")
            except _FaultError as second:
                if fault and fault.problem != second.problem:
                    fault.problem += f"; with {other} it {second.problem}"
        if fault:
            try:
                for single in zip(*batch, strict=True) if fault.row is None else ():  # which row is it?
                    self._run(name, Batch(*([entry] for entry in single)), form)
            except _FaultError as of_single:
                fault.row = of_single.row or single[1]
            place = (fault.row or batch.rows[0]).place
            raise TaskError(f"{self._flag}: {printable(name, 60)} of {place} {fault.problem}") from fault
        return found

    def _run(
        self, name: str, batch: Batch, form: str | None, seen: set[str] | None = None
    ) -> tuple[list[float | None], Logged]:
        """Call a function with what it names; `seen` learns how it looks at the messages, if the form is not known."""
        prompts, rows, texts, ids = batch
        logged: Logged = [{} for _ in rows]
        keys = dict.fromkeys([*self.columns, *(key for row in rows for key in row)])
        given = {key: copy.deepcopy([row.get(key) for row in rows]) for key in keys if key not in NOT_COLUMNS}
        given |= {"completion_ids": [[*row] for row in ids], "trainer_state": copy.copy(self.state)}
        given |= {"log_extra": functools.partial(_log, logged), "log_metric": functools.partial(_log_all, logged)}
        if form == "texts":
            given |= {"prompts": [messages[-1]["content"] for messages in prompts], "completions": [*texts]}
        else:
            watch = list if form else _watcher(set() if seen is None else seen)
            given["prompts"] = [watch(map(dict, messages)) for messages in prompts]
            given["completions"] = [watch([{"role": "assistant", "content": text}]) for text in texts]
        parameters = self._parameters[name]
        if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            given = {key: value for key, value in given.items() if key in parameters}
        try:
            values = self._functions[name](**given)
            values = self._wait(values) if inspect.isawaitable(values) else values
            if isinstance(values, str | Mapping | set) or not isinstance(values, Iterable):
                raise TypeError(f"the result must be a list of rewards, not {short(values)}")
            values = [value.item() if hasattr(value, "item") else value for value in values]
        except (Exception, SystemExit) as error:  # user code can raise anything
            row = rows[0] if len(rows) == 1 else None
            raise _FaultError(row, f"raised {describe_error(error, self._module)}") from error
        if len(values) != len(rows):
            raise _FaultError(rows[0], f"returned {len(values)} rewards for {len(rows)} completions")
        for row, value in zip(rows, values, strict=True):
            if value is not None and not is_finite(value):
                raise _FaultError(row, f"gave {short(value)}, which is not a finite number (None: it does not apply)")
        return [None if value is None else float(value) for value in values], logged

    def _wait(self, values: Awaitable) -> object:
        """The result of an async function, of a loop in a thread of its own: a notebook has one in this thread."""

        async def result() -> object:
            return await values

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(result(), self._loop).result()

    def _listed(self) -> dict[str, Function]:
        """The functions in `REWARDS`, by the names that they have in the file, or else by their own."""
        listed, found = self._module.REWARDS, {}
        for entry in listed if isinstance(listed, list | tuple) else [listed]:
            function = getattr(self._module, entry, None) if isinstance(entry, str) else entry
            names = [name for name, value in vars(self._module).items() if value is function]
            inner = function
            while isinstance(inner, functools.partial):
                inner = inner.func
            name = (names or [getattr(inner, "__name__", type(inner).__name__)])[0]
            if not callable(function) or isinstance(function, type) or not name.isidentifier() or name in found:
                reason = f": the name {name} is given twice" if name in found else ""
                raise UserError(
                    f"{self._flag}: REWARDS must list functions that have a name in the file, or their names, not "
                    f"{short(entry)}{reason}"
                )
            found[name] = function
        if not found:
            raise UserError(f"{self._flag}: REWARDS lists no function")
        return found

    def _found(self) -> dict[str, Function]:
        """What looks like a reward; the user is told of functions that others call."""
        found: dict[str, Function] = {}
        for name, function in vars(self._module).items():
            is_new = all(function is not other for other in found.values())
            if not name.startswith("_") and is_new and _parameters(function, self._module):
                found[name] = function
        callers = {id(part): name for name, function in found.items() for part in _reached(function, self._module)}
        helpers = {name: callers[id(function)] for name, function in found.items() if id(function) in callers}
        rewards = {name: function for name, function in found.items() if name not in helpers} or found
        if not rewards:
            raise UserError(f"{self._flag}: it has no function with a parameter completions{self._others()}")
        if len(rewards) < len(found):
            left_out = ", ".join(f"{name} (called by {caller})" for name, caller in helpers.items())
            say(f"{self._flag}: the rewards are {', '.join(rewards)}, without {left_out}; REWARDS = [...] says others")
        return rewards

    def _others(self) -> str:
        """What a file without a reward has, and the two lines that make one of a function of another form."""
        own = {
            name: _signature(function)
            for name, function in vars(self._module).items()
            if inspect.isfunction(function) and function.__globals__ is vars(self._module)
        }
        if not own:
            return ", and a name without _"
        name, parameters = max(own.items(), key=lambda item: len((_TEXTS | _GOLDS) & item[1].keys()))
        values = {key: 'c[0]["content"]' if key in _TEXTS else "a" if key in _GOLDS else "None" for key in parameters}
        call = ", ".join(f"{key}={value}" for key, value in values.items() if parameters[key].kind not in _ANY)
        call = call if _TEXTS & parameters.keys() else 'c[0]["content"], a'
        forms = ", ".join(f"{key}({', '.join(found)})" for key, found in own.items())
        return (
            f", but {printable(forms, 200)}; two more lines can adapt it:\n"
            f"def adapted(completions, answer, **columns):\n"
            f"    return [{name}({call}) for c, a in zip(completions, answer)]"
        )


def _log(logged: Logged, column: str, values: Iterable) -> None:
    """TRL's `log_extra`: one value per completion."""
    for entry, value in zip(logged, values, strict=True):
        with suppress(AttributeError, ValueError, RuntimeError):
            value = value.item()  # of a tensor or an array
        entry[column] = value if isinstance(value, int | float | None) else str(value)


def _log_all(logged: Logged, name: str, value: float) -> None:
    """TRL's `log_metric`: one value for all completions of the call."""
    _log(logged, name, [value] * len(logged))


def _watcher(seen: set[str]) -> Callable[[Iterable[dict]], list[dict]]:
    """Makes conversations that note in `seen` when code looks at a "conversation", or opens a "message" of it."""

    def watched(kind: type, what: dict[str, str]) -> type:
        def noting(name: str, method: Callable) -> Callable:
            def noted(self, *arguments):
                seen.add(name)
                return method(self, *arguments)

            return noted

        methods = {method: noting(name, getattr(kind, method)) for name in what for method in what[name].split()}
        plain = {"__reduce_ex__": lambda self, _: (kind, (kind(self),))}  # for a copy, and for another process
        return type(kind.__name__, (kind,), methods | plain)

    opening = "__getitem__ __contains__ __iter__ keys values items get pop copy"
    message = watched(
        dict, {"message": opening, "conversation": "__repr__"}
    )  # str() shows one, and reads nothing of it
    looking = "__getitem__ __len__ __iter__ __contains__ __eq__ __ne__ __add__ __mul__ __repr__ count index"
    conversation = watched(list, {"conversation": looking})
    return lambda messages: conversation(map(message, messages))


def _signature(function: Function) -> dict[str, inspect.Parameter]:
    try:  # a partial fills parameters of what it wraps
        return dict(inspect.signature(function, follow_wrapped=not isinstance(function, functools.partial)).parameters)
    except (TypeError, ValueError):  # it has none
        return {}


def _parameters(function: object, module: ModuleType) -> dict[str, inspect.Parameter]:
    """The parameters of a reward, or of the one in a wrapper; empty if a value of the module is no reward."""
    if not callable(function) or isinstance(function, type):
        return {}
    parameters = _signature(function)
    if ANSWERS & parameters.keys():
        return parameters
    kinds = {one.kind for one in parameters.values()}
    if not (inspect.Parameter.VAR_KEYWORD in kinds and kinds <= _ANY):
        return {}
    parts = _reached(function, module, by_name=False)
    for part in parts:
        if inspect.isroutine(part) and ANSWERS & _signature(part).keys():
            return _signature(part)
    codes = [part for part in parts if isinstance(part, CodeType)]
    return parameters if any(answer in code.co_consts for code in codes for answer in ANSWERS) else {}


def _reached(function: object, module: ModuleType, by_name: bool = True) -> list[object]:
    """What a function of the module consists of: what it wraps, holds or calls by its name, and the parts of these."""
    names, found = vars(module), [function]
    known = {id(function), id(names)}
    for part in found:  # which grows
        inner: Iterable[object] = ()
        if isinstance(part, CodeType):
            used = {step.argval for step in dis.get_instructions(part) if step.opname == "LOAD_GLOBAL"}
            is_own = by_name and part.co_filename == module.__file__
            inner = [*part.co_consts, *(names[name] for name in used if is_own and name in names)]
        elif module.__name__ in (type(part).__module__, isinstance(part, type) and part.__module__):
            inner = gc.get_referents(part)
        elif type(part).__module__ in ("builtins", "functools") and not isinstance(part, type | ModuleType):
            others = getattr(part, "__globals__", None)  # of a function
            inner = (value for value in gc.get_referents(part) if value is not others)
        new = {id(value): value for value in inner if id(value) not in known}
        known.update(new)
        found += new.values()
    return found[1:]
