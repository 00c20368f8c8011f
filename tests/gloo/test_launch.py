"""A launch that starts less than it was asked for is refused; each test is a real launch, on the CPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "tests/gloo/launched.py"
ACCELERATE = [str(Path(sys.executable).with_name("accelerate")), "launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
USE_TORCHRUN = f"use torchrun --nproc-per-node 2 {SCRIPT}"


@pytest.fixture
def launch(tmp_path):
    """Run a command in the repository's root, where accelerate finds no configuration of this machine's user."""

    def run(command: list[str], *flags: str, **environment: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)} | environment
        command = [*command, SCRIPT, *flags]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)

    return run


SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames $SLURM_JOB_NODELIST" ] && printf "127.0.0.1\\nsecond\\n"
"""
SRUN = """#!/bin/sh
shift  # --kill-on-bad-exit=1
SLURM_NODEID=1 "$@" &
SLURM_NODEID=0 "$@" && wait $!
"""


def config(name: str) -> list[str]:
    return ["--config_file", f"accelerate_configs/{name}.yaml", "--main_process_port", "0"]


def refusals(result: subprocess.CompletedProcess) -> list[str]:
    """The sentences of the processes that refuse the launch; none has gone on."""
    assert result.returncode != 0
    assert "rank" not in result.stdout
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


def test_as_many_processes_as_were_asked_for_start(launch):
    for command, ranks in (
        ([*ACCELERATE, *config("single_cpu")], ["rank 0 of 1"]),
        (TORCHRUN, ["rank 0 of 2", "rank 1 of 2"]),
    ):
        result = launch(command)
        assert result.returncode == 0, result.stderr
        assert sorted(result.stdout.splitlines()) == ranks


def test_the_slurm_script_connects_two_launchers(launch, tmp_path):
    """Commands in place of SLURM's start both machines' launchers here; each starts one process."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    result = launch(
        ["bash", "accelerate_configs/two_nodes.slurm"],
        PATH=os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]),
        SCRIPT=SCRIPT,
        MAIN_PROCESS_PORT=str(port),
        **{"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.parametrize("by", ["flags", "the user's file"])
def test_two_processes_where_accelerate_starts_one_are_refused(launch, tmp_path, by):
    command = ACCELERATE
    if by == "flags":
        command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num-processes=2"]
    else:
        path = tmp_path / "accelerate/default_config.yaml"  # where `accelerate config` writes
        path.parent.mkdir()
        path.write_text(yaml.safe_dump({"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True}))
    (sentence,) = refusals(launch(command))
    assert sentence == f"error: 2 processes were asked for, but Accelerate started 1: {USE_TORCHRUN}"


WITHOUT_A_GPU = (
    (
        [*ACCELERATE, *config("fsdp2")],
        (),
        "error: FSDP with 2 processes was asked for, but Accelerate gave MULTI_CPU with 2: it needs a GPU for each "
        f"process; on this machine {USE_TORCHRUN}, which does not shard",
    ),
    (
        TORCHRUN,
        ("--not-on-cpu",),
        f"error: 2 processes were asked for, but Accelerate started 1, each for itself: {USE_TORCHRUN}",
    ),
)


@pytest.mark.parametrize(("command", "flags", "expected"), WITHOUT_A_GPU, ids=["fsdp", "each alone"])
def test_what_needs_a_gpu_is_refused_without_one(launch, command, flags, expected):
    """By one process at least: the launcher ends the other one, perhaps before it has spoken."""
    assert set(refusals(launch(command, *flags, CUDA_VISIBLE_DEVICES=""))) == {expected}


NOT_SUPPORTED = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_MIXED_PRECISION": "fp16"}


@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_what_the_training_does_not_support_is_refused(launch, name):
    (sentence,) = refusals(launch([sys.executable], **{name: NOT_SUPPORTED[name]}))
    what = name.removeprefix("ACCELERATE_").lower()
    assert f"{what} {NOT_SUPPORTED[name]} is not supported" in sentence
