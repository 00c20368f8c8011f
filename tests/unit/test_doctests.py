"""The examples in docstrings, module by module."""

import builtins
import doctest
import importlib
from pathlib import Path

import pytest

from harness.environments.other_packages import ADAPTERS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "doctor", "fast", "harness", "tasks", "viewer")
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)
SCRIPTS = (
    "imitation/tiny_policy/warm_start.py",
    "benchmarks/takeaways.py",
    "benchmarks/what_rl_teaches.py",
    "imitation/tiny_policy/make_gsm8k_easy.py",
)


@pytest.mark.parametrize("name", [*MODULES, *SCRIPTS])
def test_the_examples_of_a_module_are_true(name, load_script):
    for adapter in ADAPTERS.values():
        if name == f"harness.environments.{adapter.file}":
            pytest.importorskip(adapter.package)
    results = doctest.testmod(load_script(name) if name in SCRIPTS else importlib.import_module(name))
    vars(builtins).pop("_", None)  # the last value of an example
    assert results.attempted
    assert not results.failed
