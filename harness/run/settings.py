"""config.json of a run: settings, command, machine, and checksums of model, data and task."""

import dataclasses
import hashlib
import inspect
import json
import sys
from pathlib import Path

import torch

from common.errors import UserError

from harness.base.checks import flag
from harness.base.config import RESOLVED, ModelConfig, PolicyConfig, find_directory, resolve
from harness.base.files import replace_file
from harness.base.hub import commit_of
from harness.base.machine import BATCH_SIZES
from harness.base.places import current_path
from harness.base.ranks import is_first_here
from harness.base.terminal import say
from harness.task.named_task import seconds_of, task_of
from harness.task.task import Task

# The entries of config.json that are not flags
NOT_FLAGS = {"versions", "machine", "gpu", "commit", "processes", "experiment", "command", "sources", "task_failed"}
NOT_FLAGS |= {"script", "about", "loss"}  # what train.py says about itself, and about the terms of its loss
NOT_FLAGS |= {"changed"}  # the names of the settings that are not the defaults
# Flags that say where a run finds its engine; a resumed run may change them; experiments without an engine have none
ENGINE_PLACES = ("engine_url", "engine_start")
# When a run is resumed: its servers may be elsewhere, and its ranks on another mesh
MAY_CHANGE = (*BATCH_SIZES, *ENGINE_PLACES, "engine", "engine_sleep", "reward_model_url", "teacher_url")
MAY_CHANGE += ("judge_url", "tensor_parallel", "replicas", "watch", "verbose")
MODELS = ("model", "base", "reward_model", "judge_model")
MODEL_FILES = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")  # in a Hugging Face directory


def write_settings(directory: Path, settings: dict) -> None:
    """Replace config.json, completely or not at all."""
    replace_file(directory / "config.json", (json.dumps(settings, indent=2) + "\n").encode())


def read_settings(directory: Path, what: str = "--resume") -> dict:
    """The settings of a run; the user named its directory through `what`."""
    try:
        settings = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{what} {directory}: no config.json of a run can be read there ({error})") from error
    if settings.get("experiment") is None:
        run = next((path for path in directory.resolve().parents if (path / "checkpoints").is_dir()), None)
        hint = "" if run is None else f"; it belongs to the run {run}, which resumes from its newest checkpoint"
        raise UserError(f"{what} {directory}: its config.json is not a run's{hint}")
    return with_current_paths(settings)


def with_current_paths(settings: dict) -> dict:
    """The settings of a run with its paths in the repository as they are today, whichever version it began with."""
    texts = {name: value for name, value in settings.items() if name not in NOT_FLAGS and isinstance(value, str)}
    paths = {name: current_path(value) for name, value in texts.items()}
    sets = [source.partition("=") for source in settings.get("eval_sets", ())]
    return (
        settings | paths | ({"eval_sets": [f"{name}={current_path(path)}" for name, _, path in sets]} if sets else {})
    )


def experiment_of(config: PolicyConfig) -> str:
    """The name of the directory of the train.py that defines the settings' class."""
    return Path(sys.modules[type(config).__module__].__file__).resolve().parent.name


def script_of(config: PolicyConfig) -> str:
    """The SHA-256 of this train.py, shortened: the commit says nothing about a user's own file."""
    return _sha256(Path(sys.modules[type(config).__module__].__file__))[:12]


def describe_settings(config: PolicyConfig, machine: dict) -> dict:
    script = sys.modules[type(config).__module__]
    settings = dataclasses.asdict(config) | machine | {"experiment": experiment_of(config), "command": sys.argv}
    if machine.get("processes", 1) > 1:
        settings["device"] = torch.device(config.device).type  # without the number of the main process's GPU
    about = (script.__doc__ or "").strip().partition("\n")[0]
    loss = inspect.getdoc(getattr(script, "policy_loss", None)) or ""
    return settings | {"about": about, "loss": loss, "changed": changed_settings(config)}


def resolved_defaults(config: ModelConfig, resolved: dict[str, dict]) -> dict:
    """The values of flags left at None, for this model and task."""
    if not hasattr(config, "system_prompt"):
        return resolved[config.kind]
    system_prompt = "" if config.kind == "tiny" else task_of(config.task, seconds_of(config)).system_prompt
    return resolved[config.kind] | {"system_prompt": system_prompt}


def changed_settings(config: PolicyConfig) -> list[str]:
    """The names of the settings that are not the defaults of the experiment with this model, on this machine."""
    fields = dataclasses.fields(config)
    left_open = {field.name: field.default for field in fields if field.default in (None, "auto")}
    resolved = getattr(sys.modules[type(config).__module__], "RESOLVED", RESOLVED)
    usual = resolve(dataclasses.replace(config, **left_open), resolved_defaults(config, resolved))
    defaults = {field.name: field.default for field in fields} | {name: getattr(usual, name) for name in left_open}
    return [name for name, value in defaults.items() if getattr(config, name) != value]


def describe_sources(config: ModelConfig, task: Task | None) -> dict[str, dict]:
    """By flag: the source and its SHA-256 or hub commit; one process of each machine computes the model's."""
    sources = {
        name: getattr(config, name, None)
        for name in ("chat_template", "data", "tools", "reward_model", "reward_functions", "judge")
    }
    if is_first_here():
        sources |= {"model": config.model_path or config.model}
        sources |= {"base": config.base} if config.adapter_path is not None else {}
        judge = None if getattr(config, "judge_url", None) else getattr(config, "judge_model", None)
        sources |= {"judge_model": judge and (find_directory(judge) or judge)}
    if task is not None:
        sources |= task.sources
    described = {name: _describe(name, source) for name, source in sources.items() if source not in (None, "new")}
    return {name: source for name, source in described.items() if source["content"] is not None}


def check_sources(directory: Path, before: dict[str, dict], now: dict[str, dict], has_failed: bool) -> None:
    """Refuse to resume with other content, except a corrected task and its data after a task error (`has_failed`)."""
    # A hub dataset that only one of them lists is no sign of a change: its commit may have been unknown
    then, eval_data = (Path(sources.get("eval_data", {"source": "."})["source"]) for sources in (before, now))
    if then == Path() and eval_data.is_file():
        raise UserError(f"{eval_data} was not there when {directory} began, which held out rows of --data: move it")
    if eval_data == Path() and then.is_absolute():
        raise UserError(f"{then}, which {directory} is evaluated on, is no longer there: restore it")
    for name in before.keys() & now.keys():
        then, content = before[name]["content"], now[name]["content"]
        if content == then:
            continue
        label = "the base of --model" if name == "base" else flag(name)
        what = f"{label} {now[name]['source']} has changed since {directory} began"
        if not has_failed or name in ("model", "base"):
            raise UserError(
                f"{what} ({then[:12]} then, {content[:12]} now): a resumed run needs the same content: restore it, or "
                "start a new run"
            )
        say(f"{what}; the run ended with an error of its task, and resumes with the new one")


def _describe(name: str, source: str | Path) -> dict:
    path = Path(source).expanduser()
    if path.is_dir():
        files = [file for file in sorted(path.iterdir()) if file.suffix in MODEL_FILES]
        sums = "".join(f"{file.name} {_sha256(file)}\n" for file in files)
        content = hashlib.sha256(sums.encode()).hexdigest() if len(files) != 1 else _sha256(files[0])
    elif path.is_file():
        content = _sha256(path)
    else:
        content = commit_of("model" if name in MODELS else "dataset", str(source).partition(":")[0])
    return {"source": str(source), "content": content}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
