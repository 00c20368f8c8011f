"""Keep the groups that teach."""

import torch


def dynamic_sampling(returns: torch.Tensor, needed: int) -> dict[str, torch.Tensor | bool]:
    """DAPO's choice of groups.

    A group is useful if its returns are not all equal. Returns are equal if they are the same float32 number.

    Args:
        returns: (Q, G) in float32, a row for each question that is sampled so far.
        needed: how many groups the batch needs.

    Returns:
        {"groups": the indices of the first `needed` useful groups, in their order, or of all if they are fewer;
        "more": whether they are fewer, so that other questions must be sampled}.
    """
    is_useful = (returns != returns[:, :1]).any(dim=1)
    groups = torch.arange(len(returns))[is_useful & (is_useful.cumsum(dim=0) <= needed)]
    return {"groups": groups, "more": is_useful.sum() < needed}
