"""The command line: defaults are resolved from the model, and impossible settings are refused before a run begins.

--threads auto: what decides, how long it takes, which cores count, and that a resumed run keeps its number.
"""

import dataclasses
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import UserError
from common.policy import Policy
from common.sampling import _draw

from common.plumbing import interrupt, threads
from common.plumbing.checks import PATHS
from common.plumbing.config import RESOLVED, TINY_POLICY, ModelConfig, RunConfig
from common.plumbing.flags import read_comments
from common.plumbing.machine import peak_memory_bytes
from common.plumbing.parse import parse_config
from common.plumbing.processes import own_device
from common.plumbing.settings import describe_settings
from common.plumbing.threads import _granted, _measure, _sizes, choose_threads, usable_cores, with_threads


def parse(load_script, *argv: str) -> RunConfig:
    return parse_config(load_script("experiment_base/train.py").Config, argv, description="")


ROOT = Path(__file__).resolve().parents[2]
TEXTS = {"device", "dtype", "attn_implementation", "load_in", "name", "reward_weight", "at_most", "system_prompt"}
TEXTS |= {"completion_prefix", "progress", "critic_type", "engine_url", "engine_start", "engine_dtype"}
TEXTS |= {"search_url", "lessons", "embeddings", "save_dtype", "threads", "micro_batch_size", "generation_batch_size"}


@pytest.mark.parametrize("path", sorted(ROOT.glob("experiment_*/train.py")), ids=lambda path: path.parent.name)
def test_it_is_known_of_every_text_flag_whether_it_is_a_path(load_script, monkeypatch, path):
    """What names a file is checked early, and made absolute, so that a run can be resumed from anywhere."""
    monkeypatch.syspath_prepend(ROOT / "experiment_sft")
    fields = dataclasses.fields(load_script(f"{path.parent.name}/train.py").Config)
    texts = {field.name for field in fields if re.search(r"\b(str|Literal|BatchSize)\b", str(field.type))}
    assert texts - {*PATHS} <= TEXTS, "enter the flag in PATHS of common/plumbing/checks.py, or here"


def test_defaults_are_resolved_from_the_model(load_script, tmp_path):
    """The bundled policy and a copy of it have the same defaults; other models have their own."""
    shutil.copytree(TINY_POLICY, tmp_path / "copy")
    for model in ("tiny", str(TINY_POLICY), str(tmp_path / "copy")):
        config = parse(load_script, "--model", model)
        assert {name: getattr(config, name) for name in RESOLVED["tiny"]} == RESOLVED["tiny"]
    config = parse(load_script, "--model", "owner/name")
    assert {name: getattr(config, name) for name in RESOLVED["full"]} == RESOLVED["full"]


def test_explicit_settings_are_not_overridden(load_script):
    config = parse(load_script, "--lr", "0.5", "--system-prompt", "Be brief.", "--device", "cpu")
    assert (config.lr, config.system_prompt, config.device) == (0.5, "Be brief.", "cpu")
    assert config.max_new_tokens == RESOLVED["tiny"]["max_new_tokens"]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (("--device", "toaster"), "--device must be cpu, cuda"),
        (("--device", "cuda:99"), "this machine has"),
        (("--device", "xpu:99"), r"this machine has \d+ device\(s\) of the kind xpu"),
        (("--device", "cpu:1"), r"this machine has 1 device\(s\) of the kind cpu"),
        (("--device", "meta"), "--device must be cpu, cuda, .* not meta$"),
        (("--device", "vulkan"), "--device must be cpu, cuda, .* not vulkan$"),
        (("--name", "a/b"), "cannot be the name of a directory"),
        (("--name", ""), "cannot be the name of a directory"),
        (("--name", ".."), "cannot be the name of a directory"),
        (("--model", "new"), "for experiment_sft only"),
        (("--model", "gpt2"), "a hub id is owner/name"),
        (("--attn-implementation", "flash_attention_2"), "add --dtype bfloat16"),
        (("--seed", "-1"), "--seed must be 0 to "),
        (("--threads", "0"), "--threads must be 1 to "),
    ],
)
def test_impossible_settings_are_refused(load_script, argv, sentence):
    with pytest.raises(UserError, match=sentence):
        parse(load_script, *argv)


class OtherMachine:
    """Pretend that PyTorch finds certain accelerators: all that can be tried without one."""

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
    """With bfloat16 as the default on CUDA alone."""
    OtherMachine(monkeypatch, *kinds)
    config = parse(load_script, "--model", "owner/name")
    assert (config.device, config.dtype) == (device, dtype)


def test_an_accelerator_that_is_there_is_taken(load_script, monkeypatch):
    OtherMachine(monkeypatch, "mps")
    assert parse(load_script, "--device", "mps").device == "mps"
    assert parse(load_script, "--device", "mps:1").device == "mps:1"
    for name in ("mps:2", "xpu", "cuda"):
        with pytest.raises(UserError, match=rf"^--device {name}: this machine has \d device"):
            parse(load_script, "--device", name)


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu", "mtia"])
def test_memory_and_autocast_know_every_kind_of_device(device):
    """Without the device: where it does not tell its memory, that of the process is meant."""
    assert peak_memory_bytes(device) > 10**7
    for dtype in (torch.float32, torch.bfloat16):
        autocast = Policy.autocast(SimpleNamespace(device=torch.device(device), compute_dtype=dtype))
        assert autocast.device == torch.device(device).type


class Dtypes(TorchDispatchMode):
    """Note the types of all tensors that are computed."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.seen |= {x.dtype for x in (result if isinstance(result, tuple) else (result,)) if torch.is_tensor(x)}
        return result


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_tokens_can_be_drawn_without_float64(top_p):
    """Which Apple's GPUs do not have: a draw computes in the type of its random numbers."""
    logits = torch.tensor([[0.25, 0.5, 0.25]]).log().expand(3, 3)
    uniforms = torch.tensor([0.2, 0.3, 0.9])
    with Dtypes() as computed:
        tokens, _ = _draw(logits, 1.0, top_p, uniforms)
    assert torch.float64 not in computed.seen
    assert torch.float32 in computed.seen
    if top_p == 1:
        assert tokens.tolist() == [0, 1, 2]


def test_every_field_has_a_comment_that_help_shows(load_script):
    """In the line of the field, or above it."""
    comments = read_comments(load_script("experiment_base/train.py").Config)
    assert comments["temperature"].startswith("logits are divided by it, in sampling and in training alike")
    assert comments["lr"].startswith("learning rate of AdamW; None: 5e-5 for the bundled policy, else 1e-6")
    assert comments["dtype"].startswith("arithmetic, and the dtype of frozen weights; trained weights are float32,")
    assert not [field.name for field in dataclasses.fields(RunConfig) if not comments.get(field.name)]


@pytest.fixture
def launched(monkeypatch):
    """Be one of several processes of a machine with two GPUs."""

    def start(num_processes: int, local_rank: int) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(num_processes))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)

    return start


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_each_of_several_processes_takes_its_own_gpu(launched, device):
    """Also where the run that is resumed, or the user, names one."""
    for local_rank in (0, 1):
        launched(2, local_rank)
        assert own_device(device) == f"cuda:{local_rank}"
    launched(3, 2)
    with pytest.raises(UserError, match="process 2 of this machine has no GPU: start at most 2"):
        own_device(device)


def test_one_process_takes_the_device_that_is_named(launched):
    launched(1, 0)
    for device in ("cuda", "cuda:1", "cpu"):
        assert own_device(device) == device
    launched(2, 1)
    assert own_device("cpu") == "cpu"


@pytest.mark.parametrize(("processes", "kept"), [(1, "cuda:1"), (2, "cuda")])
def test_a_run_of_several_processes_keeps_no_number_of_a_gpu(processes, kept):
    """Otherwise all of them would be on the main one's GPU when it is resumed."""
    settings = describe_settings(RunConfig(device="cuda:1"), {"processes": processes})
    assert settings["device"] == kept


# --threads auto -------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def unset(monkeypatch):
    """As for a user who has set nothing, and one thread again afterwards."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    yield
    torch.set_num_threads(1)


@pytest.fixture
def machine(monkeypatch):
    """A clock that only this work moves: machine({threads: seconds per call}) returns it, and the calls by threads."""

    def make(seconds: dict[int, float], held: float = 1.0):
        now, asked, calls = [0.0], [1], []
        monkeypatch.setattr(time, "perf_counter", lambda: now[0])
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        monkeypatch.setattr(time, "thread_time", lambda: held * now[0])
        monkeypatch.setattr(torch, "set_num_threads", lambda number: asked.append(number))
        monkeypatch.setattr(threads, "_can_start", lambda number: True)

        def work():
            calls.append(asked[-1])
            now[0] += seconds[asked[-1]] if asked[-1] in seconds else seconds[max(seconds)]

        return work, calls, now

    return make


@pytest.mark.parametrize(
    ("seconds", "candidates", "number"),
    [
        ({1: 0.010, 2: 0.006}, [2], 2),
        ({1: 0.010, 2: 0.009}, [2], 1),  # too little to be worth it
        ({1: 0.010, 2: 0.100}, [2], 1),  # busy cores
        ({1: 0.016, 2: 0.008, 4: 0.004, 8: 0.004}, [2, 4, 8], 4),
        ({1: 0.016, 2: 0.020, 4: 0.004}, [2, 4], 1),  # it stops at the first that does not gain
    ],
)
def test_more_threads_have_to_be_clearly_faster(machine, seconds, candidates, number):
    work, _, _ = machine(seconds)
    best, gain = _measure(work, candidates)
    assert best == number
    assert gain == pytest.approx(seconds[1] / seconds[best])


def test_the_time_is_bounded_however_many_cores(machine):
    for first in (0.0001, 0.02, 0.06):
        powers = [2**power for power in range(9)]
        work, _, now = machine({number: first / number for number in powers})
        assert _measure(work, powers[1:])[0] == 256
        assert now[0] < 1.5


def test_a_thread_that_shares_its_core_stays_alone(machine):
    """Two threads get twice the share of one, and are faster by that only: measured with two threads on one core."""
    work, _, _ = machine({1: 0.010, 2: 0.006}, held=0.6)
    assert _measure(work, [2]) == (1, 1.0)


def test_busy_cores_cost_two_rounds(machine):
    work, calls, _ = machine({1: 0.010, 2: 0.100})
    assert _measure(work, [2]) == (1, 1.0)
    assert calls.count(2) == 1 + 2 * 2  # one compiles; a round is of two


def test_a_machine_that_becomes_busy_keeps_one_thread(machine):
    seconds = {1: 0.010, 2: 0.006}
    work, _, now = machine(seconds)

    def disturbed():
        if now[0] > 0.2:
            seconds[2] = 0.1
        work()

    assert _measure(disturbed, [2])[0] == 1
    assert now[0] < 2


def test_real_products_choose_and_set_nothing_else(unset, capsys):
    torch.set_num_threads(1)
    random_state = torch.get_rng_state()
    config = with_threads(ModelConfig(device="cpu", dtype="float32"))
    assert 1 <= config.threads <= usable_cores()
    assert torch.get_num_threads() == 1
    assert torch.equal(torch.get_rng_state(), random_state)
    told = capsys.readouterr().out
    assert told.startswith(f"threads: {config.threads} of ") if usable_cores() > 1 else told == ""


@pytest.mark.parametrize(
    ("variable", "number"), [("3", 3), (" 2 ", 2), ("2,4", 2), ("", 7), ("0", 7), ("two", 7), ("-1", 7), ("9" * 30, 7)]
)
def test_omp_num_threads_is_taken(monkeypatch, variable, number):
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(threads, "choose_threads", lambda config, cores: 7)
    assert with_threads(ModelConfig(device="cpu")).threads == number
    assert with_threads(ModelConfig(device="cpu", threads=5)).threads == 5


@pytest.mark.parametrize(("device", "world_size"), [("cuda:1", "1"), ("mps", "1"), ("cpu", "2")])
def test_one_thread_beside_others_and_an_accelerator(monkeypatch, unset, device, world_size):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setattr(threads, "choose_threads", lambda config, cores: pytest.fail("it was measured"))
    assert with_threads(ModelConfig(device=device)).threads == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "4")  # as accelerate launch may set it
    assert with_threads(ModelConfig(device=device)).threads == 4


def test_one_core_is_not_measured(monkeypatch, capsys):
    monkeypatch.setattr(threads, "_measure", lambda *_: pytest.fail("it was measured"))
    assert choose_threads(ModelConfig(), cores=1) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("cores", "candidates"), [(2, [2]), (6, [2, 4, 6]), (64, [2, 4, 8, 16, 32, 64])])
def test_numbers_that_are_tried(monkeypatch, cores, candidates):
    tried = []
    monkeypatch.setattr(threads, "_measure", lambda work, numbers: tried.extend(numbers) or (1, 1.0))
    choose_threads(ModelConfig(dtype="float32"), cores)
    assert tried == candidates


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_affinity_limits_the_cores():
    program = "from common.plumbing.threads import usable_cores; print(usable_cores())"
    core = min(os.sched_getaffinity(0))
    output = subprocess.run(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}}); {program}"],
        **{"env": os.environ | {"PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True, "check": True},
    ).stdout
    assert output.strip() == "1"


@pytest.mark.parametrize(
    ("memberships", "files", "cores"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0),  # the parent's limit
        ("0::/of/the/host\n", {"cpu.max": "50000 100000"}, 0.5),  # in a container
        ("0::/../x\n", {"cpu.max": "max 100000"}, math.inf),
        ("4:cpu,cpuacct:/x\n", {"cpu,cpuacct/cpu.cfs_quota_us": "1", "cpu,cpuacct/cpu.cfs_period_us": "0"}, math.inf),
        ("4:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "300000", "cpu/x/cpu.cfs_period_us": "100000"}, 3.0),
        ("4:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, math.inf),
        ("4:memory:/x\n0::/\n", {"cpu.max": "damaged"}, math.inf),
        ("no group\n", {}, math.inf),
    ],
)  # fmt: skip
def test_control_groups_limit_the_cores(tmp_path, memberships, files, cores):
    (tmp_path / "memberships").write_text(memberships, encoding="utf-8")
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text, encoding="utf-8")
    assert _granted(tmp_path / "memberships", tmp_path / "root") == cores
    assert _granted(tmp_path / "none", tmp_path / "root") == math.inf


def test_threads_that_cannot_start_are_not_tried(monkeypatch):
    """OpenMP would end the process."""

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert _measure(lambda: None, [2, 4]) == (1, 1.0)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"hidden_size": 192, "intermediate_size": 300}, (192, 300)),
        ({"hidden_size": 4096, "intermediate_size": 11008}, (512, 512)),
        ({"text_config": {"hidden_size": 64, "intermediate_size": 128}}, (64, 128)),
        ({"hidden_size": 0, "intermediate_size": 128}, (512, 512)),
        ({"hidden_size": "wide"}, (512, 512)),
        ({"text_config": None}, (512, 512)),
        ([], (512, 512)),
    ],
)
def test_the_models_own_sizes_are_measured(tmp_path, settings, sizes):
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    assert _sizes(ModelConfig(model=str(tmp_path))) == sizes
    assert _sizes(ModelConfig(model="owner/name")) == (512, 512)
    assert _sizes(ModelConfig(model="new")) == _sizes(ModelConfig())


def test_a_resumed_run_keeps_its_number(load_script, tmp_path, monkeypatch, unset):
    """Also one of an older version, and with --threads auto; it measures nothing."""
    base = load_script("experiment_base/train.py").Config
    monkeypatch.setattr(threads, "choose_threads", lambda config, cores: pytest.fail("it was measured"))
    (tmp_path / "config.json").write_text(
        json.dumps({"experiment": "experiment_base", "threads": 3, "device": "cpu"}), encoding="utf-8"
    )
    for words in ((), ("--threads", "auto"), ("--threads", "3")):
        assert parse_config(base, ("--resume", str(tmp_path), *words), "").threads == 3
    with pytest.raises(UserError, match=r"^--threads 2 differs from the run's 3"):
        parse_config(base, ("--resume", str(tmp_path), "--threads", "2"), "")


@pytest.mark.parametrize("words", [("--help",), ("--threads", "two"), ("--threads", "0"), ("--threads", "-1")])
def test_help_and_mistakes_measure_nothing(load_script, monkeypatch, unset, words):
    monkeypatch.setattr(threads, "choose_threads", lambda config, cores: pytest.fail("it was measured"))
    with pytest.raises((SystemExit, UserError)):
        parse_config(load_script("experiment_base/train.py").Config, words, "")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, interrupt.SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_waiting_threads_sleep_soon_unless_told_otherwise(monkeypatch, environment, expected):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile is removed at the end
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    importlib.reload(interrupt)
    assert os.environ.get("GOMP_SPINCOUNT") == expected
