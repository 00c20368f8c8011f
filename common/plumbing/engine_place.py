"""Where a run finds its engine: flags that are checked before anything loads, and that a resumed run may change.

Experiments without an engine have no such flags, and nothing here concerns them.
"""

import dataclasses
import os
import shlex
from pathlib import Path

from common.errors import UserError

from common.plumbing.config import ConfigT
from common.plumbing.terminal import printable

PLACES = ("engine_url", "engine_start")


def check_engine(config: ConfigT) -> None:
    """
    Raises:
        UserError: there is no engine, or two, or none can hold what is trained.
    """
    if not hasattr(config, "engine_url"):
        return
    if (config.engine_url is None) == (config.engine_start is None):
        raise UserError(
            "an engine samples here: give --engine-url URL of one that runs, or --engine-start PYTHON of an "
            "environment that has the engine, and not both"
        )
    if config.engine_start is not None and not _words(config.engine_start):
        shown = printable(repr(config.engine_start), 60)
        raise UserError(f"--engine-start {shown}: give the path of a Python, and then flags of its server, if any")
    if config.load_in == "8bit":
        raise UserError("--load-in 8bit rounds activations, which an engine would not: use --load-in 4bit, or omit it")


def with_one_engine(before: ConfigT, after: ConfigT) -> ConfigT:
    """The settings of a resumed run: an engine that its command line names replaces the one that it had."""
    named = [name for name in PLACES if getattr(after, name, None) != getattr(before, name, None)]
    return dataclasses.replace(after, **{name: None for name in PLACES if named and name not in named})


def with_absolute_start(config: ConfigT) -> ConfigT:
    """The settings with the absolute path of the engine's Python, so that a run can be resumed from any directory."""
    words = _words(getattr(config, "engine_start", None) or "")
    kept = list(words)
    for index, word in enumerate(words):  # another program may start it: env NAME=value engine-env/bin/python
        if word.startswith("--"):
            break
        if "/" in word and os.path.isfile(path := os.path.expanduser(word)):
            # not what a link leads to: the folder of a Python is that of its environment
            kept[index] = str(Path(path).absolute())
    return config if kept == words else dataclasses.replace(config, engine_start=shlex.join(kept))


def _words(command: str) -> list[str]:
    """Those of a command that begins with a program; else none."""
    try:
        words = shlex.split(command)
    except ValueError:  # a quotation mark without its partner
        return []
    return words if words and words[0] and not words[0].startswith("-") else []
