"""Tests run on one thread: two threads that compete for a core were ten times slower."""

import importlib.util
import inspect
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # so that programs need not repeat the compilation

import forked
import pytest
import torch
from torch import distributed

import viewer
from tasks import arithmetic, calculator, countdown, qa

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell switches it off in what it runs with &, or nohup
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[1]
TINY_POLICY = ROOT / "data" / "policies" / "tiny_policy"


def pytest_addoption(parser) -> None:
    parser.addoption("--cold", action="store_true", help="start all programs of tests as users do: fork none")


def pytest_configure(config) -> None:
    """Start one server for all processes of pytest-xdist, which get its address from their environment."""
    is_worker = hasattr(config, "workerinput")
    if config.getoption("cold") or not forked.is_possible():
        return
    if not is_worker:
        config.add_cleanup(forked.start_server())
    if is_worker or config.getoption("dist", "no") == "no":  # otherwise this process only starts the workers
        forked.use_server()


@pytest.fixture
def cold(monkeypatch) -> None:
    """Start the test's programs as users do, without the fork server."""
    if subprocess.Popen is forked.Popen:
        monkeypatch.setattr(subprocess, "Popen", forked.Popen.__base__)


@pytest.fixture(scope="session")
def few_questions(tmp_path_factory) -> dict[ModuleType, Path]:
    """Limits each bundled task to its first 192 training questions."""
    folder, files = tmp_path_factory.mktemp("questions"), {}
    for task in (arithmetic, calculator, countdown, qa):
        files[task] = folder / task.TRAIN_DATA.name
        with task.TRAIN_DATA.open(encoding="utf-8") as lines:
            files[task].write_text("".join(itertools.islice(lines, 192)), encoding="utf-8")
    return files


@pytest.fixture(scope="module", autouse=True)
def short_runs(request, few_questions) -> Iterator[None]:
    """Runs in this process read few questions and draw nothing, unless the marks of the file ask for more."""
    marks = {mark.name for mark in request.node.iter_markers()}
    with pytest.MonkeyPatch.context() as patch:
        if "drawn" not in marks:
            patch.setattr(viewer, "draw_run", lambda _: None)
        if "all_questions" not in marks:
            for task, path in few_questions.items():
                patch.setattr(task, "TRAIN_DATA", path)
        yield


@pytest.fixture(autouse=True)
def ended_process_group() -> Iterator[None]:
    """End the process group that experiment_accelerate_ddp starts even for one process; other tests would find it."""
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """Import a file of the repository, e.g. load_script("experiment_base/train.py"), as python does."""
    modules: dict[str, ModuleType] = {}

    def load(path: str) -> ModuleType:
        if path not in modules:
            name = path.removesuffix(".py").replace("/", "__")
            spec = importlib.util.spec_from_file_location(name, ROOT / path)
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            with pytest.MonkeyPatch.context() as patch:
                patch.syspath_prepend((ROOT / path).parent)  # as python does
                spec.loader.exec_module(module)
            modules[path] = module  # only now: a failed import must fail again
        return modules[path]

    return load


@pytest.fixture(scope="session")
def update() -> Callable:
    """`update` of any train.py, in one process: update(train, config, policy, optimizer, experience, step)."""
    from accelerate import Accelerator

    def call(train: ModuleType, config, *arguments):
        needs_accelerator = "accelerator" in inspect.signature(train.update).parameters
        return train.update(config, *((Accelerator(cpu=True),) if needs_accelerator else ()), *arguments)

    return call


@pytest.fixture(scope="session")
def api_server() -> ModuleType:
    """The stand-in's module, under a name that does not hide vLLM."""
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
        usual |= {"no_enable_chunked_prefill": True}
        servers.append(api_server.StandIn(folder, **usual | flags))
        return servers[-1].start()

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def make_own(tmp_path_factory) -> Callable[..., ModuleType]:
    """Copy the train.py of experiment_base to policy_gradients/mine/, replace some texts, and import it."""

    def make(*changes: tuple[str, str]) -> ModuleType:
        text = (ROOT / "experiment_base" / "train.py").read_text(encoding="utf-8")
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path = tmp_path_factory.mktemp("own") / "policy_gradients" / "mine" / "train.py"
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
        name = f"own_{path.parents[2].name}"
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return make


@pytest.fixture(scope="session")
def experiment_mine(make_own) -> ModuleType:
    """The example of docs/your_algorithm.md, with its own formula and diagnostic."""
    lines = (ROOT / "docs" / "your_algorithm.md").read_text(encoding="utf-8").splitlines()
    old, new = (next(line[1:] for line in lines if line.startswith(sign)) for sign in "-+")
    last = "    return token_loss * mask / "
    return make_own((old, new), ("(-min(ratio A, clip(ratio) A) + beta KL)", "of REINFORCE"), (
        last, f'    diagnostics["surprise"] = -log_probs\n{last}'
    ))  # fmt: skip
