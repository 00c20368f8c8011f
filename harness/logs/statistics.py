"""The statistics of a step (docs/metrics.md): of its rollout and of its updates. No loss is computed here."""

import math
from typing import NamedTuple

import torch

from common.advantages import has_reward_variance
from common.evaluate import mean, rewards_by_name
from common.experience import Experience
from common.loss import masked_mean
from common.parallel import data_size, gather, gather_rows
from common.trajectory import Trajectory

SQUARE = "policy/squared_importance_weight"


class RowUpdate(NamedTuple):
    """The values of one row in one update of a step."""

    epoch: int
    minibatch: int
    measurements: dict[str, torch.Tensor]  # (T-1,) each: log_probs, terms, push, entropy, what the loss names


class UpdateStatistics:
    """The statistics of one step's updates, on all ranks: `metrics` for metrics.jsonl, `rows` for samples.jsonl."""

    def __init__(self, max_grad_norm: float, is_sampled: bool = True):
        self._max_grad_norm = max_grad_norm
        self._is_sampled = is_sampled  # otherwise rows were given, and no sampler can disagree about them
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
            log_probs: (b, T-1) of its tokens under the policy of this update, with their gradient (`retain_grad`).
            terms: (b, T-1), each token's part of the update's loss; they add up to the loss.
            diagnostics: (b, T-1) or (b, 1) each: `entropy`, and other values that the loss logs. Three names are known:
                `ratio`, which is 1 before the first update, `kl`, which is 0 before the first step, and
                `importance_weight`, of which `metrics` also gives the effective sample size.
        """
        mask = micro.action_mask.bool()
        if terms.shape != mask.shape:
            wanted, got = tuple(mask.shape), tuple(terms.shape)
            raise ValueError(f"policy_loss must return a term for every token, {wanted}, not {got}")
        if not mask.any():
            return  # a filler, see `Experience.filler`
        # each rank backpropagates its loss times the number of ranks, see `Experience.num_rows`
        push, terms = -log_probs.grad / data_size(), terms.detach() / data_size()
        log_probs = log_probs.detach()
        diagnostics = {name: values.detach().expand_as(mask) for name, values in diagnostics.items()}
        own = self._own
        own.losses.append(terms.sum().item())
        own.add(mask, {name: values for name, values in diagnostics.items() if name != "kl"})
        if "ratio" in diagnostics:
            own.ratio_min = min(own.ratio_min, diagnostics["ratio"][mask].min().item())
            own.ratio_max = max(own.ratio_max, diagnostics["ratio"][mask].max().item())
        if "importance_weight" in diagnostics:
            own.add(mask, {SQUARE: diagnostics["importance_weight"].double() ** 2})
        if not self._grad_norms:  # before the first optimizer step the policy is still the one that sampled
            first = {"first_ratio": diagnostics["ratio"]} if "ratio" in diagnostics else {}
            if self._is_sampled:
                first["sampling_log_prob_difference"] = (log_probs - micro.sampler_log_probs).abs()
            own.add(mask, first)
            if "kl" in diagnostics:  # later the policy is no longer the one that sampled the tokens
                own.kl_of_rows += masked_mean(diagnostics["kl"], mask, dim=1).tolist()
        measurements = {"log_probs": log_probs, "terms": terms, "push": push, **diagnostics}
        masked = [torch.where(mask, values, 0.0) for values in measurements.values()]
        by_row = torch.stack(masked, dim=1).cpu()  # (b, names, T-1)
        keys = zip(micro.prompt_index.tolist(), micro.completion_index.tolist(), strict=True)
        for key, values in zip(keys, by_row, strict=True):
            row = RowUpdate(epoch, minibatch, dict(zip(measurements, values, strict=True)))
            self.rows.setdefault(key, []).append(row)

    def end_update(self, grad_norm: torch.Tensor) -> None:
        """Close one update; `grad_norm` is the gradient norm before clipping, not finite if the update was skipped."""
        self._grad_norms.append(grad_norm.item())

    def metrics(self) -> dict[str, float]:
        """Means over the step's updates, the same on all ranks."""
        num_updates = len(self._grad_norms)
        ranks = gather(self._own)
        kl_of_rows = [kl for own in ranks for kl in own.kl_of_rows]
        metrics = {"loss/kl": sum(kl_of_rows) / len(kl_of_rows)} if kl_of_rows else {}
        metrics |= {
            "loss/total": sum(loss for own in ranks for loss in own.losses) / num_updates,
            "loss/grad_norm": sum(self._grad_norms) / num_updates,
            "loss/grad_clipped": sum(self._max_grad_norm < norm < math.inf for norm in self._grad_norms) / num_updates,
            "loss/skipped": sum(not math.isfinite(norm) for norm in self._grad_norms),
        }
        for name in dict.fromkeys(name for own in ranks for name in own.sums):
            sums, counts = zip(*(own.sums.get(name, (0.0, 0)) for own in ranks), strict=True)
            metrics[name if "/" in name else f"policy/{name}"] = sum(sums) / sum(counts)
        if SQUARE in metrics:  # Kish: (sum w)^2 / sum w^2, as a share of the tokens
            metrics["policy/effective_sample_size"] = metrics["policy/importance_weight"] ** 2 / metrics.pop(SQUARE)
        if "policy/ratio" in metrics:
            metrics["policy/ratio_min"] = min(own.ratio_min for own in ranks)
            metrics["policy/ratio_max"] = max(own.ratio_max for own in ranks)
        return metrics


class _Parts:
    """The sums of one rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.kl_of_rows: list[float] = []
        self.sums: dict[str, tuple[float, int]] = {}  # over action tokens, and their number
        self.ratio_min = self.ratio_max = 1.0

    def add(self, mask: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
        """Add values, (b, T-1) each, at the tokens where the mask is True."""
        num_tokens = int(mask.sum())
        for name, value in values.items():
            total, count = self.sums.get(name, (0.0, 0))
            self.sums[name] = (total + float(value[mask].cpu().double().sum()), count + num_tokens)


def pair_metrics(statistics: UpdateStatistics) -> dict[str, float]:
    """The metrics of an update on pairs of answers, whose loss logs each token's part of the score as `score`."""
    from common.preferences import mean_log_probs, rightness  # not at the top: other experiments have no pairs

    own = [(key, update.measurements) for key, (update,) in statistics.rows.items()]
    sums = [(key, x["score"].sum().item(), x["log_probs"].sum().item()) for key, x in own]
    _, scores, log_probs = zip(*sorted(gather_rows(sums)), strict=True)  # by pair, the chosen answer first
    margins = [chosen - rejected for chosen, rejected in zip(scores[::2], scores[1::2], strict=True)]
    metrics = {"accuracy": mean([rightness(margin) for margin in margins]), "margin": mean(margins)}
    metrics |= {"score_chosen": mean(scores[::2]), "score_rejected": mean(scores[1::2])} | mean_log_probs(log_probs)
    return statistics.metrics() | {f"preference/{name}": value for name, value in metrics.items()}


def rollout_metrics(trajectories: list[Trajectory], returns: torch.Tensor) -> dict[str, float]:
    """Metrics of the rollout of all ranks, of which these are one's trajectories, with `returns` of (Q, G)."""
    trajectories, returns = gather_rows(trajectories), torch.cat(gather(returns))
    first = trajectories[0]
    lengths = [row.num_action_tokens for row in trajectories]
    metrics = {"reward/total": returns.mean().item()}
    for name, values in rewards_by_name(trajectories).items():
        metrics[f"reward/{name}"] = mean(values)
        spread = torch.tensor(values, dtype=torch.float64).std(correction=0).item()
        metrics[f"reward_std/{name}"] = spread if len(set(values)) > 1 else 0.0  # exactly, without the mean's rounding
    metrics |= {
        f"completion/{name}": mean([row.description[name] for row in trajectories]) for name in first.description
    }
    numbers: dict[str, list[float]] = {}  # that reward functions have logged
    for name, value in ((name, value) for row in trajectories for name, value in row.logged.items()):
        if isinstance(value, int | float) and math.isfinite(value):
            numbers.setdefault(f"logged/{name}", []).append(value)
    metrics |= {name: mean(values) for name, values in numbers.items()}
    metrics["completion/length"] = mean(lengths)
    if any(len(row.ids) > row.prompt_length + row.num_action_tokens for row in trajectories):  # of tools or a world
        metrics["completion/trajectory_length"] = mean([len(row.ids) for row in trajectories])
    if first.turns:
        metrics["completion/turns"] = mean([row.num_turns for row in trajectories])
    if "correct" in first.rewards:
        is_right = [row.rewards["correct"] == 1 for row in trajectories]  # partly right does not count, as in pass@k
        for name, wanted in (("right", True), ("wrong", False)):
            among = [length for length, right in zip(lengths, is_right, strict=True) if right == wanted]
            metrics |= {f"completion/length_{name}": mean(among)} if among else {}
    if "agreement" in first.rewards and "correct" in first.rewards:  # rewards/majority
        elected = [row.rewards["agreement"] == 1 and row.rewards["correct"] == 1 for row in trajectories]
        metrics["group/majority_right"] = torch.tensor(elected).view(returns.shape).any(dim=1).double().mean().item()
    metrics["completion/stopped"] = mean([row.finish_reason == "stop" for row in trajectories])
    metrics["completion/truncated"] = mean([row.finish_reason == "length" for row in trajectories])
    if returns.shape[1] > 1:
        metrics["group/zero_reward_variance"] = 1 - has_reward_variance(returns).float().mean().item()
    if (below := (returns < 0).any(dim=1)).any():
        metrics["group/below_zero"] = below.double().mean().item()
    return metrics
