"""What the updates of a step show in numbers, and one sentence for the user when a run looks wrong."""

import math
from statistics import mean, stdev
from typing import NamedTuple

import torch

from common.config import PolicyConfig
from common.experience import Experience
from common.loss import is_clipped, probability_ratio

# How far recorded and recomputed log-probs may lie apart, in nats, as a mean over tokens. Between the two stand other
# shapes of the same matrix products, which float32 rounds to some 1e-6 and bfloat16 to some 1e-2.
MAX_SAMPLER_GAP = {"float32": 1e-3, "bfloat16": 0.1}


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
        self._losses, self._kls, self._grad_norms = [], [], []
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
        kl: torch.Tensor,
    ) -> None:
        """Add one micro-batch.

        Args:
            epoch, minibatch: which update it belongs to.
            log_probs, entropy: (b, T-1), of its tokens under the policy of this update.
            loss, kl: its share of the update's, so that the shares add up.
        """
        log_probs, mask = log_probs.detach(), micro.action_mask.bool()
        ratio = probability_ratio(log_probs, micro)
        clipped = is_clipped(ratio, micro.advantages, self._clip_eps).float()
        self._all_updates.add(mask, entropy=entropy, ratio=ratio, clipped=clipped)
        self._ratio_min = min(self._ratio_min, ratio.min().item())
        self._ratio_max = max(self._ratio_max, ratio.max().item())
        if not self._grad_norms:  # before the first optimizer step the policy is still the one that sampled
            gap = (log_probs - micro.sampler_log_probs).abs()
            self._first_update.add(mask, first_ratio=ratio, sampler_gap=gap)
            if micro.log_probs_ref is not None:
                self._kls.append(kl.item())  # later its tokens are no longer drawn from the current policy
        self._losses.append(loss.item())
        if micro.completion_index is not None:
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
        return {
            "loss/total": sum(self._losses) / num_updates,
            **({"loss/kl": sum(self._kls)} if self._kls else {}),  # without a reference: not known
            "loss/grad_norm": sum(self._grad_norms) / num_updates,
            "loss/grad_clipped": sum(self._max_grad_norm < norm < math.inf for norm in self._grad_norms) / num_updates,
            "loss/skipped": sum(not math.isfinite(norm) for norm in self._grad_norms),
            **{f"policy/{name}": value for name, value in means.items()},
            "policy/ratio_min": self._ratio_min,
            "policy/ratio_max": self._ratio_max,
        }


class _TokenMeans:
    """Means over action tokens."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._count = 0

    def add(self, mask: torch.Tensor, **values: torch.Tensor) -> None:
        """Add the values, each (b, T-1), at the tokens where the mask is True."""
        self._count += int(mask.sum())
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value[mask].double().sum())

    def means(self) -> dict[str, float]:
        return {name: total / max(self._count, 1) for name, total in self._sums.items()}


class Diagnosis:
    """Watches the metrics of a run, and says in one sentence, once, what looks wrong and what to try.

    A rule is a function of this class: it returns its sentence, or None while all is well.
    """

    def __init__(self, config: PolicyConfig):
        self._config = config
        self._history: list[dict[str, float]] = []
        self._said: set[str] = set()

    def check(self, metrics: dict[str, float]) -> list[str]:
        """Look at one more step's metrics, and past those that are not finite; the sentences that are new."""
        self._history.append({name: value for name, value in metrics.items() if math.isfinite(value)})
        sentences = []
        for rule in (
            self._skipped,
            self._sampler_gap,
            self._no_signal,
            self._cut_off,
            self._entropy_collapse,
            self._kl_runaway,
            self._tokens_clipped,
            self._gradient_clipped,
            self._flat_reward,
        ):
            sentence = None if rule.__name__ in self._said else rule()
            if sentence is not None:
                self._said.add(rule.__name__)
                sentences.append(sentence)
        return sentences

    def _last(self, name: str, count: int) -> list[float]:
        """The values of the last `count` steps; none where one of them lacks it, or there are not so many yet."""
        values = [entry[name] for entry in self._history[-count:] if name in entry]
        return values if len(values) == count else []

    def _skipped(self) -> str | None:
        if not any(self._last("loss/skipped", 1)):
            return None
        return (
            "the gradient was not finite, and its update was skipped: lower --lr, and see that every reward is a "
            "number; three such steps in a row end the run"
        )

    def _sampler_gap(self) -> str | None:
        limit = MAX_SAMPLER_GAP[self._config.dtype]
        gap = max(self._last("policy/sampler_gap", 1), default=0.0)
        off = max((abs(ratio - 1) for ratio in self._last("policy/first_ratio", 1)), default=0.0)
        if max(gap, off) <= limit:
            return None
        by_ratio = f"the first ratio differs from 1 by {off:.2g}"
        what = f"log-probs of the same tokens differ by {gap:.2g} nats on average" if gap > limit else by_ratio
        remedy = "" if self._config.dtype == "float32" else "--dtype float32 and "
        return (
            f"sampling and training disagree about the policy: {what} (in {self._config.dtype} below {limit:g} is "
            f"usual), so that the gradient is that of another policy: try {remedy}--attn-implementation eager; if it "
            "stays, the sampler or a mask is wrong"
        )

    def _no_signal(self) -> str | None:
        shares = self._last("group/without_signal", 10)
        if not shares or min(shares) < 1:
            return None
        reward = mean(self._last("reward/total", 10))
        cause = (
            "the questions are solved: ask harder ones (--data)"
            if mean(self._last("reward/correct", 10) or [0.0]) > 0.5
            else "ask easier questions (--data), reward part of it (--format-weight), or raise --group-size or "
            "--temperature"
        )
        return (
            f"for ten steps all completions of a group have earned the same (mean {reward:.2f}): every advantage is 0, "
            f"and nothing is learned: {cause}"
        )

    def _cut_off(self) -> str | None:
        shares = self._last("completion/truncated", 5)
        if not shares or mean(shares) <= 0.2:
            return None
        never = " (none ended by itself: the policy may not know its end-of-turn token)" if min(shares) == 1 else ""
        return (
            f"{mean(shares):.0%} of the completions of the last five steps were cut off{never}, most of them before "
            f"their answer: raise --max-new-tokens, now {self._config.max_new_tokens}"
        )

    def _entropy_collapse(self) -> str | None:
        entropies, correct = self._last("policy/entropy", 5), self._last("reward/correct", 5)
        if not entropies or not correct or len(self._history) < 10:
            return None
        start = mean(entry["policy/entropy"] for entry in self._history[:5] if "policy/entropy" in entry)
        now = mean(entropies)
        if now > 0.05 * start or mean(correct) > 0.9:
            return None
        return (
            f"the entropy has collapsed from {start:.3f} to {now:.4f} nats a token, with {mean(correct):.2f} of the "
            "answers right: completions of a group are all alike, and nothing is left to compare: lower --lr, or raise "
            "--kl-weight or --temperature"
        )

    def _kl_runaway(self) -> str | None:
        kls = self._last("loss/kl", 5)
        if not kls or mean(kls) <= 1.0:
            return None
        return (
            f"the KL to the policy at the start has reached {mean(kls):.2g} nats a token: the policy is leaving what "
            "it could do before: lower --lr or raise --kl-weight"
        )

    def _tokens_clipped(self) -> str | None:
        shares = self._last("policy/clipped", 5)
        if not shares or mean(shares) <= 0.3:
            return None
        return (
            f"the clip has silenced {mean(shares):.0%} of the action tokens in the last five steps, which no longer "
            "learn: lower --lr or --epochs-per-step, or raise --minibatch-size"
        )

    def _gradient_clipped(self) -> str | None:
        shares, norms = self._last("loss/grad_clipped", 20), self._last("loss/grad_norm", 20)
        if not shares or not norms or min(shares) < 1 or mean(norms) <= 5 * self._config.max_grad_norm:
            return None
        return (
            f"every gradient of the last twenty steps was scaled down, from {mean(norms):.1f} to --max-grad-norm "
            f"{self._config.max_grad_norm:g}: the steps' lengths no longer tell small gradients from large ones: raise "
            "--max-grad-norm, or lower --kl-weight if it is high"
        )

    def _flat_reward(self) -> str | None:
        steps = [entry for entry in self._history if "reward/total" in entry]  # without evaluations before and after
        if len(steps) < 60:
            return None
        first, last = ([entry["reward/total"] for entry in part] for part in (steps[:20], steps[-20:]))
        correct = [entry.get("reward/correct", 0.0) for entry in steps[-20:]]
        noise = ((stdev(first) ** 2 + stdev(last) ** 2) / 20) ** 0.5
        if mean(last) - mean(first) > 2 * noise or mean(correct) > 0.9:
            return None
        return (
            f"the reward has not risen beyond noise in {len(steps)} steps ({mean(first):.2f} at first, "
            f"{mean(last):.2f} now): raise --lr (now {self._config.lr:g}) or lower --kl-weight, and read "
            "samples.jsonl: does the reward pay what you want?"
        )
