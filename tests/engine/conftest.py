"""The server for the tests of engines: the stand-in of ../conftest.py, or a real vLLM whose address is in VLLM_URL."""

import copy
import os
from collections.abc import Callable, Iterator

import pytest

from common.policy import Policy

from harness.base.config import RunConfig
from harness.engines.engine import Engine
from harness.models.loading import load_policy

collect_ignore = ["stand_in"]  # pytest would import its package as `vllm`


@pytest.fixture
def engine_url(request) -> str:
    """A server of data/policies/tiny_policy: the one in VLLM_URL, or else a stand-in."""
    return os.environ.get("VLLM_URL") or request.getfixturevalue("stand_in")().url


@pytest.fixture
def connect(tmp_path) -> Iterator[Callable[..., Engine]]:
    """Make an engine from a server's address; at the end, waiting requests are cancelled."""
    engines = []

    def start(url: str, *settings) -> Engine:
        engines.append(Engine(url, tmp_path / f"engine{len(engines)}", *settings))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(engine_url, connect) -> Engine:
    return connect(engine_url)


@pytest.fixture(scope="session")
def loaded() -> Policy:
    return load_policy(RunConfig(device="cpu"))


@pytest.fixture
def policy(loaded) -> Iterator[Policy]:
    """The tiny policy, for tests that may change it."""
    weights = copy.deepcopy(loaded.state_dict())
    yield loaded
    loaded.load_state_dict(weights)
    loaded.temperature, loaded.stop_texts = 1.0, ()
    loaded.zero_grad()
