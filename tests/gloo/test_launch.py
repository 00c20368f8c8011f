"""A launch is refused if it starts less than requested, or a variant that training does not support."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from accelerate.utils import DistributedType
from run_files import ROOT

from common.errors import UserError

from harness.processes import processes
from harness.processes.processes import Requested, check_divides, check_launch

SCRIPT = "tests/gloo/launched.py"
ACCELERATE = [str(Path(sys.executable).with_name("accelerate")), "launch"]
USE_TORCHRUN = f"use torchrun --nproc-per-node 2 {SCRIPT}"


@pytest.mark.parametrize(
    ("asked", "got", "sentence"),
    [
        (Requested(2, None), {"num_processes": 1}, f"2 processes were asked for, but .* started 1: {USE_TORCHRUN}$"),
        (Requested(5, None), {"num_processes": 4}, "5 processes .* started 4: give a multiple of the number of mach"),
        (Requested(2, "fsdp"), {}, f"FSDP with 2 .* gave MULTI_CPU with 2: .* {USE_TORCHRUN}, which does not shard$"),
        (Requested(2, None, 4), {}, "gradient_accumulation_steps 4 is not supported: set 1 in"),
        (Requested(2, None), {"mixed_precision": "fp16"}, "mixed_precision fp16 is not supported: set bf16, or no, in"),
        (Requested(2, "fsdp"), {"distributed_type": DistributedType.FSDP}, "fsdp_version 1 is not supported: set 2 in"),
    ],
)
def test_what_is_not_what_was_asked_for_is_refused(monkeypatch, asked, got, sentence):
    state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=SimpleNamespace(fsdp_version=1))
    usual = {"num_processes": 2, "distributed_type": DistributedType.MULTI_CPU, "mixed_precision": "no", "state": state}
    usual |= {"device": SimpleNamespace(type="cpu"), "gradient_accumulation_steps": 1}
    monkeypatch.setattr(sys, "argv", [SCRIPT])
    with pytest.raises(UserError, match=f"^{sentence}"):
        check_launch(asked, SimpleNamespace(**usual | got))


@pytest.mark.parametrize(("name", "on_gpus"), [("multi_gpu", True), ("multi_node", True), ("single_cpu", False)])
def test_whether_gpus_were_asked_for_is_read(monkeypatch, name, on_gpus):
    arguments = ["--config_file", str(ROOT / f"recipes/accelerate_configs/{name}.yaml"), SCRIPT]
    monkeypatch.setattr(processes, "_arguments_of_accelerate_launch", lambda: arguments)
    assert processes.requested_launch().on_gpus is on_gpus


def test_unequal_parts_are_refused(monkeypatch):
    monkeypatch.setattr(processes, "data_size", lambda: 2)
    check_divides("--prompts-per-step", 4, "prompts")
    with pytest.raises(UserError, match=r"^--prompts-per-step: 5 prompts cannot be divided among 2 processes: use "):
        check_divides("--prompts-per-step", 5, "prompts")


# Real launches, on the CPU


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


@pytest.mark.slow
def test_the_slurm_script_connects_two_launchers(launch, tmp_path):
    """Replacements for SLURM's commands start both machines' launchers here; each starts one process."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    result = launch(
        ["bash", "recipes/accelerate_configs/two_nodes.slurm"],
        PATH=os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]),
        SCRIPT=SCRIPT,
        MAIN_PROCESS_PORT=str(port),
        **{"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1"},
    )
    assert result.returncode == 0, result.stderr
    told = "GPUs were asked for and none is used: training runs on the CPU, processes: 2"
    said = (told, "rank 0 of 2", "rank 1 of 2")  # by two processes into one pipe: a line may end in another one
    assert [result.stdout.count(line) for line in said] == [1, 1, 1], result.stdout


FSDP2 = ["--config_file", "recipes/accelerate_configs/fsdp2.yaml", "--main_process_port", "0"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "flags", "sentence"),
    [
        (ACCELERATE, (), f"2 processes were asked for, but Accelerate started 1: {USE_TORCHRUN}"),
        ([*ACCELERATE, *FSDP2], (), "FSDP with 2 processes was asked for, but Accelerate gave MULTI_CPU with 2: it"),
        (TORCHRUN, ("--not-on-cpu",), "2 processes were asked for, but Accelerate started 1, each for itself: use"),
    ],
    ids=["the user's file", "fsdp", "each alone"],
)
def test_what_was_asked_for_is_read_where_it_was_said(launch, tmp_path, command, flags, sentence):
    """At least one process says it: the launcher ends the other one, perhaps before it has printed."""
    path = tmp_path / "accelerate/default_config.yaml"  # the path that `accelerate config` writes to
    path.parent.mkdir()
    path.write_text(yaml.safe_dump({"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True}))
    result = launch(command, *flags, CUDA_VISIBLE_DEVICES="")
    assert result.returncode != 0
    assert "rank" not in result.stdout
    said = {line for line in result.stderr.splitlines() if line.startswith("error: ")}
    assert len(said) == 1
    assert said.pop().startswith(f"error: {sentence}")
