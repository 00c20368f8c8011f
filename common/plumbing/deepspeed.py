"""DeepSpeed's ZeRO under Accelerate: its settings from our flags, and our loop's calls to its engine.

ZeRO-2 shards gradients and optimizer states over the ranks, ZeRO-3 also the weights. The engine, which is what
`accelerator.prepare` returns for the policy, reduces gradients inside the backward pass, and clips and skips inside
`step`; the prepared optimizer's own methods do nothing. Under ZeRO-3 the call of a submodule gathers its weights and is
so a message to all ranks: each rank must make the same calls in the same order, or the launch hangs.
"""

import math

import torch

from common.policy import Policy


def fill_settings(accelerator, micro_batch_size: int, max_grad_norm: float) -> None:
    """Fill in what DeepSpeed must know. To be called right after `Accelerator(...)`, before the policy is loaded.

    Without the first lines `accelerator.prepare` asks for a dataloader, and DeepSpeed clips at Accelerate's default of
    1. The weights stay float32, whatever `mixed_precision` is: the policy runs its own bfloat16 autocast over them.
    """
    from transformers.integrations import unset_hf_deepspeed_config

    settings = accelerator.state.deepspeed_plugin.deepspeed_config
    settings.pop("train_batch_size", None)  # DeepSpeed multiplies it itself
    settings["train_micro_batch_size_per_gpu"] = micro_batch_size  # only used in its own reports
    settings["gradient_accumulation_steps"] = 1  # a loss would be divided by it; `backward` says which one is the last
    settings["gradient_clipping"] = max_grad_norm
    settings["fp16"] = settings["bf16"] = {"enabled": False}
    settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True  # for accelerator.get_state_dict
    # Under ZeRO-3 `from_pretrained` would now load empty shards, even with zero3_init_flag: false; the reference and
    # the copy that samples need complete weights. `prepare` shards the policy.
    unset_hf_deepspeed_config()


def backward(engine: torch.nn.Module, loss: torch.Tensor, *, is_last: bool) -> None:
    """Add the gradient of a micro-batch's part of the loss. `is_last`: no other one follows before `step`.

    Gradients are averaged over the ranks: where parts add up over ranks too, multiply them by the number of ranks.
    """
    engine.set_gradient_accumulation_boundary(is_last)
    engine.backward(loss)


def step(engine: torch.nn.Module) -> torch.Tensor:
    """Clip, update and clear the gradient; its norm before clipping, the same on every rank.

    If the norm of the gradient is not finite (on any rank), all ranks skip the update and the result is infinity.
    """
    engine.step()
    return torch.tensor(float(engine.get_global_grad_norm()) if engine.was_step_applied() else math.inf)


def copy_weights(engine: torch.nn.Module, policy: Policy) -> None:
    """Give the trained weights to `policy`, a complete copy that was made before `prepare`. All ranks call it together.

    The copy can sample and be saved. The engine's own module can not sample under ZeRO-3: each decode step would gather
    all weights anew, and ranks whose completions end at different times would wait for each other for good.
    """
    import deepspeed

    for own, trained in zip(policy.parameters(), engine.module.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([trained], modifier_rank=None):  # does nothing under ZeRO-2
            own.data.copy_(trained.data)
