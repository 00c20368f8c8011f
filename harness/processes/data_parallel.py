"""What a policy and its optimizer need before several processes train it."""

import torch
from torch.nn.parallel import DistributedDataParallel

from common.policy import Policy


def exclude_frozen(policy: Policy) -> None:
    """Keep DistributedDataParallel from sending frozen weights and buffers: every process loaded the same ones."""
    frozen = [name for name, weight in policy.named_parameters() if not weight.requires_grad]
    buffers = [name for name, _ in policy.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(policy, frozen + buffers)


def in_8_bits(optimizer: torch.optim.AdamW) -> torch.optim.Optimizer:
    """The same AdamW with its moments in 8 bits, in blocks of 256 (arXiv 2110.02861); small weights keep 32 bits."""
    from bitsandbytes.optim import AdamW8bit

    names = ("params", "lr", "betas", "eps", "weight_decay")
    return AdamW8bit([{name: group[name] for name in names} for group in optimizer.param_groups])
