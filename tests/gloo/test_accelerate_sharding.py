"""What Accelerate cannot shard is refused; DeepSpeed; SFT by the recipe for FSDP2.

FSDP2 trains like one process: golden/test_golden.py.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from run_files import ROOT, finished, json_of, metrics_of, rows_of, write_rows
from safetensors.torch import load_file

from common.experience import collate

from harness.base.config import PolicyConfig
from harness.models.loading import load_policy
from harness.task.conversations import encode_rows

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


def test_sft_by_the_recipe_for_fsdp2_learns_to_end_a_turn(tmp_path):
    """The command of its README, in bfloat16 as the recipe says. One process loads `final/`."""
    asked = ({"role": "user", "content": f"Say {n}"} for n in range(60))
    said = ({"role": "assistant", "content": str(n)} for n in range(60))
    chats = [{"messages": list(chat)} for chat in zip(asked, said, strict=True)]
    write_rows(tmp_path / "chats.jsonl", chats)
    launch = ("-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0", "--config_file")
    program = (ROOT / "recipes/accelerate_configs/fsdp2.yaml", Path(__file__).with_name("as_on_gpus.py"))
    flags = ("--model", "tiny", "--data", "chats.jsonl", "--epochs", "8", "--tokens-per-batch", "300", "--name", "x")
    train = (ROOT / "imitation/sft/train.py", *flags, "--gradient-checkpointing", "--device", "cpu")
    result = finished(*launch, *program, *train, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr[-3000:]
    run = tmp_path / "runs" / "sft" / "x"
    assert len([*run.glob("checkpoints/*/pytorch_model_fsdp_0/*.distcp")]) == 2
    assert json_of(run / "config.json")["dtype"] == "bfloat16"

    def ends(model: str) -> torch.Tensor:
        """The log-prob (B,) of the token that ends the turn after each answer."""
        policy = load_policy(PolicyConfig(model=model, device="cpu"))
        rows = encode_rows(chats, "chats.jsonl", policy, max_length=1024)
        last = [row.prompt_length + sum(row.action_mask) - 1 for row in rows]
        assert {row.ids[place] for row, place in zip(rows, last, strict=True)} <= {*policy.end_of_turn_ids}
        batch = collate(rows, policy.pad_id)
        with torch.no_grad():
            return policy(batch.sequences, batch.action_mask).log_probs[range(len(rows)), torch.tensor(last) - 1]

    assert ends("tiny").max() < -5
    assert ends(str(run / "final")).min() > -0.1


def test_a_reference_in_parts_computes_as_the_policy_does(tmp_path):
    """In bfloat16, as the recipe says: the KL of the first step is 0, not nearly 0."""
    launch = ("-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0", "--config_file")
    program = (ROOT / "recipes/accelerate_configs/fsdp2.yaml", Path(__file__).with_name("as_on_gpus.py"))
    flags = (*FLAGS, "--steps", "1", "--eval-prompts", "1", "--device", "cpu")
    result = finished(*launch, *program, TRAIN, *flags, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr[-3000:]
    rows = metrics_of(tmp_path / "runs" / "experiment_accelerate" / "x")
    assert next(row["loss/kl"] for row in rows if "loss/kl" in row) == 0


def test_quantised_weights_are_not_sharded(tmp_path):
    """Accelerate would keep them whole, and no checkpoint could be resumed."""
    program = Path(__file__).with_name("as_on_gpus.py")
    flags = (*FLAGS, "--lora-rank", "4", "--load-in", "4bit", "--runs-dir", tmp_path)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program, TRAIN, *flags)
    result = finished(*launch, env=os.environ | {"OMP_NUM_THREADS": "1"} | FSDP2)
    assert result.returncode != 0
    assert "error: --load-in 4bit: FSDP2 cannot shard quantised weights: use" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("experiment", ["experiment_base", "imitation/sft"])
def test_deepspeed_is_for_experiment_accelerate_alone(tmp_path, experiment):
    deepspeed = os.environ | {"ACCELERATE_USE_DEEPSPEED": "true"}
    result = finished(ROOT / experiment / "train.py", "--name", "x", "--runs-dir", tmp_path, env=deepspeed)
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
