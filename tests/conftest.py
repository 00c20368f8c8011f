"""Tests run on one thread: two contended threads were measured ten times slower."""

import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import forked
import pytest
import torch
from torch import distributed

from common.tasks import arithmetic, calculator, countdown, qa

from common.plumbing import run

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[1]
TINY_POLICY = ROOT / "assets" / "tiny_policy"
DRAW_RUN = run.draw_run


def pytest_addoption(parser) -> None:
    parser.addoption("--cold", action="store_true", help="start all programs of tests as users do: fork none")


def pytest_configure(config) -> None:
    """One server for all processes of pytest-xdist: they have its address in their environment."""
    is_worker = hasattr(config, "workerinput")
    if config.getoption("cold") or not forked.is_possible():
        return
    if not is_worker:
        config.add_cleanup(forked.start_server())
    if is_worker or config.getoption("dist", "no") == "no":  # else this process starts only the workers
        forked.use_server()


@pytest.fixture
def cold(monkeypatch) -> None:
    """The programs of the test are started as users start them."""
    if subprocess.Popen is forked.Popen:
        monkeypatch.setattr(subprocess, "Popen", forked.Popen.__base__)


@pytest.fixture(scope="session", autouse=True)
def short_runs(tmp_path_factory) -> Iterator[None]:
    """Runs in this process read 192 questions by default, and draw nothing: it would be most of their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "draw_run", lambda _: None)
        for task in (arithmetic, calculator, countdown, qa):
            path = tmp_path_factory.mktemp("questions") / task.TRAIN_DATA.name
            with task.TRAIN_DATA.open(encoding="utf-8") as lines:
                path.write_text("".join(itertools.islice(lines, 192)), encoding="utf-8")
            patch.setattr(task, "TRAIN_DATA", path)
        yield


@pytest.fixture(scope="module")
def drawn() -> Iterator[None]:
    """The runs of a file draw their curve and their page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "draw_run", DRAW_RUN)
        yield


@pytest.fixture(autouse=True)
def ended_process_group() -> Iterator[None]:
    """experiment_accelerate_ddp starts one, also of one process, which other tests would find."""
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


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


@pytest.fixture(scope="session")
def api_server() -> ModuleType:
    """The stand-in's module, under a name that hides no vLLM."""
    folder = ROOT / "tests" / "engine" / "stand_in" / "vllm"
    spec = importlib.util.spec_from_file_location("stand_in", folder / "__init__.py")
    package = sys.modules["stand_in"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return importlib.import_module("stand_in.entrypoints.openai.api_server")


@pytest.fixture
def stand_in(api_server) -> Iterator[Callable]:
    """Start a server on a free port of this process: stand_in(folder, **flags of vLLM) returns it, with its `url`."""
    servers = []

    def start(folder: Path = TINY_POLICY, **flags):
        usual = {"served_model_name": "policy", "max_model_len": 512, "logprobs_mode": "processed_logprobs"}
        usual |= {"generation_config": "vllm", "no_enable_chunked_prefill": True}
        servers.append(api_server.StandIn(folder, **usual | flags))
        return servers[-1].start()

    yield start
    for server in servers:
        server.stop()
