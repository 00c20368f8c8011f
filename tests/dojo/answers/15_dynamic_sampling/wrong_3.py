# says: more than `needed`
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
    useful = (returns.amax(dim=1) > returns.amin(dim=1)).nonzero()[:, 0]
    return {"groups": useful, "more": len(useful) < needed}
