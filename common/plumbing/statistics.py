"""What the updates of one step show in numbers."""

import math
from typing import NamedTuple

import torch

from common.experience import Experience
from common.loss import approx_kl_divergence, masked_mean, probability_ratio


class RowUpdate(NamedTuple):
    """What one update of a step saw of one row, for samples.jsonl."""

    epoch: int
    minibatch: int
    entropy: torch.Tensor  # (T-1,)
    log_probs: torch.Tensor  # (T-1,)


class UpdateStatistics:
    """Gathers what the updates of one step show, from micro-batches of different sizes."""

    def __init__(self, clip_eps: float, max_grad_norm: float):
        self._clip_eps, self._max_grad_norm = clip_eps, max_grad_norm
        self._losses, self._kl_of_rows, self._grad_norms = [], [], []
        self._all_updates, self._first_update = _TokenMeans(), _TokenMeans()
        self._ratio_min = self._ratio_max = 1.0
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
        ratio = probability_ratio(log_probs, micro.old_log_probs, mask)
        clipped = is_clipped(ratio, micro.advantages, self._clip_eps).float()
        self._all_updates.add(mask, entropy=entropy, ratio=ratio, clipped=clipped)
        self._ratio_min = min(self._ratio_min, ratio.min().item())
        self._ratio_max = max(self._ratio_max, ratio.max().item())
        if not self._grad_norms:  # before the first optimizer step the policy is still the one that sampled
            difference = (log_probs - micro.sampler_log_probs).abs()
            self._first_update.add(mask, first_ratio=ratio, sampling_log_prob_difference=difference)
            if micro.log_probs_ref is not None:  # later its tokens are no longer drawn from the current policy
                kl = approx_kl_divergence(log_probs, micro.log_probs_ref, mask)
                self._kl_of_rows += masked_mean(kl, mask, dim=1).tolist()
        self._losses.append(loss.item())
        keys = zip(micro.prompt_index.tolist(), micro.completion_index.tolist(), strict=True)
        for key, *values in zip(keys, entropy.cpu(), log_probs.cpu(), strict=True):
            self.rows.setdefault(key, []).append(RowUpdate(epoch, minibatch, *values))

    def end_update(self, grad_norm: torch.Tensor) -> None:
        """Close one update; `grad_norm` is its gradient's norm before clipping, not finite where it was skipped."""
        self._grad_norms.append(grad_norm.item())

    def metrics(self) -> dict[str, float]:
        """Means over the step's updates; docs/metrics.md explains each."""
        num_updates = len(self._grad_norms)
        means = self._all_updates.means() | self._first_update.means()
        known_kl = {"loss/kl": sum(self._kl_of_rows) / len(self._kl_of_rows)} if self._kl_of_rows else {}
        return known_kl | {
            "loss/total": sum(self._losses) / num_updates,
            "loss/grad_norm": sum(self._grad_norms) / num_updates,
            "loss/grad_clipped": sum(self._max_grad_norm < norm < math.inf for norm in self._grad_norms) / num_updates,
            "loss/skipped": sum(not math.isfinite(norm) for norm in self._grad_norms),
            **{f"policy/{name}": value for name, value in means.items()},
            "policy/ratio_min": self._ratio_min,
            "policy/ratio_max": self._ratio_max,
        }


def is_clipped(ratio: torch.Tensor, advantages: torch.Tensor, clip_eps: float) -> torch.Tensor:
    """Which tokens have no gradient in `clipped_surrogate`.

    >>> is_clipped(torch.tensor([[1.3, 0.7], [1.3, 0.7]]), torch.tensor([[1.0], [-1.0]]), clip_eps=0.2)
    tensor([[ True, False],
            [False,  True]])
    """
    return ((ratio > 1 + clip_eps) & (advantages > 0)) | ((ratio < 1 - clip_eps) & (advantages < 0))


class _TokenMeans:
    """Means over action tokens."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._count = 0

    def add(self, mask: torch.Tensor, **values: torch.Tensor) -> None:
        """Add the values, each (b, T-1), at the tokens where the mask is True."""
        self._count += int(mask.sum())
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value[mask].cpu().double().sum())

    def means(self) -> dict[str, float]:
        return {name: total / max(self._count, 1) for name, total in self._sums.items()}
