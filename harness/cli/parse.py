"""The command line: read, resolved and checked, before anything is loaded."""

import dataclasses
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import get_type_hints

from common.errors import UserError

from harness.base.checks import (
    check_combinations,
    check_device,
    check_model,
    check_name,
    check_ranges,
    check_texts,
    flag,
)
from harness.base.config import BUNDLED, RESOLVED, ConfigT, resolve
from harness.base.flags import make_flags, read_marks, show_description
from harness.base.ranks import num_launched
from harness.base.terminal import printable, say
from harness.data.task import bundled_tasks, task_of
from harness.run.machine import with_threads
from harness.run.settings import BATCH_SIZES, ENGINE_PLACES, NOT_FLAGS, read_settings
from harness.run.signals import may_say_why


def parse_config(
    config_class: type[ConfigT], argv: Sequence[str] | None, description: str, resolved: dict[str, dict] = RESOLVED
) -> ConfigT:
    """Read the command line, resolve defaults, and refuse what cannot work, before anything is loaded.

    Args:
        description: shown by `--help`, up to what is left out, or to its parent.
        resolved: the table that resolves flags left at None, by the kind of policy.

    Raises:
        UserError: a value is out of range, or two contradict each other.
    """
    from harness.base.interrupt import handle_as_usual  # not above: a program imports this file before all others

    argv = sys.argv[1:] if argv is None else argv
    _show_help(argv, description)
    _check_words(config_class, argv)
    config = _read(config_class(), argv)
    if getattr(config, "resume", None) is not None:
        config = _resumed(config, argv)
    check_model(config)
    check_name(getattr(config, "name", None))
    check_device(config.device)
    if config.kind not in resolved:
        raise UserError(f"--model {config.model} is for experiment_sft only: it has not learned anything yet")
    defaults = resolved[config.kind]
    check_ranges(config)  # before the task, whose first reward takes time
    if hasattr(config, "system_prompt"):
        defaults = defaults | {"system_prompt": "" if config.kind == "tiny" else task_of(config.task).system_prompt}
    config = resolve(config, defaults)
    check_combinations(config)
    _check_engine(config)
    handle_as_usual()
    return with_threads(config)


def parse_plain(config: object, argv: Sequence[str] | None, description: str) -> object:
    """Read the command line of a program without a `--model`, and refuse values out of range.

    Args:
        config: the defaults.

    Raises:
        UserError: a value is out of range, or a text cannot be used.
    """
    from harness.base.interrupt import handle_as_usual

    argv = sys.argv[1:] if argv is None else argv
    _show_help(argv, description)
    _check_words(type(config), argv)
    config = _read_flags(config, argv)
    check_ranges(config)
    handle_as_usual()
    return config


def _show_help(argv: Sequence[str], description: str) -> None:
    if {"-h", "--help"} & set(argv):
        what_it_is = re.split("\n(?:Left out|Parent):", description)[0]  # what follows is for readers of the file
        show_description(what_it_is, shutil.get_terminal_size().columns)


def _read(config: ConfigT, argv: Sequence[str]) -> ConfigT:
    """The settings with the changes that the command line makes; `--help` and mistakes end the program.

    Raises:
        UserError: a text or a path cannot be used.
    """
    return _with_absolute_start(with_absolute_paths(_read_flags(config, argv)))


def _read_flags(config: ConfigT, argv: Sequence[str]) -> ConfigT:
    import tyro

    tyro._experimental_options["ansi_codes"] = not os.environ.get("NO_COLOR")  # https://no-color.org
    markers = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)  # --lr, not --algorithm.lr; FLOAT, not {None}|FLOAT
    with _told_once():
        groups = tyro.cli(make_flags(config), args=argv, description="", config=markers)
    config = dataclasses.replace(
        config, **{name: value for group in vars(groups).values() for name, value in vars(group).items()}
    )
    check_texts(config)
    return config


@contextmanager
def _told_once() -> Iterator[None]:
    """Let one of several processes print what is wrong with a command line, which is the same for all."""
    if num_launched() == 1:
        yield
        return
    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            yield
    except SystemExit as end:
        if end.code and may_say_why():
            say(errors.getvalue().rstrip("\n"), sys.stderr, anyway=True)
        raise


def _check_words(config_class: type[ConfigT], argv: Sequence[str]) -> None:
    """Refuse a flag of several values that is given twice (tyro would drop the first) or without a value."""
    for name, kind in get_type_hints(config_class).items():
        if kind != tuple[str, ...]:
            continue
        uses = [index for index, word in enumerate(argv) if word.partition("=")[0].replace("_", "-") == flag(name)]
        if len(uses) > 1:
            raise UserError(f"{flag(name)} is given {len(uses)} times: give all of its values after one")
        if uses and "=" not in argv[uses[0]] and (argv[uses[0] + 1 :] or ["--"])[0].startswith("--"):
            raise UserError(f"{flag(name)} needs at least one value")


def _resumed(config: ConfigT, argv: Sequence[str]) -> ConfigT:
    """The settings of the run that `--resume` names.

    The command line is read again with these settings as its defaults. A setting that differs from them afterwards was
    given on the command line, with another value. `--threads auto` is the run's number: with another one it would not
    be the same run, bit for bit.

    Raises:
        UserError: there is no such run, or a setting differs from the run's that is neither `--steps`, a batch size nor
            the place of an engine.
    """
    stored = read_settings(Path(config.resume).expanduser(), type(config))
    names = [field.name for field in dataclasses.fields(config) if field.name in stored]
    if unknown := stored.keys() - {*names, *NOT_FLAGS}:
        raise UserError(
            f"--resume {config.resume} is a run of {stored.get('experiment')}, with settings that do not exist here: "
            + ", ".join(sorted(unknown))
        )
    values = {name: tuple(stored[name]) if isinstance(stored[name], list) else stored[name] for name in names}
    before = dataclasses.replace(config, **values)
    config = _with_one_engine(before, _read(before, argv))
    if config.threads == "auto":
        config = dataclasses.replace(config, threads=before.threads)
    for name in names:
        old, new = getattr(before, name), getattr(config, name)
        if name not in ("resume", *BATCH_SIZES, *ENGINE_PLACES) and new != old and not (name == "steps" and new > old):
            raise UserError(
                f"{flag(name)} {_shown(new)} differs from the run's {_shown(old)}: a resumed run keeps its settings, "
                "and only --steps may be raised, and batch sizes changed"
            )
    return config


def with_absolute_paths(config: ConfigT) -> ConfigT:
    """The settings with the absolute paths of what they name, so that a run can be resumed from any directory."""
    marks = read_marks(type(config))
    named = {name: getattr(config, name) for name in marks if marks[name].path and marks[name].path.is_input}
    if config.model not in BUNDLED:
        named["model"] = config.model_path
    if getattr(config, "task", None) not in bundled_tasks():
        named["task"] = getattr(config, "task", None)
    paths = {name: Path(value).expanduser() for name, value in named.items() if value}
    return dataclasses.replace(
        config,  # an index is made where there is none; a data set and a model can be the hub's
        **{name: str(path.absolute()) for name, path in paths.items() if path.exists() or name == "index"},
    )


def _check_engine(config: ConfigT) -> None:
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


def _with_one_engine(before: ConfigT, after: ConfigT) -> ConfigT:
    """The settings of a resumed run: an engine that its command line names replaces the one that it had."""
    named = [name for name in ENGINE_PLACES if getattr(after, name, None) != getattr(before, name, None)]
    return dataclasses.replace(after, **{name: None for name in ENGINE_PLACES if named and name not in named})


def _with_absolute_start(config: ConfigT) -> ConfigT:
    """The settings with the absolute path of the engine's Python, so that a run can be resumed from any directory."""
    words = _words(getattr(config, "engine_start", None) or "")
    kept = [_with_absolute_path(word) for word in words]
    return config if kept == words else dataclasses.replace(config, engine_start=shlex.join(kept))


def _with_absolute_path(word: str) -> str:
    """A word of a command, absolute if it is the path of a file, but not of what that links to.

    The folder of a Python is that of its environment.
    """
    path = os.path.expanduser(word)
    return os.path.abspath(path) if "/" in word and os.path.isfile(path) else word


def _words(command: str) -> list[str]:
    """Those of a command that begins with a program; else none."""
    try:
        words = shlex.split(command)
    except ValueError:  # a quotation mark without its partner
        return []
    return words if words and words[0] and not words[0].startswith("-") else []


def _shown(value: object) -> str:
    return " ".join(value) or "none" if isinstance(value, tuple) else str(value)
