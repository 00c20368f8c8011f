"""For the examples in docstrings, which are tests too."""

import builtins
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

# It cannot be imported without requirements-search.txt.
collect_ignore = [] if find_spec("fastapi") else ["common/plumbing/retrieval/server.py"]


@pytest.fixture(autouse=True)
def without_last_value() -> Iterator[None]:
    """An example leaves the value that it shows in `builtins._`; tyro, imported later, expects something hashable."""
    yield
    vars(builtins).pop("_", None)
