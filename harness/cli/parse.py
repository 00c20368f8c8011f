"""Read, resolve and check the command line, before anything is loaded.

What `--help` does not need is imported within the functions that need it.
"""

from harness.base.interrupt import handle_as_usual
import dataclasses
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from itertools import permutations
from pathlib import Path
from typing import NoReturn, get_type_hints

from common.errors import UserError

from harness.base import checks
from harness.base.config import BUNDLED, RESOLVED, ConfigT, PolicyConfig, resolve, shown
from harness.base.flags import REPEATED, flag, group_fields, make_flags, read_marks, show_description, show_names
from harness.base.ranks import num_launched
from harness.base.signals import may_say_why
from harness.base.terminal import printable, say

# --help explains all flags of a program that has at most so many, else only the experiment's own
FEW_FLAGS = 32
# Of flags, and what to use, which begins with a flag: TRL's names, those of github.com/researchim-ai/re-grpo, and those
# of evaluate.py and the experiments for the number of rows
OTHER_NAMES = (
    ("learning-rate", "lr"),
    ("beta", "kl-weight"),
    ("num-generations", "group-size"),
    ("run-name", "name"),
    ("log-dir", "runs-dir"),
    ("device-index", "device cuda:1 for the second GPU"),
    ("model-name", "model"),
    ("checkpoint-path", "runs-dir, where every run keeps its checkpoints"),
    ("checkpoint-interval", "checkpoint-every"),
    ("data-path", "data"),
    ("rollouts-per-step", "prompts-per-step"),
    ("train-batch-size", "minibatch-size"),
    ("max-length", "max-new-tokens, which does not count the prompt"),
    ("log-completions-interval", "samples-every"),
)
OTHER_NAMES += tuple(permutations(("limit", "max-prompts", "max-pairs"), 2))


def parse_config(
    config_class: type[ConfigT], argv: Sequence[str] | None, description: str, resolved: dict[str, dict] = RESOLVED
) -> ConfigT:
    """Read the command line, fill in each None from `resolved`, and refuse settings that cannot work."""
    argv = _prepare(config_class(), argv, description)
    from harness.base.machine import with_threads
    from harness.processes.processes import of_this_process
    from harness.run.settings import resolved_defaults

    config = with_absolute_paths(_read_flags(config_class(), argv))
    if getattr(config, "config", None) is not None:
        argv = [*_words_of_file(config.config, config, argv), *argv]
        config = with_absolute_paths(_read_flags(config_class(), argv))
    if getattr(config, "resume", None) is not None:
        config = _resumed(config, argv)
    checks.check_model(config)
    checks.check_name(getattr(config, "name", None))
    checks.check_device(config.device, is_here=getattr(config, "gpu_memory", None) is None)
    if config.kind not in resolved:
        raise UserError(f"--model {config.model} is for make_policy.py only: it has not learned anything yet")
    checks.check_ranges(config)  # before the task, whose first reward takes time
    config = resolve(config, resolved_defaults(config, resolved))
    checks.check_combinations(config)
    checks.tell_limits(config)
    if hasattr(config, "engine_url"):
        _check_engine(config)
    handle_as_usual()
    return with_threads(of_this_process(config) if isinstance(config, PolicyConfig) else config)


def parse_plain(config: object, argv: Sequence[str] | None, description: str) -> object:
    """Read the command line of a program without `--model`; `config` holds the defaults."""
    config = _read_flags(config, _prepare(config, argv, description))
    checks.check_ranges(config)
    handle_as_usual()
    return config


def _prepare(config: object, argv: Sequence[str] | None, description: str) -> Sequence[str]:
    """The arguments, unless they ask for help."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help", "--help-all"} & set(argv):
        _show_help(config, description, is_full="--help-all" in argv)
    words = [word.partition("=")[0].replace("_", "-") for word in argv]
    hints = get_type_hints(type(config))
    for other, use in OTHER_NAMES:
        name = re.split("[ ,]", use)[0].replace("-", "_")
        if f"--{other}" in words and name in hints and other.replace("-", "_") not in hints:
            raise UserError(f"there is no flag --{other}: use --{use}")
    for name, kind in hints.items():  # tyro would drop the first values
        if kind == tuple[str, ...] and name not in REPEATED and words.count(flag(name)) > 1:
            raise UserError(f"{flag(name)} is given {words.count(flag(name))} times: give all of its values after one")
    return argv


def _show_help(config: object, description: str, is_full: bool) -> NoReturn:
    """Describe the program and its flags, and end it."""
    width = shutil.get_terminal_size().columns
    what_it_is = re.split("\n(?:Left out|Parent):", description)[0]  # the rest is for readers of the file
    show_description(what_it_is, width)
    explained, named = group_fields(config), {}
    if not is_full and sum(map(len, explained.values())) > FEW_FLAGS:
        (name, own), *others = explained.items()
        explained, named = {name: own}, dict(others)
    try:
        _ask_tyro(make_flags(config, explained), ["--help"])
    except SystemExit:
        if named:
            show_names(named, width)
        raise


def _words_of_file(name: str, config: ConfigT, argv: Sequence[str]) -> list[str]:
    """The settings in the file of `--config` as words of a command line, without those that `argv` gives itself."""
    import yaml

    from harness.run.settings import NOT_FLAGS, with_current_paths

    try:
        settings = yaml.safe_load(Path(name).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = printable(str(error), 200)
        raise UserError(f"--config {shown(name)}: no settings can be read there, in YAML or JSON ({reason})") from error
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise UserError(f"--config {shown(name)}: it must hold one setting in each line, for example lr: 0.0001")
    settings = {key.replace("-", "_"): value for key, value in settings.items()}
    if "experiment" in settings:  # of a run, which keeps its name
        settings = with_current_paths(settings)
        settings = {key: settings[key] for key in settings.keys() - NOT_FLAGS - {"config", "name", "resume"}}
    if unknown := sorted(settings.keys() - {field.name for field in dataclasses.fields(config)}):
        raise UserError(f"--config {shown(name)}: there is no flag {flag(unknown[0])} here (--help lists all)")
    given = {word.partition("=")[0].replace("_", "-").replace("--no-", "--") for word in argv}
    words = []
    for key, value in settings.items():
        if flag(key) in given or value is None:
            continue
        if isinstance(value, bool):
            words.append(flag(key) if value else f"--no-{flag(key)[2:]}")
        elif isinstance(value, list) and key in REPEATED:
            words += [f"{flag(key)}={text}" for text in value]
        elif isinstance(value, list):
            words += [flag(key), *map(str, value)] if value else []
        else:
            words.append(f"{flag(key)}={value}")
    return words


def _read_flags(config: ConfigT, argv: Sequence[str]) -> ConfigT:
    """Change the settings as the command line says; mistakes end the program."""
    given = {word.partition("=")[0] for word in argv}
    config = dataclasses.replace(config, **{name: () for name in REPEATED if flag(name) in given})  # no more defaults
    groups = _ask_tyro(make_flags(config, group_fields(config)), argv)
    config = dataclasses.replace(
        config, **{name: value for group in vars(groups).values() for name, value in vars(group).items()}
    )
    checks.check_texts(config)
    return config


def _ask_tyro(flags: type, argv: Sequence[str]) -> object:
    import tyro

    tyro._experimental_options["ansi_codes"] = not os.environ.get("NO_COLOR")  # https://no-color.org
    markers = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)  # --lr, not --algorithm.lr; FLOAT, not {None}|FLOAT
    with _told_once():
        return tyro.cli(flags, args=argv, description="", config=markers)


@contextmanager
def _told_once() -> Iterator[None]:
    """Let only one of several processes print the faults of a command line, which are the same for all."""
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


def _resumed(config: ConfigT, argv: Sequence[str]) -> ConfigT:
    """The settings of the run that `--resume` names become the defaults of the command line; few may differ."""
    from harness.run.settings import ENGINE_PLACES, MAY_CHANGE, NOT_FLAGS, read_settings

    stored = read_settings(Path(config.resume).expanduser())
    names = [field.name for field in dataclasses.fields(config) if field.name in stored]
    unknown = stored.keys() - {*names, *NOT_FLAGS}
    if all(stored.get(field.name, 0) is not None for field in dataclasses.fields(config) if field.default is not None):
        # a setting of an older version that is no more, and that the run left at its default, changes nothing
        unknown &= {*stored.get("changed", unknown)}
    if unknown:
        raise UserError(
            f"--resume {config.resume} is a run of {stored['experiment']}, with settings that do not exist here: "
            + ", ".join(sorted(unknown))
        )
    values = {name: tuple(stored[name]) if isinstance(stored[name], list) else stored[name] for name in names}
    before = dataclasses.replace(config, **values)
    config = with_absolute_paths(_read_flags(before, argv))
    if config.threads == "auto":
        config = dataclasses.replace(config, threads=before.threads)
    if engines := [name for name in ENGINE_PLACES if getattr(config, name, None) != getattr(before, name, None)]:
        # an engine on the command line replaces the run's old one
        config = dataclasses.replace(config, **{name: None for name in ENGINE_PLACES if name not in engines})
    for name in names:
        old, new = getattr(before, name), getattr(config, name)
        if name not in ("resume", "config", *MAY_CHANGE) and new != old and not (name == "steps" and new > old):
            new, old = (" ".join(value) or "none" if isinstance(value, tuple) else value for value in (new, old))
            raise UserError(
                f"{flag(name)} {new} differs from the run's {old}: a resumed run keeps its settings, except "
                f"for a higher --steps and other batch sizes; {_other_way(Path(config.resume).expanduser(), name)}"
            )
    return config


def _other_way(run: Path, changed: str) -> str:
    """How to go on from a run with another value of a setting, in place of `--resume`."""
    newest = max(run.glob("checkpoints/step_*[0-9]"), key=lambda path: (len(path.name), path.name), default=None)
    if changed == "steps":
        return "Ctrl-C ends it earlier" + (f", and its newest weights are in {shown(newest)}" if newest else "")
    what, flags = "settings", f"--config {shlex.quote(shown(run / 'config.json'))}"
    if newest and changed != "model":
        what, flags = f"{what} and newest weights", f"{flags} --model {shlex.quote(shown(newest))}"
    return f"a new run takes its {what}: {flags} {flag(changed)} ..."


def with_absolute_paths(config: ConfigT) -> ConfigT:
    """Make the paths in the settings absolute, so that a run can be resumed from any directory."""
    from harness.task.task_file import bundled_tasks

    marks = read_marks(type(config))
    named = {name: getattr(config, name) for name in marks if marks[name].path and marks[name].path.is_input}
    if config.model not in BUNDLED:
        named["model"] = config.model_path
    if getattr(config, "task", None) not in bundled_tasks():
        named["task"] = getattr(config, "task", None)
    named["answer_begins"] = getattr(config, "answer_begins", None)  # a tag, a file or a directory
    paths = {name: Path(value).expanduser() for name, value in named.items() if value}
    # build_index creates a missing index; a data set and a model can be on the hub
    absolute = {name: str(path.absolute()) for name, path in paths.items() if path.exists() or name == "index"}
    if sets := checks.parse_sources("--eval-sets", getattr(config, "eval_sets", ())):
        paths = {name: Path(source).expanduser() for name, source in sets.items()}
        absolute["eval_sets"] = tuple(
            f"{name}={paths[name].absolute() if paths[name].exists() else source}" for name, source in sets.items()
        )
    if getattr(config, "engine_start", None) is not None:
        words = _words(config.engine_start)
        # do not follow links: the folder of a Python decides its environment
        paths = [os.path.abspath(os.path.expanduser(word)) if "/" in word else "" for word in words]
        kept = [path if os.path.isfile(path) else word for word, path in zip(words, paths, strict=True)]
        absolute["engine_start"] = shlex.join(kept)
    return dataclasses.replace(config, **absolute)


def _check_engine(config: ConfigT) -> None:
    if (config.engine_url is None) == (config.engine_start is None):
        raise UserError(
            "an engine samples here: give --engine-url URL of one that runs, or --engine-start PYTHON of an "
            "environment that has the engine, and not both"
        )
    if config.engine_sleep and (getattr(config, "steps_ahead", 0) or getattr(config, "push_every", 1) > 1):
        raise UserError(
            "--engine-sleep frees the engine's weights in every step: omit --steps-ahead, and --push-every above 1"
        )
    if config.load_in == "8bit":
        raise UserError("--load-in 8bit rounds activations, which an engine would not: use --load-in 4bit, or omit it")


def _words(command: str) -> list[str]:
    """The words of `--engine-start`, which begin with a program."""
    with suppress(ValueError):  # an unmatched quotation mark
        words = shlex.split(command)
        if words and not words[0].startswith("-"):
            return words
    shown = printable(repr(command), 60)
    raise UserError(f"--engine-start {shown}: give the path of a Python, and then flags of its server, if any")
