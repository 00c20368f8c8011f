"""With how many rows `--micro-batch-size auto` and `--generation-batch-size auto` begin."""

import json
import resource

import torch

from common.plumbing.config import ModelConfig
from common.plumbing.ranks import num_launched

MOST = {"micro_batch_size": 128, "generation_batch_size": 256}  # more rows are hardly faster
PROMPT = 256  # tokens that a prompt is taken to have
UNKNOWN = {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 8192, "vocab_size": 152_000}


def first_sizes(config: ModelConfig) -> dict[str, int]:
    """The largest powers of two of which the rows should fit, with a rough count of bytes per token.

        update:     4 (16 hidden + 3 feed-forward) per layer, of the activations that the backward pass needs
        sampling:   4 (2 hidden) per layer, of keys and values, if all heads have their own

    in half of the memory that is free, of which the weights take 16 bytes per parameter first.
    """
    shape = UNKNOWN | _shape(config)
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    parameters = shape["vocab_size"] * hidden + layers * (4 * hidden + 3 * shape["intermediate_size"]) * hidden
    room = max(_free_bytes(config.device) - 16 * parameters, 0) / 2
    tokens = PROMPT + (config.max_new_tokens or 512)
    per_token = {
        "micro_batch_size": 4 * layers * (16 * hidden + 3 * shape["intermediate_size"]),
        "generation_batch_size": 4 * layers * 2 * hidden,
    }
    rows = {name: max(1, min(most, int(room / tokens / per_token[name]))) for name, most in MOST.items()}
    rollout = getattr(config, "minibatch_size", None) or getattr(config, "prompts_per_step", 1) * getattr(
        config, "group_size", MOST["micro_batch_size"]
    )
    rows["micro_batch_size"] = min(rows["micro_batch_size"], rollout)
    return {name: 2 ** (number.bit_length() - 1) for name, number in rows.items()}


def _shape(config: ModelConfig) -> dict[str, int]:
    """What config.json of a local model says of its shape."""
    try:
        settings = json.loads((config.base_path / "config.json").read_text(encoding="utf-8"))
        settings = settings.get("text_config", settings)
        return {name: settings[name] for name in UNKNOWN if isinstance(settings.get(name), int)}
    except (OSError, ValueError, AttributeError, TypeError):  # a hub id; or loading will say what is wrong
        return {}


def _free_bytes(device: str) -> float:
    """What one process may still allocate on the device."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = 8e9  # where the system does not say
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            values = dict(line.split(":") for line in file)
        free = 1024 * float(values["MemAvailable"].split()[0])
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            with open("/proc/self/statm", encoding="utf-8") as file:
                free = min(free, limit - int(file.read().split()[0]) * resource.getpagesize())
    except (OSError, ValueError, KeyError):
        pass
    return free / num_launched()
