"""Every experiment whose parent is experiment_accelerate: two and three processes train as one, tools, search and all.

Every number of processes is started once, for runs of all experiments. The inference engine is a stand-in for vLLM in
the process of the tests; `main` below is what a rank does.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed

import viewer
from common.errors import UserError
from common.parallel import gather, is_main

from harness.base.ranks import EndedElsewhereError
from harness.run.signals import leave

pytestmark = [pytest.mark.slow, pytest.mark.all_questions]

ROOT = Path(__file__).resolve().parents[2]
ENGINE = "experiment_engine"
EXPERIMENTS = ("experiment_multiturn_tool_calling", "experiment_multiturn_qa", ENGINE)
TOOLS = '''def tripled(number: int) -> str:
    """Three times a number.

    Args:
        number: to be tripled.
    """
    return str(3 * number)
'''
SHORT = ("--steps", "1", "--prompts-per-step", "2", "--group-size", "2", "--eval-prompts", "2", "--max-new-tokens", "4")


def flags_of(experiment: str, place: Path, url: str) -> list[str]:
    """Of six prompts with groups of four, ranks have conversations of different numbers of turns and lengths."""
    flags = ["--steps", "2", "--prompts-per-step", "6", "--group-size", "4", "--eval-prompts", "5", "--lr", "1e-5"]
    flags += ["--micro-batch-size", "4", "--seed", "1", "--name", "x", "--runs-dir", str(place)]
    if experiment == ENGINE:
        return [*flags, "--engine-url", url, "--max-new-tokens", "20"]
    return [*flags, "--max-new-tokens", "64", "--tools", str(place / "tools.py")]


# What every process does


def load(experiment: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(experiment, ROOT / experiment / "train.py")
    module = sys.modules[experiment] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(place: str, url: str) -> None:
    """One rank: the runs; then one in which a request of one rank gets a wrong answer from the engine."""
    torch.set_num_threads(1)
    viewer.draw_run = lambda _: None  # a figure and a page take a second
    for experiment in EXPERIMENTS:
        load(experiment).main(flags_of(experiment, Path(place), url))
    if int(os.environ["WORLD_SIZE"]) == 2:
        train_with_a_fault(sys.modules[ENGINE], place, url)
    distributed.barrier()
    leave(0)  # as programs of several processes end: threads of a process group can abort one that ends as usual


def train_with_a_fault(train: ModuleType, place: str, url: str) -> None:
    begin = train.begin_sampling

    def begin_with_a_fault(*arguments):
        if is_main():
            fault = json.dumps({"fault": "fewer_log_probs", "times": 1}).encode()
            urllib.request.urlopen(f"{url}/stand_in", fault).read()
        distributed.barrier()
        return begin(*arguments)

    train.begin_sampling = begin_with_a_fault
    ending = None
    try:
        train.main([*SHORT, "--engine-url", url, "--runs-dir", place, "--name", "wrong"])
    except (UserError, EndedElsewhereError) as error:
        ending = f"{type(error).__name__}: {error}"
    endings = gather(ending)
    if is_main():
        (Path(place) / "endings.json").write_text(json.dumps(endings))


# The tests


@pytest.fixture(scope="module")
def server(api_server) -> Iterator:
    stand_in = api_server.StandIn(
        ROOT / "assets" / "tiny_policy", served_model_name="policy", max_model_len=512,
        no_enable_chunked_prefill=True, logprobs_mode="processed_logprobs",
    )  # fmt: skip
    yield stand_in.start()
    stand_in.stop()


@pytest.fixture(scope="module")
def runs_of(server, tmp_path_factory) -> Callable[[int], tuple[Path, int]]:
    """What so many ranks have written, and how often they have pushed weights to the engine."""

    @functools.cache
    def start(num_processes: int) -> tuple[Path, int]:
        place = tmp_path_factory.mktemp("runs")
        (place / "tools.py").write_text(TOOLS)
        before = server.calls["/collective_rpc"]
        command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes), __file__)
        result = subprocess.run(
            [sys.executable, *command, str(place), server.url],
            **{"env": os.environ | {"OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True, "cwd": ROOT},
            timeout=300,
        )
        assert result.returncode == 0, result.stderr[-3000:]
        return place, server.calls["/collective_rpc"] - before

    return start


@pytest.fixture(scope="module")
def alone(server, tmp_path_factory, load_script) -> Callable[[str], tuple[Path, int]]:
    @functools.cache
    def start(experiment: str) -> tuple[Path, int]:
        place = tmp_path_factory.mktemp("alone")
        (place / "tools.py").write_text(TOOLS)
        before = server.calls["/collective_rpc"]
        load_script(f"{experiment}/train.py").main(flags_of(experiment, place, server.url))
        return place / experiment / "x", server.calls["/collective_rpc"] - before

    return start


def rows_of(directory: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_several_processes_train_as_one(runs_of, alone, experiment, num_processes):
    new, (old, _) = runs_of(num_processes)[0] / experiment / "x", alone(experiment)
    samples, expected = rows_of(new, "samples"), rows_of(old, "samples")
    assert len(samples) == len(expected) >= 16  # the first two groups of each step
    for row, other in zip(samples, expected, strict=True):
        for name in ("step", "prompt_index", "completion_index", "ids", "rewards", "finish_reason", "turns"):
            assert row.get(name) == other.get(name)
        assert row["advantage"] == pytest.approx(other["advantage"])
    assert any(row["advantage"] for row in expected)
    if experiment != ENGINE:
        assert {len(row["turns"]) for row in expected} >= {1, 3}
    for metrics, others in zip(rows_of(new, "metrics"), rows_of(old, "metrics"), strict=True):
        assert metrics.keys() - {"time/waiting"} == others.keys() - {"time/waiting"}
        for name in others.keys() - {key for key in others if key.startswith(("time/", "memory/"))}:
            rounding = 1e-4 if "difference" in name else 1e-5  # a difference is nothing but rounding here
            assert metrics[name] == pytest.approx(others[name], rel=1e-4, abs=rounding), name
    weights, others = (load_file(directory / "final" / "model.safetensors") for directory in (new, old))
    folder = "tiny_policy" if experiment == ENGINE else "tiny_policy_tools"
    begun = load_file(ROOT / "assets" / folder / "model.safetensors")
    assert weights.keys() == others.keys()
    assert all((weights[name] - others[name]).abs().max() <= 1e-5 for name in weights)
    assert max((weights[name] - begun[name]).abs().max() for name in weights) > 1e-5


def test_one_rank_pushes_weights_for_all(runs_of, alone):
    """Before training and after each of two steps. DistributedDataParallel writes all weights once: one push more."""
    assert alone(ENGINE)[1] == 3
    assert runs_of(2)[1] == 4 + 2  # the run with a fault has no update


def test_a_wrong_answer_to_one_rank_ends_all_with_its_sentence(runs_of):
    ending, other = json.loads((runs_of(2)[0] / "endings.json").read_text())
    assert "log-probs for" in ending
    assert ending.startswith("UserError: the engine at http://127.0.0.1:")
    assert other == ending  # one of them is said, see test_failures.py


if __name__ == "__main__":
    main(*sys.argv[1:])
