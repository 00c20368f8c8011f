"""Two processes and one inference engine, with the lines of processes.patch: the run of one process.

The server is in the process of the tests; what the ranks do is below, in `main`.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed

import viewer
from common.errors import UserError
from common.parallel import gather, is_main

from common.plumbing.ranks import EndedElsewhereError
from common.plumbing.signals import leave

pytestmark = [pytest.mark.slow, pytest.mark.all_questions]

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = "experiment_engine"
# Of three prompts with groups of six, each rank has half of the second group
FLAGS = ("--steps", "2", "--prompts-per-step", "3", "--group-size", "6")
FLAGS += ("--eval-prompts", "2", "--max-new-tokens", "20", "--micro-batch-size", "4", "--lr", "1e-5")
SHORT = ("--steps", "1", "--prompts-per-step", "2", "--group-size", "2", "--eval-prompts", "2", "--max-new-tokens", "4")


def main(place: str, url: str) -> None:
    """One rank: a run; then one in which one of two requests, of any rank, gets an answer that is wrong."""
    torch.set_num_threads(1)
    viewer.draw_run = lambda _: None  # a figure and a page take a second
    spec = importlib.util.spec_from_file_location(EXPERIMENT, Path(place) / EXPERIMENT / "train.py")
    train = sys.modules[EXPERIMENT] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    flags = ("--engine-url", url, "--runs-dir", place, "--name")
    train.main([*FLAGS, *flags, "x"])
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
        train.main([*SHORT, *flags, "wrong"])
    except (UserError, EndedElsewhereError) as error:
        ending = f"{type(error).__name__}: {error}"
    endings = gather(ending)
    if is_main():
        (Path(place) / "endings.json").write_text(json.dumps(endings))
    distributed.barrier()
    leave(0)  # as programs of several processes end: threads of a process group can abort one that ends as usual


@pytest.fixture(scope="module")
def server(api_server) -> Iterator:
    stand_in = api_server.StandIn(
        ROOT / "assets" / "tiny_policy", served_model_name="policy", max_model_len=512,
        no_enable_chunked_prefill=True, logprobs_mode="processed_logprobs",
    )  # fmt: skip
    yield stand_in.start()
    stand_in.stop()


@pytest.fixture(scope="module")
def two(server, tmp_path_factory) -> Path:
    """What two ranks have written."""
    place = tmp_path_factory.mktemp("two")
    (place / EXPERIMENT).mkdir()
    shutil.copy(ROOT / EXPERIMENT / "train.py", place / EXPERIMENT)
    subprocess.run(["git", "apply", ROOT / EXPERIMENT / "processes.patch"], cwd=place, check=True)
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, str(place), server.url)
    result = subprocess.run(
        [sys.executable, *command],
        **{"env": os.environ | {"OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True, "cwd": ROOT},
        timeout=200,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return place


def rows_of(directory: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


def test_two_ranks_and_an_engine_train_as_one_process(server, two, tmp_path, load_script):
    """The main rank pushes for both."""
    num_pushes = server.calls["/collective_rpc"]
    flags = ("--engine-url", server.url, "--runs-dir", str(tmp_path), "--name", "x")
    load_script(f"{EXPERIMENT}/train.py").main([*FLAGS, *flags])
    assert server.calls["/collective_rpc"] - num_pushes == 3  # before training, and after each of two steps
    assert num_pushes == 4 + 2  # DistributedDataParallel writes all weights once; the run with a fault has no update
    new, old = two / EXPERIMENT / "x", tmp_path / EXPERIMENT / "x"
    samples, expected = rows_of(new, "samples"), rows_of(old, "samples")
    assert len(samples) == len(expected) >= 24  # the first two groups of each step
    for row, other in zip(samples, expected, strict=True):
        for name in ("step", "prompt_index", "completion_index", "ids", "rewards", "finish_reason"):
            assert row[name] == other[name]
    assert any(row["advantage"] for row in expected)
    for metrics, others in zip(rows_of(new, "metrics"), rows_of(old, "metrics"), strict=True):
        assert metrics.keys() - {"time/waiting"} == others.keys()
        for name in others.keys() - {key for key in others if key.startswith(("time/", "memory/"))}:
            rounding = 1e-4 if "difference" in name else 1e-5  # a difference is nothing but rounding here
            assert metrics[name] == pytest.approx(others[name], rel=1e-4, abs=rounding), name
    weights, others = (load_file(directory / "final" / "model.safetensors") for directory in (new, old))
    begun = load_file(ROOT / "assets" / "tiny_policy" / "model.safetensors")
    assert weights.keys() == others.keys()
    assert all((weights[name] - others[name]).abs().max() <= 1e-5 for name in weights)
    assert max((weights[name] - begun[name]).abs().max() for name in weights) > 1e-5


def test_a_wrong_answer_to_one_rank_ends_all_with_its_sentence(two):
    (ending, other) = json.loads((two / "endings.json").read_text())
    assert "log-probs for" in ending
    assert ending.startswith("UserError: the engine at http://127.0.0.1:")
    assert other == ending  # one of them is said, see test_failures.py


if __name__ == "__main__":
    main(*sys.argv[1:])
