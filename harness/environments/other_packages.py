"""Environments and tasks of other packages, which `--task PREFIX:NAME` names, each through its adapter.

An adapter is a module of this folder with `load(name)`, which returns what a file would define: for an environment
`Environment` and `rows`, for a task of one turn `messages`, `reward`, `REWARD_WEIGHTS` and `rows`. Settings follow the
name as in an address: `gymnasium:FrozenLake-v1?is_slippery=False&rows=200`. A package is imported when it is named.
"""

import ast
import difflib
import functools
import importlib
import importlib.util
from contextlib import suppress
from types import ModuleType
from typing import NamedTuple

from common.errors import UserError

from harness.base.terminal import printable


class Adapter(NamedTuple):
    file: str  # a module of this folder
    package: str
    install: str  # a command


_EXTRA = 'pip install -e ".[environments]"'
_OWN = "pip install {}, in a Python environment of its own with this project"
ADAPTERS = {
    "gymnasium": Adapter("gymnasium_adapter", "gymnasium", _EXTRA),
    "openenv": Adapter("openenv_adapter", "openenv", _OWN.format("openenv==0.10.0")),
    "reasoning_gym": Adapter("reasoning_gym_adapter", "reasoning_gym", _EXTRA),
    "textarena": Adapter("textarena_adapter", "textarena", _EXTRA),
    "verifiers": Adapter("verifiers_adapter", "verifiers", _OWN.format("verifiers==0.4.0")),
}
ROWS = 1000  # for training, without ?rows=
EVAL_ROWS = 256
EVAL_SEED = 1_000_000_000  # seeds of the held-out rows begin here: far from those of training, and below 2**32


def is_adapted(name: str) -> bool:
    """Whether `name` has the form of an adapter's environment, so that it is no path.

    >>> [is_adapted(name) for name in ("gymnasium:Taxi-v4", "my_task.py", "C:/tasks/mine.py", "arithmetic")]
    [True, False, False, False]
    """
    prefix, colon, rest = name.partition(":")
    return bool(colon) and prefix.isidentifier() and len(prefix) > 1 and not rest.startswith(("/", "\\"))


@functools.cache  # the command line and the run both ask for it, and rows can take time to generate
def load_adapter(name: str) -> ModuleType:
    """What `prefix:name` defines, as a module; a UserError says which part of the name is wrong, or what to install."""
    prefix, _, rest = name.partition(":")
    if prefix not in ADAPTERS:
        raise UserError(f"--task {printable(name, 100)}: there is no adapter {prefix!r}, but {', '.join(ADAPTERS)}")
    adapter = ADAPTERS[prefix]
    if not rest:
        raise UserError(f"--task {name}: name an environment after the colon")
    if importlib.util.find_spec(adapter.package) is None:
        raise UserError(f"--task {name} needs the package {adapter.package}: {adapter.install}")
    file, module = importlib.import_module(f"harness.environments.{adapter.file}"), ModuleType(f"adapted_{prefix}")
    try:
        loaded = file.load(rest)
    except UserError as error:
        raise UserError(f"--task {printable(name, 100)}: {error}") from error
    module.__dict__.update(vars(loaded), __file__=file.__file__)
    return module


def split_settings(name: str) -> tuple[str, dict[str, object]]:
    """The name before the question mark, and the settings after it; a value that is no Python literal is text.

    >>> split_settings("FrozenLake-v1?is_slippery=False&actions=left,down")
    ('FrozenLake-v1', {'is_slippery': False, 'actions': 'left,down'})
    """
    name, _, text = name.partition("?")
    settings: dict[str, object] = {}
    for pair in filter(None, text.split("&")):
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise UserError(f"{pair!r} is not NAME=VALUE")
        settings[key] = {"true": True, "false": False}.get(value, value)
        with suppress(ValueError, SyntaxError):
            settings[key] = ast.literal_eval(value)
    return name, settings


def pop_rows(settings: dict[str, object]) -> dict[str, int]:
    """Take `rows` out of the settings: the number of rows by split. At most 256 are for evaluation."""
    number = settings.pop("rows", ROWS)
    if not isinstance(number, int) or number < 1:
        raise UserError(f"rows must be a positive whole number, not {number!r}")
    return {"train": number, "eval": min(number, EVAL_ROWS)}


def seeded_rows(split: str, numbers: dict[str, int]) -> list[dict]:
    """Rows that consist of a seed: the same in every run, and none in both splits."""
    first = {"train": 0, "eval": EVAL_SEED}[split]
    return [{"seed": first + number} for number in range(numbers[split])]


def unknown(name: str, names: list[str]) -> UserError:
    """The error for a name that a package does not have, with the closest ones that it has."""
    low = {known.lower(): known for known in names}
    close = [low[found] for found in difflib.get_close_matches(name.lower(), low, n=3, cutoff=0.4)]
    return UserError(f"the package has no {name!r}{'; the closest are ' + ', '.join(close) if close else ''}")


def one_line(error: Exception) -> str:
    """A package's error, for a sentence."""
    return printable(" ".join(str(error).split()) or type(error).__name__, 300)
