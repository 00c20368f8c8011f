"""config.json of a run: every setting as resolved, the command, the machine, and what the run was made from."""

import dataclasses
import inspect
import json
import sys
import typing
from pathlib import Path

import torch

from common.errors import UserError

from common.plumbing.config import PolicyConfig
from common.plumbing.files import replace_file

# What config.json holds besides flags
NOT_FLAGS = {"versions", "machine", "gpu", "commit", "processes", "experiment", "command", "sources", "task_failed"}
NOT_FLAGS |= {"about", "loss"}  # what train.py says about itself, and about the terms of its loss
# Flags of where a run finds its engine, which a resumed run may change; experiments without an engine have none
ENGINE_PLACES = ("engine_url", "engine_start")
BATCH_SIZES = ("micro_batch_size", "generation_batch_size")  # may change, too: they bound memory and change no update


def write_settings(directory: Path, settings: dict) -> None:
    """Replace config.json, completely or not at all."""
    replace_file(directory / "config.json", (json.dumps(settings, indent=2) + "\n").encode())


def change_settings(directory: Path, **changes: object) -> None:
    """Replace some entries of config.json."""
    settings = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    write_settings(directory, settings | changes)


def read_settings(directory: Path, config_class: type[PolicyConfig], what: str = "--resume") -> dict:
    """
    Args:
        config_class: of the experiment that reads them; the settings that it knows must be of its types.
        what: how the user has named the directory.

    Raises:
        UserError: the directory is not that of a run, or its config.json is damaged.
    """
    try:
        settings = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{what} {directory}: no config.json of a run can be read there ({error})") from error
    if not isinstance(settings, dict) or not isinstance(settings.get("experiment"), str):
        run = next((path for path in directory.resolve().parents if (path / "checkpoints").is_dir()), None)
        hint = "" if run is None else f"; it belongs to the run {run}, which resumes from its newest checkpoint"
        raise UserError(f"{what} {directory}: its config.json is not that of a run{hint}")
    from pydantic import TypeAdapter, ValidationError

    wanted = typing.get_type_hints(config_class, include_extras=True)
    for name in {field.name for field in dataclasses.fields(config_class)} & settings.keys():
        value = settings[name]
        try:
            TypeAdapter(wanted[name]).validate_python(tuple(value) if isinstance(value, list) else value, strict=True)
        except ValidationError:
            raise UserError(f"{what} {directory}: config.json is damaged: {name} cannot be {value!r}") from None
    return settings


def experiment_of(config: PolicyConfig) -> str:
    """The name of the directory of the train.py that defines the settings' class."""
    return Path(sys.modules[type(config).__module__].__file__).resolve().parent.name


def describe_settings(config: PolicyConfig, machine: dict) -> dict:
    script = sys.modules[type(config).__module__]
    settings = dataclasses.asdict(config) | machine | {"experiment": experiment_of(config), "command": sys.argv}
    settings["about"] = (script.__doc__ or "").strip().partition("\n")[0]
    settings["loss"] = inspect.getdoc(getattr(script, "policy_loss", None)) or ""
    if machine.get("processes", 1) > 1:
        settings["device"] = torch.device(config.device).type  # without the number of the main process's GPU
    return settings


def wandb_settings(experiment: str, directory: Path, config: PolicyConfig) -> dict | None:
    """Keyword arguments of `wandb.init`, or None without --wandb."""
    if not config.wandb:
        return None
    return {"project": experiment, "name": directory.name, "config": dataclasses.asdict(config)}
