"""The files of accelerate_configs/, read by Accelerate's own code: what `accelerate launch` makes of them."""

import shlex
from pathlib import Path

import pytest
from accelerate import DistributedType
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "accelerate_configs"
FILES = sorted(FOLDER.glob("*.yaml"))
TYPES = {
    "single_cpu": DistributedType.NO,
    "single_gpu": DistributedType.NO,
    "multi_gpu": DistributedType.MULTI_GPU,
    "multi_node": DistributedType.MULTI_GPU,
    "fsdp2": DistributedType.FSDP,
    "fsdp2_offload": DistributedType.FSDP,
    "deepspeed_zero2": DistributedType.DEEPSPEED,
    "deepspeed_zero3": DistributedType.DEEPSPEED,
}

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def environment_of(path: Path) -> dict[str, str]:
    """What `accelerate launch --config_file path train.py` gives to its processes, as accelerate computes it."""
    args = launch_command_parser().parse_args(["--config_file", str(path), "--main_process_port", "0", "train.py"])
    args, config, _ = _validate_launch_command(args)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(config.deepspeed_config)
        return prepare_deepspeed_cmd_env(args)[1]
    if args.use_fsdp or args.multi_gpu:
        return prepare_multi_gpu_env(args)
    return prepare_simple_launcher_cmd_env(args)[1]


@each_file
def test_a_file_is_what_its_name_says(path):
    config, given = load_config_from_file(str(path)), environment_of(path)
    assert config.distributed_type == TYPES[path.stem]
    assert (config.num_machines > 1) == (path.stem == "multi_node")
    assert (config.num_processes > 1) == (not path.stem.startswith("single"))
    assert config.use_cpu == (path.stem == "single_cpu")
    sharding = path.stem.split("_")[0]
    assert given["ACCELERATE_MIXED_PRECISION"] == ("no" if path.stem == "single_cpu" else "bf16")
    assert given.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") == "1"
    assert given.get("ACCELERATE_USE_FSDP") == ("true" if sharding == "fsdp2" else None)
    assert given.get("ACCELERATE_USE_DEEPSPEED") == ("true" if sharding == "deepspeed" else None)
    if sharding == "fsdp2":
        assert given["FSDP_VERSION"] == "2"
        assert given["FSDP_RESHARD_AFTER_FORWARD"] == "true"
        assert given["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"
        assert given["FSDP_OFFLOAD_PARAMS"] == str(path.stem == "fsdp2_offload").lower()
    if sharding == "deepspeed":
        assert given["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == path.stem[-1]


@each_file
def test_a_file_says_by_which_command_it_is_used(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    commands = [shlex.split(line.lstrip("# ")) for line in lines if line.startswith("#     ")]
    assert commands
    for command in commands:
        assert command[:4] == ["accelerate", "launch", "--config_file", str(path.relative_to(ROOT))]
