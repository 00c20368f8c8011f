"""With how many rows `--micro-batch-size auto` and `--generation-batch-size auto` begin."""

import dataclasses

import psutil
import torch

from common.plumbing.config import ModelConfig
from common.plumbing.estimate.memory import Memory, setting_of
from common.plumbing.estimate.shape import Shape
from common.plumbing.ranks import num_launched
from common.plumbing.settings import AUTO_SIZES

MOST = {"micro_batch_size": 128, "generation_batch_size": 256}  # more rows are hardly faster
PHASES = {"micro_batch_size": "update", "generation_batch_size": "sampling"}
PROMPT = 256  # tokens that a prompt is taken to have: the task's are not read yet
SHARE = 0.8  # of the memory that is free


def first_sizes(config: ModelConfig) -> dict[str, int]:
    """The largest powers of two, at most `MOST`, for which the estimate of memory is within what is free.

    Raises:
        UserError: the model's config cannot be read.
    """
    shape, room = Shape(config), SHARE * free_memory(config.device)
    sizes = {name: MOST[name] for name in AUTO_SIZES if getattr(config, name, None) == "auto"}
    setting = setting_of(dataclasses.replace(config, **sizes), shape, PROMPT)
    for name in sizes:
        while sizes[name] > 1 and sum(Memory(shape, setting).phases[PHASES[name]].values()) > room:
            sizes[name] //= 2
            setting = dataclasses.replace(setting, **{name: min(sizes[name], getattr(setting, name))})
    return sizes


def free_memory(device: str) -> float:
    """The bytes that this process may still allocate on the device, if others of its launch take as many."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    try:
        import resource
    except ImportError:  # Windows
        return free / num_launched()
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        free = min(free, limit - psutil.Process().memory_info().vms)
    return max(0, free) / num_launched()
