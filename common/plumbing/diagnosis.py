"""One sentence for the user when a run looks wrong; docs/metrics.md explains the rules."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

from common.plumbing.config import PolicyConfig

# How far recorded and recomputed log-probs may differ, in nats, as a mean over tokens. They come from matrix products
# of different shapes, and differ by some 1e-6 after float32 rounding, by some 1e-2 after bfloat16 rounding.
MAX_SAMPLING_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.1}
MAX_STALE_DIFFERENCE = 1.0  # where an engine samples with weights that are several steps old, on purpose


def sampling_limit(config: PolicyConfig) -> float:
    """How far they may differ in this run, in which an engine can sample."""
    if getattr(config, "push_every", 1) > 1:
        return MAX_STALE_DIFFERENCE
    is_rounded = "bfloat16" in (config.dtype, getattr(config, "engine_dtype", None))
    is_older = getattr(config, "steps_ahead", 0) > 0  # a step changes log-probs by some 1e-2
    is_cut = hasattr(config, "engine_url") and config.top_p < 1  # an engine's log-probs are those within the nucleus
    return MAX_SAMPLING_DIFFERENCE["bfloat16" if is_rounded or is_older or is_cut else "float32"]


class Diagnosis:
    """Watches the metrics of a run, and says in one sentence, once, what looks wrong and what to try.

    A rule is a function of this class: it returns its sentence, or None while all is well.
    """

    def __init__(self, config: PolicyConfig):
        self._config = config
        self._history: list[dict[str, float]] = []
        self._said: set[str] = set()
        self.findings: dict[str, str] = {}  # what holds at the last step: sentences, also those that were said before

    def check(self, metrics: dict[str, float]) -> list[str]:
        """Look at one more step's metrics, and past those that are not finite; the sentences that are new."""
        self._history.append({name: value for name, value in metrics.items() if math.isfinite(value)})
        sentences = {finding: rule() for finding, rule in self._rules().items()}
        self.findings = {finding: sentence for finding, sentence in sentences.items() if sentence is not None}
        new = [sentence for finding, sentence in self.findings.items() if finding not in self._said]
        self._said |= self.findings.keys()
        return new

    def write(self, path: Path, step: int) -> None:
        """Add a line for each finding that holds at this step."""
        lines = [
            {"step": step, "finding": finding, "sentence": sentence} for finding, sentence in self.findings.items()
        ]
        if lines:
            with path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)

    def _rules(self) -> dict[str, Callable[[], str | None]]:
        """By what they find, in the words of docs/metrics.md."""
        return {
            "a gradient is not finite": self._skipped,
            "sampling and training disagree about the policy": self._sampling_difference,
            "all rewards of every group are equal": self._zero_variance,
            "completions are cut off": self._cut_off,
            "the entropy collapses": self._entropy_collapse,
            "the KL grows without bound": self._kl_runaway,
            "too many tokens are clipped": self._tokens_clipped,
            "every gradient is scaled down, and by much": self._gradient_clipped,
            "no rise beyond noise": self._flat_reward,
            "searches fail": self._failed_searches,
        }

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

    def _sampling_difference(self) -> str | None:
        limit = sampling_limit(self._config)
        difference = max(self._last("policy/sampling_log_prob_difference", 1), default=0.0)
        off = max((abs(ratio - 1) for ratio in self._last("policy/first_ratio", 1)), default=0.0)
        if max(difference, off) <= limit:
            return None
        by_ratio = f"the first ratio differs from 1 by {off:.2g}"
        what = (
            f"log-probs of the same tokens differ by {difference:.2g} nats on average"
            if difference > limit
            else by_ratio
        )
        remedy = "" if self._config.dtype == "float32" else "--dtype float32 and "
        return (
            f"sampling and training disagree about the policy: {what} (in {self._config.dtype} below {limit:g} is "
            f"usual), so that the gradient is that of another policy: try {remedy}--attn-implementation eager; if it "
            "stays, the sampler or a mask is wrong"
        )

    def _zero_variance(self) -> str | None:
        shares = self._last("group/zero_reward_variance", 10)
        if not shares or min(shares) < 1:
            return None
        reward = mean(self._last("reward/total", 10))
        cause = (
            "the questions are solved: ask harder ones (--data)"
            if mean(self._last("reward/correct", 10) or [0.0]) > 0.5
            else "ask easier questions (--data), reward partial success (--reward-weight), or raise --group-size or "
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
        alike = self._last("group/zero_reward_variance", 5)
        if now > 0.05 * start or mean(correct) > 0.9 or (alike and mean(alike) < 0.9):
            return None
        return (
            f"the entropy has collapsed from {start:.3f} to {now:.4f} nats per token, with {mean(correct):.2f} of the "
            "answers right: completions of a group are all alike, and nothing is left to compare: lower --lr, or raise "
            "--kl-weight or --temperature"
        )

    def _kl_runaway(self) -> str | None:
        kls = self._last("loss/kl", 5)
        if not kls or mean(kls) <= 1.0:
            return None
        return (
            f"the KL to the policy at the start has reached {mean(kls):.2g} nats per token: the policy is leaving what "
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

    def _failed_searches(self) -> str | None:
        failures, calls = self._last("completion/failed_searches", 5), self._last("reward/calls", 5)
        if not failures or not calls or mean(failures) <= 0.1 * mean(calls):
            return None
        return (
            f"{mean(failures) / mean(calls):.0%} of the calls of the last five steps were searches that the index "
            "could not answer, so that the policy learns that searching does not help: see what is wrong with "
            "--search-url, or raise --search-seconds"
        )
