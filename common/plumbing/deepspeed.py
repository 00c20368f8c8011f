"""DeepSpeed's ZeRO under Accelerate: its settings from our flags, and what it says of an update.

ZeRO-2 shards gradients and optimizer states over the ranks, ZeRO-3 also the weights. `accelerator.backward` of the last
micro-batch reduces the gradient, clips it and takes the step; the prepared optimizer's own methods do nothing. Under
ZeRO-3 the call of a submodule gathers its weights and is so a message to all ranks: each rank must make the same calls
in the same order, or the launch hangs.
"""

import math

import torch


def fill_settings(accelerator, micro_batch_size: int, max_grad_norm: float) -> None:
    """Fill in what DeepSpeed must know. To be called right after `Accelerator(...)`, before the policy is loaded.

    Without the first lines `accelerator.prepare` asks for a dataloader, and DeepSpeed clips at Accelerate's default of
    1. The weights stay float32, whatever `mixed_precision` is: the policy runs its own bfloat16 autocast over them.
    """
    from transformers.integrations import unset_hf_deepspeed_config

    settings = accelerator.state.deepspeed_plugin.deepspeed_config
    settings.pop("train_batch_size", None)  # DeepSpeed multiplies it itself
    settings["train_micro_batch_size_per_gpu"] = micro_batch_size  # only used in its own reports
    settings["gradient_accumulation_steps"] = 1  # a loss would be divided by it
    settings["gradient_clipping"] = max_grad_norm
    settings["fp16"] = settings["bf16"] = {"enabled": False}
    # Under ZeRO-3 `from_pretrained` would now load empty shards, even with zero3_init_flag: false; the reference and
    # the evaluation before training need complete weights. `prepare` shards the policy.
    unset_hf_deepspeed_config()


def grad_norm(engine: torch.nn.Module) -> torch.Tensor:
    """The norm of the gradient before clipping, the same on every rank; infinite if the update was skipped.

    All ranks skip an update whose gradient is not finite on one of them.
    """
    return torch.tensor(float(engine.get_global_grad_norm()) if engine.was_step_applied() else math.inf)
