"""Log-probs of a vocabulary that is divided over the ranks of a tensor group, and the next token's logits.

Shapes: n tokens, vocabulary size V, W ranks in the group; each has V/W columns of the logits, in their order.
"""

import torch
from torch import distributed, nn

from common.errors import UserError


def score_split_logits(
    logits: torch.Tensor, targets: torch.Tensor, group: distributed.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """`common.logprobs.score_logits` for logits (n, V/W): each rank has some columns, and none are gathered.

        m = max_v z_v,   S = sum_v exp(z_v - m),   log p(token) = z[token] - m - log S
        H = log S - sum_v exp(z_v - m) (z_v - m) / S

    Each maximum and each sum over the vocabulary is computed over the columns of each rank, and then over the ranks
    (Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, section 3): messages of 4 numbers per token instead of V.
    """
    num_columns = logits.shape[-1]
    column = targets - num_columns * distributed.get_rank(group)  # (n,) of the token, if this rank has it
    is_own = (column >= 0) & (column < num_columns)
    top = logits.detach().amax(dim=-1)  # (n,); the result does not depend on it
    distributed.all_reduce(top, distributed.ReduceOp.MAX, group=group)
    shifted = logits - top[:, None]  # (n, V/W)
    exps = shifted.exp()
    token = shifted.gather(-1, column.clamp(0, num_columns - 1)[:, None])[:, 0] * is_own
    expected = (exps * shifted).detach().sum(dim=-1)
    total, token, expected = _SumOverRanks.apply(torch.stack([exps.sum(dim=-1), token, expected]), group)  # (n,) each
    log_z = total.log()
    return token - log_z, (log_z - expected / total).detach()


class _SumOverRanks(torch.autograd.Function):
    """The sum over the ranks: each rank computes the same loss from it."""

    @staticmethod
    def forward(context, x: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
        x = x.clone()
        distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(context, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Each rank's x counts once in the one loss; a sum of the ranks' equal dy would count it W times."""
        return dy, None


def check_same_ids(model: nn.Module, args: tuple, kwargs: dict, group: distributed.ProcessGroup) -> None:
    """The ranks of a group draw the same tokens from the same logits and random numbers; none is sent, all are checked.

    A rank with another token would soon have another number of rows, and the ranks would wait for each other forever.
    """
    ids = kwargs["input_ids"]  # (rows, new tokens)
    numbers = torch.arange(1, len(ids) + 1, device=ids.device)
    mine = torch.stack([numbers.sum(), (ids.T * numbers).sum()])
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    distributed.all_gather(everyone, mine, group=group)
    if any(not torch.equal(other, mine) for other in everyone):
        raise UserError(
            "the ranks of a tensor group drew different tokens, although their logits and random numbers should be "
            "the same: use devices of one kind for each group"
        )


def gather_logits(model: nn.Module, args: tuple, output, group: distributed.ProcessGroup):
    """The complete logits (rows, 1, V) of one token per row, to draw the next one from."""
    parts = [torch.empty_like(output.logits) for _ in range(group.size())]
    distributed.all_gather(parts, output.logits.contiguous(), group=group)
    output.logits = torch.cat(parts, dim=-1)
    return output
