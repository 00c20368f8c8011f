"""The command line: defaults are resolved from the model, and impossible settings are refused before a run begins.

--threads auto: which source wins, which cores count, and that a resumed run keeps its number.
"""

import dataclasses
import importlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import UserError
from common.policy import Policy
from common.sampling import _draw

from harness.base import interrupt, machine
from harness.base.config import RESOLVED, TINY_POLICY, InputPath, ModelConfig, NotNegative, RunConfig
from harness.base.machine import peak_memory_bytes, with_threads
from harness.cli.parse import parse_config
from harness.processes.processes import of_this_process
from harness.run.settings import describe_settings


def parse(load_script, *argv: str) -> RunConfig:
    return parse_config(load_script("experiment_base/train.py").Config, argv, description="")


ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class OwnConfig(RunConfig):
    """An experiment's settings as a user might declare them."""

    margin: NotNegative = 0.5  # by how much a pair has to differ
    # grader of the answers
    grader: InputPath | None = None
    task: str = "qa"  # only another default: what the parent says of the flag holds


def test_a_field_says_everything_about_its_flag(monkeypatch, tmp_path, capsys):
    """Its help, range and group, and whether it is a path; nothing else needs an entry."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grader.txt").write_text("mine")
    nothing_open = {"tiny": {}}
    assert parse_config(OwnConfig, ["--grader", "grader.txt"], "", nothing_open).grader == str(tmp_path / "grader.txt")
    for argv, sentence in (
        (["--margin", "-1"], "^--margin must be at least 0, not -1"),
        (["--grader", "~nobody-here/x"], "^--grader ~nobody-here/x: this path cannot be used"),
        (["--task", "~nobody-here/x"], "^--task ~nobody-here/x: this path cannot be used"),
    ):
        with pytest.raises(UserError, match=sentence):
            parse_config(OwnConfig, argv, "", nothing_open)
    with pytest.raises(SystemExit):
        parse_config(OwnConfig, ["--help-all"], "")
    first, others = " ".join(capsys.readouterr().out.replace("│", " ").split()).split("policy options")
    assert "by how much a pair has to differ (at least 0; default: 0.5)" in first
    assert "grader of the answers (default: none)" in first
    assert "--task" in others


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("", None),
        ("--data data/long_sums.jsonl", None),
        ("--data mine.jsonl", "--data"),
        ("--task countdown", "--task"),
        ("--task countdown --model tiny_countdown", None),
        ("--data mine.jsonl --model ./model", None),
    ],
)
def test_a_bundled_policy_says_what_it_does_not_know(load_script, tmp_path, monkeypatch, capsys, flags, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(TINY_POLICY)
    parse(load_script, *(word.replace("data/", f"{ROOT}/data/") for word in flags.split()))
    told = capsys.readouterr().out
    assert (f"if {named} asks" in told) if named else not told


def test_defaults_are_resolved_from_the_model(load_script, tmp_path):
    shutil.copytree(TINY_POLICY, tmp_path / "copy")
    for model in ("tiny", str(TINY_POLICY), str(tmp_path / "copy")):
        config = parse(load_script, "--model", model)
        assert {name: getattr(config, name) for name in RESOLVED["tiny"]} == RESOLVED["tiny"]
    assert parse(load_script, "--model", "tiny", "--lora-rank", "2").lr == 10 * RESOLVED["tiny"]["lr"]
    config = parse(load_script, "--model", "owner/name", "--lr", "0.5")
    assert {name: getattr(config, name) for name in RESOLVED["full"]} == RESOLVED["full"] | {"lr": 0.5}


def test_the_settings_of_a_run_start_it_again(load_script, tmp_path):
    """All but its name; YAML's own reading of 1e-5 is a text."""
    flags = ("--lr", "1e-5", "--at-most", "num_terms=2", "num_digits=1", "--gradient-checkpointing", "--name", "first")
    first = parse(load_script, *flags)
    settings = describe_settings(first, {"processes": 1, "machine": "x"})
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    again = parse(load_script, "--config", str(tmp_path / "config.json"), "--at-most", "num_terms=3")
    assert (first.lr, again.at_most, again.name) == (1e-5, ("num_terms=3",), None)
    other = {"name": None, "at_most": again.at_most, "config": str(tmp_path / "config.json")}
    assert again == dataclasses.replace(first, **other)


def test_stop_texts_are_given_one_by_one_and_are_those_of_the_run_that_is_resumed(load_script, tmp_path):
    first = parse(load_script, "--stop", "</response>", "--stop=--- \n", "--name", "first")
    assert first.stop == ("</response>", "--- \n")
    settings = describe_settings(first, {"processes": 1, "machine": "x"})
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    of_file, resume = ("--config", str(tmp_path / "config.json")), ("--resume", str(tmp_path))
    assert parse(load_script, *of_file).stop == first.stop
    assert parse(load_script, *of_file, "--stop", "x").stop == ("x",)
    assert parse(load_script, *resume).stop == first.stop
    assert parse(load_script, *resume, "--stop", "</response>", "--stop=--- \n").stop == first.stop
    with pytest.raises(UserError, match=r"^--stop x differs from the run's </response> --- "):
        parse(load_script, *resume, "--stop", "x")


class OtherMachine:
    """Pretend that PyTorch finds certain accelerators: as much as is testable without one."""

    def __init__(self, monkeypatch, *kinds: str):
        first = torch.device(kinds[0]) if kinds else None
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in kinds)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: first)
        for kind in ("cuda", "mps", "xpu"):
            monkeypatch.setattr(torch.get_device_module(kind), "device_count", lambda kind=kind: 2 * (kind in kinds))


@pytest.mark.parametrize(
    ("kinds", "device", "dtype"),
    [
        ((), "cpu", "float32"),
        (("mps",), "mps", "float32"),
        (("xpu",), "xpu", "float32"),
        (("cuda",), "cuda", "bfloat16"),
        (("xpu", "cuda"), "cuda", "bfloat16"),
    ],
)
def test_auto_takes_cuda_else_another_accelerator_else_the_cpu(load_script, monkeypatch, kinds, device, dtype):
    OtherMachine(monkeypatch, *kinds)
    config = parse(load_script, "--model", "owner/name")
    assert (config.device, config.dtype) == (device, dtype)


def test_memory_and_autocast_know_every_kind_of_device():
    for device in ("cpu", "mps", "xpu"):
        assert peak_memory_bytes(device) > 10**7
        autocast = Policy.autocast(SimpleNamespace(device=torch.device(device), compute_dtype=torch.bfloat16))
        assert autocast.device == device


class Dtypes(TorchDispatchMode):
    """Records the types of all computed tensors."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.seen |= {x.dtype for x in (result if isinstance(result, tuple) else (result,)) if torch.is_tensor(x)}
        return result


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_tokens_can_be_drawn_without_float64(top_p):
    logits = torch.tensor([[0.25, 0.5, 0.25]]).log().expand(3, 3)
    uniforms = torch.tensor([0.2, 0.3, 0.9])
    with Dtypes() as computed:
        tokens, _ = _draw(logits, 1.0, top_p, uniforms)
    assert torch.float64 not in computed.seen
    assert tokens.tolist() == [0, 1, 2] or top_p < 1


@pytest.mark.parametrize(
    ("num_processes", "local_rank", "device", "expected"),
    [(2, 0, "cuda", "cuda:0"), (2, 1, "cuda:0", "cuda:1"), (1, 0, "cuda:1", "cuda:1"), (2, 1, "cpu", "cpu")],
)
def test_each_of_several_processes_takes_its_own_gpu(monkeypatch, num_processes, local_rank, device, expected):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", str(num_processes))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    assert of_this_process(RunConfig(device=device)).device == expected
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="process 2 of this machine has no GPU: start at most 2"):
        of_this_process(RunConfig(device="cuda"))


@pytest.mark.parametrize(("processes", "kept"), [(1, "cuda:1"), (2, "cuda")])
def test_a_run_of_several_processes_keeps_no_number_of_a_gpu(processes, kept):
    settings = describe_settings(RunConfig(device="cuda:1"), {"processes": processes})
    assert settings["device"] == kept


# --threads auto -------------------------------------------------------------------------------------------------------


@pytest.fixture
def many_cores(monkeypatch):
    """Six physical cores, and a user without settings."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(machine, "usable_cores", lambda: 6)


@pytest.mark.parametrize(
    ("given", "model", "device", "world_size", "expected"),
    [
        *((text, "owner/name", "cpu", "1", number) for text, number in (("3", 3), ("2,4", 2), ("", 6), ("two", 6))),
        *(("", model, "cpu", "1", 1) for model in ("tiny", "new")),
        ("", "owner/name", "cuda:1", "1", 1),
        ("", "owner/name", "cpu", "2", 1),
        ("4", "owner/name", "cpu", "2", 4),  # as accelerate launch may set it
    ],
)
def test_threads_are_those_of_omp_num_threads_else_by_the_model(
    monkeypatch, many_cores, given, model, device, world_size, expected
):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    config = ModelConfig(model=model, device=device)
    assert with_threads(config).threads == expected
    assert with_threads(dataclasses.replace(config, threads=5)).threads == 5


@pytest.mark.parametrize(
    ("limit", "cores"), [("max 100000\n", 6), ("250000 100000\n", 2), ("50000 100000\n", 1), (None, 6)]
)
def test_affinity_and_the_limit_of_a_container_bound_the_cores(monkeypatch, tmp_path, limit, cores):
    monkeypatch.setattr(machine.psutil, "cpu_count", lambda logical: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(machine, "CPU_LIMIT", tmp_path / "cpu.max")
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit, encoding="utf-8")
    assert machine.usable_cores() == cores


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_a_run_records_its_own_commit_and_no_other(tmp_path, monkeypatch):
    """An archive may be unpacked in a checkout of something else."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "--message", "x"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True).strip()
    (tmp_path / "unpacked").mkdir()
    for root, commit in ((tmp_path, head), (tmp_path / "unpacked", None)):
        monkeypatch.setattr(machine, "ROOT", root)
        assert machine.describe_machine()["commit"] == commit


def test_a_resumed_run_keeps_its_number(load_script, tmp_path, many_cores):
    base = load_script("experiment_base/train.py").Config
    (tmp_path / "config.json").write_text(
        json.dumps({"experiment": "experiment_base", "threads": 3, "device": "cpu"}), encoding="utf-8"
    )
    for words in ((), ("--threads", "auto"), ("--threads", "3")):
        assert parse_config(base, ("--resume", str(tmp_path), *words), "").threads == 3
    with pytest.raises(UserError, match=r"^--threads 2 differs from the run's 3"):
        parse_config(base, ("--resume", str(tmp_path), "--threads", "2"), "")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, interrupt.SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_waiting_threads_sleep_soon_unless_told_otherwise(monkeypatch, environment, expected):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that the end of the test removes any later value
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    importlib.reload(interrupt)
    assert os.environ.get("GOMP_SPINCOUNT") == expected


# The flags of the scripts of github.com/researchim-ai/re-grpo, and what to use here; None: the same flag
PUBLISHED_FLAGS = {
    "--run-name x": "--name", "--log-dir x": "--runs-dir", "--device-index 1": "--device cuda:1 for the second GPU",
    "--model-name x": "--model", "--checkpoint-path x": "--runs-dir, where every run keeps its checkpoints",
    "--checkpoint-interval 5": "--checkpoint-every", "--data-path x": "--data", "--rollouts-per-step 4":
    "--prompts-per-step", "--train-batch-size 4": "--minibatch-size", "--max-length 64":
    "--max-new-tokens, which does not count the prompt", "--log-completions-interval 5": "--samples-every",
    "--wandb": None, "--no-wandb": None, "--wandb --wandb-project x": None, "--max-prompts 5": None, "--lr 1e-5": None,
    "--temperature 0.7": None, "--group-size 4": None, "--seed 1": None,
}  # fmt: skip


@pytest.mark.parametrize("experiment", ["experiment_base", "experiment_multiturn_qa"])
@pytest.mark.parametrize(("given", "use"), PUBLISHED_FLAGS.items())
def test_flags_of_published_scripts_are_accepted_or_named(load_script, experiment, given, use):
    config, words = load_script(f"{experiment}/train.py").Config, given.split()
    if use is None:
        parse_config(config, words, "")
        return
    for spelling in (words, ["=".join(words)], [words[0].replace("-", "_").replace("__", "--"), *words[1:]]):
        with pytest.raises(UserError) as error:
            parse_config(config, spelling, "")
        assert str(error.value) == f"there is no flag {words[0]}: use {use}"
    assert re.split("[ ,]", use)[0][2:].replace("-", "_") in dataclasses.asdict(config())


@pytest.mark.parametrize("name", ["imitation/sft", "rewards/dpo"])  # the second also has --max-new-tokens
def test_a_name_that_a_program_has_is_its_own(load_script, name):
    assert parse_config(load_script(f"{name}/train.py").Config, ["--max-length", "64"], "").max_length == 64
