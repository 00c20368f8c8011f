"""Tests run on one thread: two contended threads were measured ten times slower."""

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """Import a file of the repository by its path, e.g. load_script("experiment_base/train.py")."""
    modules: dict[str, ModuleType] = {}

    def load(path: str) -> ModuleType:
        if path not in modules:
            name = path.removesuffix(".py").replace("/", "__")
            spec = importlib.util.spec_from_file_location(name, ROOT / path)
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            modules[path] = module  # only now: an import that fails fails again
        return modules[path]

    return load
