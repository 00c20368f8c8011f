"""Which flags would lower the peak of a run's memory, and by how much."""

from dataclasses import replace

from common.plumbing.estimate.memory import Memory, Setting
from common.plumbing.estimate.shape import Shape


def helpful(shape: Shape, setting: Setting) -> list[tuple[str, float]]:
    """The flags that save most memory in one process, the best one first, each with the bytes that it saves."""
    options = {
        "--gradient-checkpointing": {"gradient_checkpointing": True},
        "--kl-weight 0": {"kl_weight": 0.0},
        "--dtype bfloat16": {"autocast": True},
    }
    if setting.group_size > 1:  # with rewards
        if setting.micro_batch_size > 1:
            options[f"--micro-batch-size {setting.micro_batch_size // 2}"] = {
                "micro_batch_size": setting.micro_batch_size // 2
            }
        if setting.generation_batch_size > setting.group_size:
            half = max(setting.group_size, setting.generation_batch_size // 2)
            options[f"--generation-batch-size {half}"] = {"generation_batch_size": half}
        if setting.completion > 1:
            options[f"--max-new-tokens {setting.completion // 2}"] = {"completion": setting.completion // 2}
    if not setting.rank:
        options["--lora-rank 16"] = {"rank": 16}
        options["--lora-rank 16 --load-in 4bit"] = {"rank": 16, "load_in": "4bit"}
    elif setting.load_in is None:
        options["--load-in 4bit"] = {"load_in": "4bit"}
    before = Memory(shape, setting).peak
    saved = {flags: before - Memory(shape, replace(setting, **changes)).peak for flags, changes in options.items()}
    return sorted(((flags, size) for flags, size in saved.items() if size > 0.01 * before), key=lambda pair: -pair[1])
