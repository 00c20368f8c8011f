"""A model that Accelerate shards over two processes trains like one process."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from run_files import ROOT, finished, metrics_of, rows_of
from safetensors.torch import load_file

from common.errors import UserError

pytestmark = [pytest.mark.slow, pytest.mark.all_questions]

TRAIN = str(ROOT / "experiment_accelerate" / "train.py")
FLAGS = (
    *("--steps", "2", "--prompts-per-step", "4", "--group-size", "4", "--eval-prompts", "3", "--max-new-tokens", "24"),
    *("--micro-batch-size", "4", "--checkpoint-every", "1", "--lr", "1e-5", "--name", "x"),
)
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def start(*command: str, **environment: str) -> None:
    result = finished(*command, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment)
    assert result.returncode == 0, result.stderr[-3000:]


def train_on_two(*arguments: str, train: str = TRAIN) -> None:
    program = Path(__file__).with_name("as_on_gpus.py")
    start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program, train, *arguments, **FSDP2)


def check_same_training(found: Path, expected: Path) -> None:
    for new, old in zip(metrics_of(found), metrics_of(expected), strict=True):
        assert new == pytest.approx(old, rel=1e-4, abs=1e-5)
    for new, old in zip(rows_of(found, "samples"), rows_of(expected, "samples"), strict=True):
        assert new["ids"] == old["ids"]
        assert new["advantage"] == pytest.approx(old["advantage"], abs=1e-5)
    weights, others = (load_file(directory / "final" / "model.safetensors") for directory in (found, expected))
    start = load_file(ROOT / "data" / "policies" / "tiny_policy" / "model.safetensors")
    assert weights.keys() == others.keys()
    for name in weights:
        assert (weights[name] - others[name]).abs().max() <= 1e-5
    moved = sum((others[name] - start[name].float()).norm() ** 2 for name in others) ** 0.5
    differs = sum((others[name] - weights[name]).norm() ** 2 for name in others) ** 0.5
    assert differs <= 0.02 * moved  # AdamW turns rounding into a step where a gradient is nearly 0


@pytest.fixture(scope="module")
def alone(tmp_path_factory, load_script) -> Path:
    """The run of experiment_base in this single process."""
    runs = tmp_path_factory.mktemp("alone")
    load_script("experiment_base/train.py").main([*FLAGS, "--runs-dir", str(runs)])
    return runs / "experiment_base" / "x"


@pytest.mark.parametrize("experiment", ["experiment_base", "experiment_accelerate"])
def test_fsdp2_of_accelerate_trains_as_one_process(alone, tmp_path, load_script, experiment):
    """Weights, gradients and optimizer state are sharded; a killed launch resumes bit for bit."""
    train = str(ROOT / experiment / "train.py")
    train_on_two(*FLAGS, "--runs-dir", str(tmp_path), train=train)
    directory = tmp_path / Path(experiment).name / "x"
    check_same_training(directory, alone)

    checkpoint = directory / "checkpoints" / "step_1"
    shards = list(checkpoint.glob("pytorch_model_fsdp_0/*.distcp"))
    assert len(shards) == 2
    copy = tmp_path / "stopped" / "x"
    shutil.copytree(directory, copy)
    shutil.rmtree(copy / "checkpoints" / "step_2")
    train_on_two("--resume", str(copy), train=train)
    assert metrics_of(copy) == metrics_of(directory)
    assert rows_of(copy, "samples") == rows_of(directory, "samples")

    shutil.rmtree(copy / "checkpoints" / "step_2")
    with pytest.raises(UserError, match="cannot be continued by these processes"):
        load_script(f"{experiment}/train.py").main(["--resume", str(copy)])


def test_a_critic_is_sharded_like_its_policy(tmp_path, load_script):
    train = str(ROOT / "policy_gradients/ppo" / "train.py")
    load_script("policy_gradients/ppo/train.py").main([*FLAGS, "--runs-dir", str(tmp_path / "alone")])
    train_on_two(*FLAGS, "--runs-dir", str(tmp_path), train=train)
    new, old = (place / "ppo" / "x" for place in (tmp_path, tmp_path / "alone"))
    check_same_training(new, old)
    critics = [load_file(directory / "final" / "critic.safetensors") for directory in (new, old)]
    assert critics[0].keys() == critics[1].keys()
    assert all((critics[0][name] - weight).abs().max() <= 1e-5 for name, weight in critics[1].items())

    shutil.rmtree(new / "checkpoints" / "step_2")
    before = metrics_of(new)
    train_on_two("--resume", str(new), train=train)
    assert metrics_of(new) == before
    assert all(torch.equal(load_file(new / "final" / "critic.safetensors")[name], w) for name, w in critics[0].items())


def test_quantised_weights_are_not_sharded(tmp_path):
    """Accelerate would keep them whole, and no checkpoint could be resumed."""
    program = Path(__file__).with_name("as_on_gpus.py")
    flags = (*FLAGS, "--lora-rank", "4", "--load-in", "4bit", "--runs-dir", tmp_path)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program, TRAIN, *flags)
    result = finished(*launch, env=os.environ | {"OMP_NUM_THREADS": "1"} | FSDP2)
    assert result.returncode != 0
    assert "error: --load-in 4bit: FSDP2 cannot shard quantised weights: use" in result.stderr
    assert not list(tmp_path.iterdir())


def test_deepspeed_is_for_experiment_accelerate_alone(tmp_path):
    deepspeed = os.environ | {"ACCELERATE_USE_DEEPSPEED": "true"}
    result = finished(ROOT / "experiment_base" / "train.py", *FLAGS, "--runs-dir", tmp_path, env=deepspeed)
    assert result.returncode == 2
    assert "a backward of its own: use experiment_accelerate/train.py, or FSDP2 (" in result.stderr


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_trains_as_one_process(alone, tmp_path, stage):
    pytest.importorskip("deepspeed", exc_type=ImportError)
    settings = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    settings |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1}
    (tmp_path / "deepspeed.json").write_text(json.dumps(settings))
    launch = ("-m", "accelerate.commands.accelerate_cli", "launch", "--use_deepspeed", "--num_processes", "2")
    options = ("--deepspeed_config_file", str(tmp_path / "deepspeed.json"), "--main_process_port", "0")
    start(*launch, *options, TRAIN, *FLAGS, "--runs-dir", str(tmp_path), DS_ACCELERATOR="cpu")
    check_same_training(tmp_path / "experiment_accelerate" / "x", alone)
