"""What the updates of one step show in numbers."""

import math
from typing import NamedTuple

import torch

from common.experience import Experience
from common.loss import approx_kl_divergence, masked_mean, probability_ratio
from common.parallel import gather


class RowUpdate(NamedTuple):
    """What one update of a step saw of one row, for samples.jsonl."""

    epoch: int
    minibatch: int
    entropy: torch.Tensor  # (T-1,)
    log_probs: torch.Tensor  # (T-1,)


class UpdateStatistics:
    """Gathers what the updates of one step show, from micro-batches of different sizes, on all ranks."""

    def __init__(self, clip_eps: float, max_grad_norm: float):
        self._clip_eps, self._max_grad_norm = clip_eps, max_grad_norm
        self._grad_norms: list[float] = []
        self._own = _Parts()
        self.rows: dict[tuple[int, int], list[RowUpdate]] = {}  # by (prompt_index, completion_index)

    def add(
        self,
        epoch: int,
        minibatch: int,
        micro: Experience,
        log_probs: torch.Tensor,
        entropy: torch.Tensor,
        loss: torch.Tensor,
    ) -> None:
        """Add one micro-batch.

        Args:
            epoch, minibatch: which update it belongs to.
            log_probs, entropy: (b, T-1), of its tokens under the policy of this update.
            loss: its part of the update's loss; the parts add up to it.
        """
        log_probs, mask = log_probs.detach(), micro.action_mask.bool()
        if not mask.any():
            return  # a filler, see `Experience.filler`
        own = self._own
        ratio = probability_ratio(log_probs, micro.old_log_probs, mask)
        clipped = is_clipped(ratio, micro.advantages, self._clip_eps).float()
        own.all_updates.add(mask, entropy=entropy, ratio=ratio, clipped=clipped)
        own.ratio_min = min(own.ratio_min, ratio.min().item())
        own.ratio_max = max(own.ratio_max, ratio.max().item())
        if not self._grad_norms:  # before the first optimizer step the policy is still the one that sampled
            difference = (log_probs - micro.sampler_log_probs).abs()
            own.first_update.add(mask, first_ratio=ratio, sampling_log_prob_difference=difference)
            if micro.log_probs_ref is not None:  # later its tokens are no longer drawn from the current policy
                kl = approx_kl_divergence(log_probs, micro.log_probs_ref, mask)
                own.kl_of_rows += masked_mean(kl, mask, dim=1).tolist()
        own.losses.append(loss.item())
        keys = zip(micro.prompt_index.tolist(), micro.completion_index.tolist(), strict=True)
        for key, *values in zip(keys, entropy.cpu(), log_probs.cpu(), strict=True):
            self.rows.setdefault(key, []).append(RowUpdate(epoch, minibatch, *values))

    def end_update(self, grad_norm: torch.Tensor) -> None:
        """Close one update; `grad_norm` is its gradient's norm before clipping, not finite where it was skipped."""
        self._grad_norms.append(grad_norm.item())

    def metrics(self) -> dict[str, float]:
        """Means over the step's updates, the same on all ranks; docs/metrics.md explains each."""
        num_updates = len(self._grad_norms)
        ranks = gather(self._own)
        kl_of_rows = [kl for own in ranks for kl in own.kl_of_rows]
        means = _means([own.all_updates for own in ranks]) | _means([own.first_update for own in ranks])
        known_kl = {"loss/kl": sum(kl_of_rows) / len(kl_of_rows)} if kl_of_rows else {}
        return known_kl | {
            "loss/total": sum(loss for own in ranks for loss in own.losses) / num_updates,
            "loss/grad_norm": sum(self._grad_norms) / num_updates,
            "loss/grad_clipped": sum(self._max_grad_norm < norm < math.inf for norm in self._grad_norms) / num_updates,
            "loss/skipped": sum(not math.isfinite(norm) for norm in self._grad_norms),
            **{f"policy/{name}": value for name, value in means.items()},
            "policy/ratio_min": min(own.ratio_min for own in ranks),
            "policy/ratio_max": max(own.ratio_max for own in ranks),
        }


def is_clipped(ratio: torch.Tensor, advantages: torch.Tensor, clip_eps: float) -> torch.Tensor:
    """Which tokens have no gradient in `clipped_surrogate`.

    >>> is_clipped(torch.tensor([[1.3, 0.7], [1.3, 0.7]]), torch.tensor([[1.0], [-1.0]]), clip_eps=0.2)
    tensor([[ True, False],
            [False,  True]])
    """
    return ((ratio > 1 + clip_eps) & (advantages > 0)) | ((ratio < 1 - clip_eps) & (advantages < 0))


class _TokenSums:
    """Sums over action tokens."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.count = 0

    def add(self, mask: torch.Tensor, **values: torch.Tensor) -> None:
        """Add the values, each (b, T-1), at the tokens where the mask is True."""
        self.count += int(mask.sum())
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value[mask].cpu().double().sum())


def _means(ranks: list[_TokenSums]) -> dict[str, float]:
    """Means over the action tokens of all ranks."""
    count = sum(tokens.count for tokens in ranks)
    names = dict.fromkeys(name for tokens in ranks for name in tokens.sums)
    return {name: sum(tokens.sums.get(name, 0.0) for tokens in ranks) / count for name in names}


class _Parts:
    """What one rank has seen."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.kl_of_rows: list[float] = []
        self.all_updates, self.first_update = _TokenSums(), _TokenSums()
        self.ratio_min = self.ratio_max = 1.0
