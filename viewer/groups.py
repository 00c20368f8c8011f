"""Which runs are compared: directories and patterns as they are given, and runs that differ only by their seed."""

import fnmatch
import glob
import re
from collections.abc import Sequence
from pathlib import Path

from viewer.results import names_in, open_run, read_runs
from viewer.runs import Run, RunError, number, printable, step_of

from harness.base.places import current_name

DEFAULT_NAME = re.compile(r"\d{8}-\d{6}-seed\d+(-\d+)?")  # of a run without --name
# Entries of config.json that do not affect learning
NOT_LEARNED = {"seed", "name", "runs_dir", "resume", "device", "threads", "gpu", "machine", "versions", "commit"}
NOT_LEARNED |= {"command", "experiment", "about", "loss", "processes", "sources", "task_failed", "wandb", "save_merged"}
NOT_LEARNED |= {"checkpoint_every", "keep_checkpoints", "eval_every", "samples_every", "progress"}
NOT_LEARNED |= {"micro_batch_size", "tokens_per_micro_batch", "pack", "generation_batch_size", "tensor_parallel"}
NOT_LEARNED |= {"engine_url", "engine", "config", "wandb_project", "wandb_group", "watch", "profile", "keep_best"}
NOT_LEARNED |= {"engine_sleep", "eval_sets", "eval_suite", "changed", "replicas", "verbose"}
MOST_SHOWN = 3  # settings in the label of a group

Groups = dict[str, list[Run]]


def plain(text: object) -> str:
    """One line that cannot control a terminal.

    >>> plain("red: \\x1b[31m\\n next line")
    'red: \\ufffd[31m next line'
    """
    return printable(" ".join(str(text).split()))


def read_run(directory: Path) -> Run:
    return _with_metrics(open_run(directory), directory)


def _with_metrics(run: Run, directory: Path) -> Run:
    if not any(step_of(row) is not None for row in run.metrics.rows):
        raise RunError(f"{directory} has no metrics yet: its metrics.jsonl is missing or empty")
    return run


def read_groups(arguments: Sequence[str]) -> tuple[Groups, list[str]]:
    """The runs by label.

    Args:
        arguments: directories of runs and patterns of them, each by itself or as LABEL=PATTERN. In a folder of
            committed results, the names of its runs are taken as directories; the folder itself means all of them.

    Returns:
        The groups, in the order of the arguments, and for each directory that is left out the reason.
    """
    labelled: dict[str | None, list[Path]] = {}  # None: runs without a label, where the first of them is given
    for argument in arguments:
        label, places = _match(argument)
        if label is not None and label in labelled:
            raise RunError(f"the label {label} is given twice")
        labelled.setdefault(label, []).extend(places)
    groups: Groups = {}
    left_out: list[str] = []
    for label, places in labelled.items():
        runs, reasons = _read(places)
        left_out += reasons
        if not runs:
            raise RunError(reasons[0] if len(reasons) == 1 else f"{len(reasons)} directories, no run: {reasons[0]}")
        groups |= group_by_seed(runs) if label is None else {label: runs}
    if not groups:
        raise RunError("no run is given: name directories of runs, such as runs/experiment_base/*")
    return groups, left_out


def _match(argument: str) -> tuple[str | None, list[Path]]:
    """The label, if there is one, and the directories: a directory with = in its name needs no label."""
    ends = [match.start() for match in re.finditer("=", argument)]
    for label, pattern in [(None, argument), *((argument[:end], argument[end + 1 :]) for end in ends)]:
        found = _find(Path(pattern).expanduser()) if pattern else []
        if found:
            return label, sorted(found, key=_natural)
    place = argument[ends[0] + 1 :] if ends else argument
    if names := names_in(Path(place).parent):
        raise RunError(f"{Path(place).parent} holds no run {Path(place).name}, but for example {', '.join(names[:3])}")
    raise RunError(f"no directory matches {place}" if glob.has_magic(place) else f"there is no directory {place}")


def _find(place: Path) -> list[Path]:
    """The directories that a path or a pattern matches, and the runs that a folder of results keeps by such names."""
    matches = [place] if place.exists() else [Path(match) for match in glob.glob(str(place), recursive=True)]
    found = [path for path in matches if path == place or path.is_dir()]
    found = [run for path in found for run in ([path / name for name in names_in(path)] or [path])]
    folders = [Path(match) for match in glob.glob(str(place.parent))]
    return found + [folder / name for folder in folders for name in fnmatch.filter(names_in(folder), place.name)]


def _natural(path: Path) -> list:
    """seed2 comes before seed10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _read(places: list[Path]) -> tuple[list[Run], list[str]]:
    """The runs, each once, and why others are left out."""
    runs, reasons = [], []
    kept = {folder: read_runs(folder) for folder in {place.parent for place in places}}
    for place in {place.resolve(): place for place in places}.values():
        try:
            runs.append(_with_metrics(kept[place.parent].get(place.name) or Run(place), place))
        except RunError as error:
            reasons.append(str(error))
    return runs, reasons


def experiment_of(run: Run) -> str:
    folder = run.directory.parent
    return current_name(run.config.get("experiment", (folder.parent if folder.name == "results" else folder).name))


def name_of(run: Run) -> str:
    """
    >>> run = Run.__new__(Run)
    >>> run.directory, run.config = Path("runs/experiment_base/a"), {}
    >>> name_of(run)
    'experiment_base/a'
    """
    return f"{experiment_of(run)}/{run.directory.name}"


def group_by_seed(runs: list[Run]) -> Groups:
    """Runs of an experiment whose names and settings differ only by their seed are one group; a seed is there once.

    Runs without --name are named by the time of their start: these names count as equal, and the settings that differ
    become the labels of the groups: `experiment_base, kl_weight=0.0`.
    """
    found: list[tuple[tuple[str, str], list[Run]]] = []
    for run in runs:
        name = run.directory.name
        stem = "" if DEFAULT_NAME.fullmatch(name) else re.sub(r"(seed[-_]?)\d+", r"\1*", name)
        key = (experiment_of(run), stem)
        for other, members in found:
            if other == key and not any(_seed(run) == _seed(one) or differences([run, one]) for one in members):
                members.append(run)
                break
        else:
            found.append((key, [run]))
    groups: Groups = {}
    for (experiment, stem), members in found:
        siblings = [others[0] for key, others in found if key == (experiment, stem)]
        settings = "".join(f", {name}={_value(members[0], name)}" for name in list(differences(siblings))[:MOST_SHOWN])
        is_one = len(members) == 1 and (stem or not settings)
        label = name_of(members[0]) if is_one else f"{experiment}{'/' if stem else ''}{stem}{settings}"
        groups[label if label not in groups else str(members[0].directory)] = members
    return groups


def _seed(run: Run) -> object:
    match = re.search(r"seed[-_]?(\d+)", run.directory.name)
    return run.config.get("seed", int(match[1]) if match else None)


def differences(runs: list[Run]) -> dict[str, list]:
    """Settings that affect learning, that all runs have recorded, and that are not the same in all of them."""
    names = [name for name in runs[0].config if name not in NOT_LEARNED and all(name in run.config for run in runs)]
    found = {name: [_content(run, name) for run in runs] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def _content(run: Run, name: str) -> object:
    """A setting; for a file or a model its checksum, if the run recorded it."""
    source = run.config.get("sources", {}).get(name)
    return source["content"] if source else run.config[name]


def _value(run: Run, name: str) -> str:
    value = run.config[name]
    text = (" ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)
    return text if len(text) <= 24 else f"...{text[-21:]}"


def setting(runs: list[Run], name: str) -> str:
    """The values of a setting in a group; of a file that changed, with the beginning of its checksum."""
    contents = [(_value(run, name), run.config[name], _content(run, name)) for run in runs]
    found = [text if content == value else f"{text} ({content[:6]})" for text, value, content in contents]
    return ", ".join(dict.fromkeys(found))


def updates_per_step(runs: list[Run]) -> str:
    """How many optimizer steps the update of a rollout has.

    >>> run = Run.__new__(Run)
    >>> run.config = {"prompts_per_step": 16, "group_size": 8, "minibatch_size": 32, "epochs_per_step": 4}
    >>> updates_per_step([run])
    '16'
    """
    found = set()
    for config in (run.config for run in runs):
        rows = config.get("prompts_per_step", 1) * config.get("group_size", 1)
        found.add(config.get("epochs_per_step", 1) * -(-rows // (config.get("minibatch_size") or rows)))
    return " or ".join(map(str, sorted(found)))


def series(run: Run, key: str) -> dict[int, float]:
    """The values of a key of metrics.jsonl by step, without those that are not finite."""
    points = ((step_of(row), number(row.get(key))) for row in run.metrics.rows)
    return {step: value for step, value in points if step is not None and value is not None}
