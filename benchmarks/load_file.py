"""Load a file of the repository that is no module of a package, such as a train.py."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

from harness.base.config import ROOT


def load_file(path: str, name: str | None = None) -> ModuleType:
    """The module, loaded once; under its file's name if another file imports it by that."""
    name = name or path.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        spec = spec_from_file_location(name, ROOT / path)
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
