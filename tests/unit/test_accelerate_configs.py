"""The files of recipes/accelerate_configs/, read by Accelerate's own code as in `accelerate launch`."""

import shlex
from pathlib import Path

import pytest
from accelerate import DistributedType
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "accelerate_configs"
FILES = sorted(FOLDER.glob("*.yaml"))
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def environment_of(path: Path) -> dict[str, str]:
    """The environment that `accelerate launch --config_file path train.py` gives to its processes."""
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
    sharding = path.stem.split("_")[0]
    types = {"fsdp2": DistributedType.FSDP, "deepspeed": DistributedType.DEEPSPEED, "single": DistributedType.NO}
    assert config.distributed_type == types.get(sharding, DistributedType.MULTI_GPU)
    assert (config.num_machines > 1) == (path.stem == "multi_node")
    assert (config.num_processes > 1) == (sharding != "single")
    assert config.use_cpu == (path.stem == "single_cpu")
    expected = {"MIXED_PRECISION": "no" if path.stem == "single_cpu" else "bf16", "GRADIENT_ACCUMULATION_STEPS": "1"}
    expected |= {"USE_FSDP": "true"} if sharding == "fsdp2" else {}
    expected |= {"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": path.stem[-1]} if sharding == "deepspeed" else {}
    names = ("MIXED_PRECISION", "GRADIENT_ACCUMULATION_STEPS", "USE_FSDP", "USE_DEEPSPEED", "DEEPSPEED_ZERO_STAGE")
    found = {name: given[f"ACCELERATE_{name}"] for name in names if f"ACCELERATE_{name}" in given}
    assert {"GRADIENT_ACCUMULATION_STEPS": "1"} | found == expected
    if sharding == "fsdp2":
        assert (given["FSDP_VERSION"], given["FSDP_RESHARD_AFTER_FORWARD"]) == ("2", "true")
        assert given["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"
        assert given["FSDP_OFFLOAD_PARAMS"] == str(path.stem == "fsdp2_offload").lower()


@each_file
def test_a_file_says_by_which_command_it_is_used(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    commands = [shlex.split(line.lstrip("# ")) for line in lines if line.startswith("#     ")]
    assert commands
    for command in commands:
        assert command[:4] == ["accelerate", "launch", "--config_file", str(path.relative_to(ROOT))]
