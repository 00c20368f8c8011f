"""What Accelerate cannot shard is refused; DeepSpeed. FSDP2 trains like one process: golden/test_golden.py."""

import json
import os
from pathlib import Path

import pytest
from run_files import ROOT, finished, metrics_of, rows_of
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.all_questions]

TRAIN = str(ROOT / "experiment_accelerate" / "train.py")
FLAGS = (
    *("--steps", "2", "--prompts-per-step", "4", "--group-size", "4", "--eval-prompts", "3", "--max-new-tokens", "24"),
    *("--micro-batch-size", "4", "--checkpoint-every", "1", "--lr", "1e-5", "--name", "x"),
)
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


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
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    result = finished(*launch, *options, TRAIN, *FLAGS, "--runs-dir", tmp_path, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    check_same_training(tmp_path / "experiment_accelerate" / "x", alone)
