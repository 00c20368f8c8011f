"""The user's tools: the functions in the file of `--tools`; and the demands that they make on a chat template."""

import functools
import inspect
import json
import re
from collections.abc import Callable, Collection
from types import FunctionType, ModuleType

from common.errors import UserError
from common.observations import encode_observation, removes_thoughts
from common.policy import Policy
from common.tools import call_form, json_schema

from harness.base.checks import local_path
from harness.base.terminal import printable, say
from harness.task.task_file import import_file
from harness.workers.tool_processes import Workers


def load_tools(name: str | None, seconds: float, taken: Collection[str] = ()) -> dict[str, Callable[..., str]]:
    """The public functions that the user's file defines, by name; none without a file.

    Each returned function has the name, docstring and signature of the user's function, so that a schema can be built
    from it. If the user's code raises, crashes, or takes longer than `seconds`, the function returns a line that begins
    with "error:". `taken` are the names of other tools.
    """
    if name is None:
        return {}
    path = local_path(name, "--tools")
    if not path.is_file():
        raise UserError(f"--tools {name}: there is no such file")
    module, source = import_file(path.resolve(), "tools", name)
    functions = _public_functions(module, name)
    if used := functions.keys() & set(taken):
        raise UserError(f"--tools {name}: there is another tool called {min(used)}: rename this one")
    workers = Workers(module.__file__, source, f"--tools {name}", seconds)
    workers.start_one()  # faults that show only there are found before training
    say(f"--tools {name}: the policy may call {', '.join(functions)}")
    return {name: _make_tool(function, workers) for name, function in functions.items()}


def check_turns(policy: Policy) -> None:
    """Refuse a template without tool calls or tool answers; say so if it removes the thoughts of earlier turns."""
    call_form(policy.tokenizer)
    encode_observation(policy.tokenizer, ["?"], policy.end_of_turn_ids)
    if removes_thoughts(policy.tokenizer):
        say(
            "the chat template removes the thoughts of a turn when the next one begins; here they stay, since a policy "
            "is trained on exactly the tokens that it has seen: let the trained policy see them as well when you use it"
        )


def _public_functions(module: ModuleType, shown: str) -> dict[str, FunctionType]:
    """The functions that a file itself defines, in order. UserError: there are none, or one cannot be a tool."""
    functions = {}
    for name, value in vars(module).items():
        is_own = callable(value) and getattr(value, "__module__", None) == module.__name__
        if is_own and not name.startswith("_") and inspect.isfunction(inspect.unwrap(value)):
            if problem := _problem_of(value):
                raise UserError(f"--tools {shown}: {printable(value.__name__, 60)} {printable(problem, 250)}")
            functions[value.__name__] = value
    if not functions:
        raise UserError(f"--tools {shown}: the file defines no function whose name does not begin with _")
    return functions


def _problem_of(function: FunctionType) -> str | None:
    """Why a function cannot be a tool, as the end of a sentence that begins with its name."""
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_]{0,63}", function.__name__):
        return "is not a name that every chat template can show: use at most 64 letters, digits and _ of ASCII"
    plain = inspect.unwrap(function)
    if inspect.iscoroutinefunction(plain) or inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        return "must return its result: async and yield are not supported"
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            return f"has the parameter {parameter}, which cannot be given by name: the policy gives all by name"
    try:
        json.dumps(json_schema(function), ensure_ascii=False).encode()  # no tokenizer takes half a character
    except Exception as error:  # of many kinds: no docstring, no type hint, or one that cannot be evaluated
        return f"cannot be described to the policy: {error}"
    return None


def _make_tool(function: FunctionType, workers: Workers) -> Callable[..., str]:
    @functools.wraps(function)
    def tool(*values: object, **named: object) -> str:
        arguments = inspect.signature(function).bind(*values, **named).arguments
        return workers.call(function.__name__, arguments)

    return tool
