"""What the updates of one step show: means for metrics.jsonl, and the numbers of every token for samples.jsonl.

No loss is computed here. Each train.py hands over the terms of its loss, and its diagnostics by name.
"""

import math
from typing import NamedTuple

import torch

from common.experience import Experience
from common.loss import masked_mean
from common.parallel import gather, world_size


class RowUpdate(NamedTuple):
    """What one update of a step saw of one row."""

    epoch: int
    minibatch: int
    tokens: dict[str, torch.Tensor]  # (T-1,) each: log_probs, terms, push, entropy, and the diagnostics of the loss


class UpdateStatistics:
    """Gathers what the updates of one step show, from micro-batches of different sizes, on all ranks."""

    def __init__(self, max_grad_norm: float):
        self._max_grad_norm = max_grad_norm
        self._grad_norms: list[float] = []
        self._own = _Parts()
        self.rows: dict[tuple[int, int], list[RowUpdate]] = {}  # by (prompt_index, completion_index)

    def add(
        self,
        epoch: int,
        minibatch: int,
        micro: Experience,
        log_probs: torch.Tensor,
        terms: torch.Tensor,
        **diagnostics: torch.Tensor,
    ) -> None:
        """Add one micro-batch after its backward pass.

            push = - d loss / d log_probs,   how the update pushes each token: up if it is positive

        Args:
            epoch, minibatch: which update it belongs to.
            log_probs: (b, T-1) of its tokens under the policy of this update, with their gradient (`retain_grad`).
            terms: (b, T-1), each token's part of the update's loss; they add up to it.
            diagnostics: (b, T-1) or (b, 1) each, by name: `entropy`, and what the loss wants to be logged. Two names
                are known: `ratio`, which is 1 before the first update, and `kl`, which is 0 before the first step.

        Raises:
            ValueError: there is not a term for every token.
        """
        mask = micro.action_mask.bool()
        if terms.shape != mask.shape:
            wanted, got = tuple(mask.shape), tuple(terms.shape)
            raise ValueError(f"policy_loss must return a term for every token, {wanted}, not {got}")
        if not mask.any():
            return  # a filler, see `Experience.filler`
        push = -log_probs.grad / world_size()  # of which each rank backpropagates so many times its loss
        log_probs, terms = log_probs.detach(), terms.detach()
        diagnostics = {name: values.detach().expand_as(mask) for name, values in diagnostics.items()}
        own = self._own
        own.all_updates.add(mask, **{name: values for name, values in diagnostics.items() if name != "kl"})
        own.losses.append(terms.sum().item())
        if "ratio" in diagnostics:
            own.ratio_min = min(own.ratio_min, diagnostics["ratio"][mask].min().item())
            own.ratio_max = max(own.ratio_max, diagnostics["ratio"][mask].max().item())
        if not self._grad_norms:  # before the first optimizer step the policy is still the one that sampled
            first = {"first_ratio": diagnostics["ratio"]} if "ratio" in diagnostics else {}
            difference = (log_probs - micro.sampler_log_probs).abs()
            own.first_update.add(mask, **first, sampling_log_prob_difference=difference)
            if "kl" in diagnostics:  # later its tokens are no longer drawn from the current policy
                own.kl_of_rows += masked_mean(diagnostics["kl"], mask, dim=1).tolist()
        tokens = {"log_probs": log_probs, "terms": terms, "push": push, **diagnostics}
        masked = [torch.where(mask, values, 0.0) for values in tokens.values()]
        by_row = torch.stack(masked, dim=1).cpu()  # (b, names, T-1)
        keys = zip(micro.prompt_index.tolist(), micro.completion_index.tolist(), strict=True)
        for key, values in zip(keys, by_row, strict=True):
            row = RowUpdate(epoch, minibatch, dict(zip(tokens, values, strict=True)))
            self.rows.setdefault(key, []).append(row)

    def end_update(self, grad_norm: torch.Tensor) -> None:
        """Close one update; `grad_norm` is its gradient's norm before clipping, not finite where it was skipped."""
        self._grad_norms.append(grad_norm.item())

    def metrics(self) -> dict[str, float]:
        """Means over the step's updates, the same on all ranks; docs/metrics.md explains each."""
        num_updates = len(self._grad_norms)
        ranks = gather(self._own)
        kl_of_rows = [kl for own in ranks for kl in own.kl_of_rows]
        means = _means([own.all_updates for own in ranks]) | _means([own.first_update for own in ranks])
        metrics = {"loss/kl": sum(kl_of_rows) / len(kl_of_rows)} if kl_of_rows else {}
        metrics |= {
            "loss/total": sum(loss for own in ranks for loss in own.losses) / num_updates,
            "loss/grad_norm": sum(self._grad_norms) / num_updates,
            "loss/grad_clipped": sum(self._max_grad_norm < norm < math.inf for norm in self._grad_norms) / num_updates,
            "loss/skipped": sum(not math.isfinite(norm) for norm in self._grad_norms),
            **{f"policy/{name}": value for name, value in means.items()},
        }
        if "ratio" in means:
            metrics["policy/ratio_min"] = min(own.ratio_min for own in ranks)
            metrics["policy/ratio_max"] = max(own.ratio_max for own in ranks)
        return metrics


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
