"""The weights of a model: how many there are, how many are trained, and whether all of them are numbers."""

from collections.abc import Iterable

import torch

from common.errors import UserError


def count_parameters(model: torch.nn.Module) -> dict[str, int]:
    """As summary.json has them; shared weights count once, and a 4-bit weight as the weights that it packs."""
    if any(hasattr(weight, "ds_numel") for weight in model.parameters()):  # sharded by DeepSpeed: numel is of the shard
        sizes = [(weight.ds_numel, weight.requires_grad) for weight in model.parameters()]
        return {"parameters": sum(n for n, _ in sizes), "trained_parameters": sum(n for n, trained in sizes if trained)}
    return {"parameters": model.num_parameters(), "trained_parameters": model.num_parameters(only_trainable=True)}


def describe_parameters(model: torch.nn.Module) -> str:
    total, trained = count_parameters(model).values()
    return f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%})"


def check_finite(owner: str, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """
    Raises:
        UserError: a weight of `owner` is NaN or infinite.
    """
    for name, weight in weights:
        if not weight.is_floating_point() or not weight.numel():
            continue
        # extremes are NaN if any number is, and unlike isfinite they need no memory of the weight's size
        if not torch.stack(weight.detach().aminmax()).isfinite().all():
            raise UserError(f"the weights of {owner} hold NaN or infinite numbers: {name} for one")
