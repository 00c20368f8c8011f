"""config.json of a run: every setting as resolved, the command, the machine."""

import dataclasses
import json
import sys
from pathlib import Path

from common.errors import UserError

from common.plumbing.config import PolicyConfig

NOT_FLAGS = ("versions", "machine", "gpu", "commit", "experiment", "command")  # what config.json holds besides flags


def write_settings(directory: Path, settings: dict) -> None:
    """Replace config.json, completely or not at all."""
    partial = directory / "config.json.partial"
    partial.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    partial.replace(directory / "config.json")


def read_settings(directory: Path) -> dict:
    """
    Raises:
        UserError: the directory is not that of a run.
    """
    try:
        return json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--resume {directory}: no config.json of a run can be read there ({error})") from error


def describe_settings(experiment: str, config: PolicyConfig, machine: dict) -> dict:
    return dataclasses.asdict(config) | machine | {"experiment": experiment, "command": sys.argv}


def wandb_settings(experiment: str, directory: Path, config: PolicyConfig) -> dict | None:
    """Keyword arguments of `wandb.init`, or None without --wandb."""
    if not config.wandb:
        return None
    return {"project": experiment, "name": directory.name, "config": dataclasses.asdict(config)}
