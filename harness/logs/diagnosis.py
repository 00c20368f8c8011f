"""One sentence for the user when a run looks wrong; docs/metrics.md explains the rules."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev

from harness.base.config import PolicyConfig

# How far recorded and recomputed log-probs may differ, in nats, as a mean over tokens; rounding gives 1e-6 and 1e-2
MAX_SAMPLING_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.1}
ALL_EQUAL = "all rewards of every group are equal"
OVER_OPTIMISED = "a reward is over-optimised"
WRONG_MAJORITY = "the majority is wrong"
# Of runs that learn from something else than the differences within a group: for them equal rewards are no fault
OTHER_SIGNALS = {"teacher/kl", "critic/explained_variance", "reward/baseline", "kept/share"}
MAX_STALE_DIFFERENCE = 1.0  # for a sampler that deliberately has weights that are several steps old


MAX_STALE_GAP = 0.4  # nats, mean of five steps; runs that recovered have stayed below 0.35


def sampling_limit(config: PolicyConfig) -> float:
    """How far they may differ in this run, which may sample with an engine."""
    if getattr(config, "push_every", 1) > 1 or getattr(config, "lag", 0) > 0:
        return MAX_STALE_DIFFERENCE
    is_rounded = "bfloat16" in (
        config.dtype,
        getattr(config, "engine_dtype", None),
        getattr(config, "sampler_dtype", None),
    )
    is_older = getattr(config, "steps_ahead", 0) > 0  # a step changes log-probs by some 1e-2
    has_engine = hasattr(config, "engine_url") or getattr(config, "engine", None) is not None
    is_cut = has_engine and config.top_p < 1  # an engine returns log-probs within the nucleus
    return MAX_SAMPLING_DIFFERENCE["bfloat16" if is_rounded or is_older or is_cut else "float32"]


class Diagnosis:
    """Watches the metrics of a run, and says once, in one sentence, what looks wrong and what to try."""

    def __init__(self, config: PolicyConfig, rewards: Sequence[str] = ()):
        self._config, self._rewards = config, rewards  # the components that have a weight
        self._history: list[dict[str, float]] = []
        self._said: set[str] = set()
        self.findings: dict[str, str] = {}  # the findings of the last step, including those already printed

    def check(self, metrics: dict[str, float]) -> list[str]:
        """Check one more step's metrics, except those that are not finite; returns the new sentences."""
        self._history.append({name: value for name, value in metrics.items() if math.isfinite(value)})
        self.findings = self._find()
        new = [sentence for finding, sentence in self.findings.items() if finding not in self._said]
        self._said |= self.findings.keys()
        return new

    def write(self, path: Path, step: int) -> None:
        """Add a line for each finding of this step."""
        for finding, sentence in self.findings.items():
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "finding": finding, "sentence": sentence}) + "\n")

    def _mean(self, name: str, count: int = 5, of: Callable[[list[float]], float] = mean) -> float:
        """The mean over the last `count` steps; NaN if a step lacks the metric, so that no comparison holds."""
        values = [entry[name] for entry in self._history[-count:] if name in entry]
        return of(values) if len(values) == count else math.nan

    def _is_constant(self, reward: str) -> bool:
        """Whether a reward that is trained on has had one value in ten steps."""
        spread = self._mean(f"reward/{reward}", 10, lambda means: max(means) - min(means))
        return spread == self._mean(f"reward_std/{reward}", 10, max) == 0 and "teacher/kl" not in self._history[-1]

    def _over_optimised(self) -> tuple[str, int, tuple[float, float], tuple[float, float]] | None:
        """A reward that has risen since the best held-out accuracy, whose step it is, while that fell; both, twice."""
        gold = "eval/greedy/accuracy"
        for name in self._rewards:
            proxy = f"eval/greedy/reward_{name}"  # there is none of `correct`
            entries = [entry for entry in self._history if proxy in entry and gold in entry]
            if len(entries) < 2:
                continue
            best, last = max(entries, key=lambda entry: entry[gold]), entries[-1]
            then, now = best[gold], last[gold]
            noise = (2 * then * (1 - then) / self._config.eval_prompts) ** 0.5  # of a difference
            if then - now > max(0.05, 2 * noise) and last[proxy] > best[proxy]:
                return name, best["step"], (best[proxy], last[proxy]), (then, now)
        return None

    def _wrong_majority(self) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """Accuracy and agreement, in the ten steps of the best accuracy and in the last ten, if one fell, one rose."""
        names = ("reward/correct", "reward/agreement")
        steps = [[entry[name] for name in names] for entry in self._history if all(name in entry for name in names)]
        if len(steps) < 20:
            return None
        windows = [list(zip(*steps[start : start + 10], strict=True)) for start in range(len(steps) - 9)]
        best, last = max(windows, key=lambda window: mean(window[0])), windows[-1]
        noise = ((stdev(best[0]) ** 2 + stdev(last[0]) ** 2) / 10) ** 0.5  # of the difference of two accuracies
        then, now = (tuple(map(mean, window)) for window in (best, last))
        return (then, now) if then[0] - now[0] > max(0.1, 3 * noise) and now[1] > then[1] else None

    def _find(self) -> dict[str, str]:
        """The sentences, keyed by their findings as docs/metrics.md names them."""
        config, found = self._config, {}
        if self._mean("loss/skipped", 1) > 0:
            found["a gradient is not finite"] = (
                "the gradient was not finite, and its update was skipped: lower --lr, and see that every reward is a "
                "number; three such steps in a row end the run"
            )
        has_success_rate = hasattr(sys.modules[type(config).__module__], "success_rate")  # MaxRL's train.py
        if has_success_rate and (share := self._mean("group/below_zero", 1)) > 0:
            found["rewards are below 0"] = (
                f"{share:.0%} of the groups have returns below 0, where a mean is no success rate: MaxRL measures them "
                "from the lowest of the group; rewards of 0 and 1 keep its objective (--reward-weight, or the task)"
            )
        if self._mean("kept/share", 1) == 0:
            found["nothing is kept"] = (
                "no completion earned more than --keep-above, so this step imitates nothing and changes no weight: "
                "raise --group-size, ask easier questions (--data), or lower --keep-above"
            )
        if self._mean("teacher/agreement") < 0.5:  # five steps
            found["the teacher does not understand its hints"] = (
                "shown its hints, the teacher raises wrong completions more than right ones (teacher/agreement below "
                "0.5), so it teaches no right answers: take a --model that reads hints, or another --hint"
            )
        newest, is_rewarded = self._history[-1], hasattr(config, "reward_weight") and not hasattr(config, "teacher")
        accuracies = [newest.get(f"eval/{kind}/accuracy", math.inf) for kind in ("greedy", "sampled")]
        if is_rewarded and newest.get("step") == 0 and max(accuracies) <= 0:
            share = 1 - newest.get("eval/sampled/stopped", 1.0)
            first = f"first raise --max-new-tokens, as {share:.0%} are cut off, and " if share > 0.5 else ""
            found["nothing is right before training"] = (
                "none of the held-out answers is right before training, greedy or sampled, and then a reward for right "
                f"answers alone teaches nothing: {first}read some (before.json); what helps: examples of answers "
                "in --system-prompt, rewards for parts of the way (--reward-functions), imitation/sft first, easier "
                "questions (--data)"
            )
        difference = self._mean("policy/sampling_log_prob_difference", 1)
        off, limit = abs(self._mean("policy/first_ratio", 1) - 1), sampling_limit(config)
        if difference > limit or off > limit:
            what = f"log-probs of the same tokens differ by {difference:.2g} nats on average"
            what = what if difference > limit else f"the first ratio differs from 1 by {off:.2g}"
            remedy = "" if config.dtype == "float32" else "--dtype float32 and "
            found["sampling and training disagree about the policy"] = (
                f"sampling and training disagree about the policy: {what} (in {config.dtype} below {limit:g} is "
                f"usual), so the gradient belongs to another policy: try {remedy}--attn-implementation eager; if "
                "it stays, the sampler or a mask is wrong"
            )
        if "policy/staleness" in newest and (gap := self._mean("policy/sampling_log_prob_difference")) > MAX_STALE_GAP:
            other = "--correction dppo (or clip, tis), or " if getattr(config, "correction", "none") == "none" else ""
            found["the samples are too old"] = (
                f"the policy has moved {gap:.2f} nats per token away from its samples (mean of five steps), whose "
                f"weights are {self._mean('policy/staleness'):.1f} steps old: try {other}a lower --lag or --lr"
            )
        now, correct, alike = map(self._mean, ("policy/entropy", "reward/correct", "group/zero_reward_variance"))
        first = [entry["policy/entropy"] for entry in self._history[:5] if "policy/entropy" in entry]
        if len(self._history) >= 10 and first and now <= 0.05 * mean(first) and correct <= 0.9 and not alike < 0.9:
            found["the entropy collapses"] = (
                f"the entropy has collapsed from {mean(first):.3f} to {now:.4f} nats per token, with {correct:.2f} of "
                "the answers right: completions of a group are all alike, and nothing is left to compare: lower --lr, "
                "or raise --kl-weight or --temperature"
            )
        if (kl := self._mean("loss/kl")) > 1:
            found["the KL grows without bound"] = (
                f"the KL to the policy at the start has reached {kl:.2g} nats per token: lower --lr, or raise "
                "--kl-weight"
            )
        is_narrow = getattr(config, "clip_eps", 1.0) < 0.01  # GSPO's, which clips most tokens by design
        if (share := self._mean("policy/clipped")) > 0.3 and not is_narrow:
            found["too many tokens are clipped"] = (
                f"the clip has silenced {share:.0%} of the action tokens in the last five steps, which no longer "
                "learn: lower --lr or --epochs-per-step, or raise --minibatch-size"
            )
        norm = self._mean("loss/grad_norm", 20)
        if self._mean("loss/grad_clipped", 20, min) == 1 and norm > 5 * config.max_grad_norm:
            found["every gradient is scaled down, and by much"] = (
                f"every gradient of the last twenty steps was scaled down, from {norm:.1f} to --max-grad-norm "
                f"{config.max_grad_norm:g}: raise --max-grad-norm, or lower --kl-weight if it is high"
            )
        is_compared = not OTHER_SIGNALS & self._history[-1].keys()
        if is_compared and self._mean("group/zero_reward_variance", 10, min) == 1:
            cause = "ask easier questions (--data), reward partial success (--reward-weight), or raise --group-size or "
            cause += "--temperature"
            if self._mean("reward/correct", 10) > 0.5:
                cause = "the questions are solved: ask harder ones (--data)"
            found[ALL_EQUAL] = (
                "for ten steps all completions of a group have earned the same (mean "
                f"{self._mean('reward/total', 10):.2f}): every advantage is 0, and nothing is learned: {cause}"
            )
        constant = [name for name in self._rewards if self._is_constant(name)]
        if constant and (len(self._rewards) > 1 or ALL_EQUAL not in found):
            named = " and ".join(f"{name} (always {self._mean(f'reward/{name}'):g})" for name in constant)
            found["a reward is constant"] = (
                f"in the last ten steps every completion got the same value of {named}, which teaches nothing: read "
                "samples.jsonl: is it earned always or never, or does it read something other than what it gets? "
                f"--reward-weight {constant[0]}=0 only logs it"
            )
        if (missing := self._mean("sampling/groups_without_signal", 1)) > 0 and config.max_rounds > 1:
            found["too few groups have a signal"] = (
                f"{missing:g} of the {config.prompts_per_step} groups of the update have completions of equal rewards, "
                f"although {self._mean('sampling/groups', 1):g} groups were sampled: raise --max-rounds, or ask "
                "questions that are neither solved nor hopeless (--data)"
            )
        if (share := self._mean("completion/truncated")) > 0.2:
            has_ended = self._mean("completion/truncated", 5, min) < 1
            never = "" if has_ended else " (none ended by itself: the policy may not know its end-of-turn token)"
            found["completions are cut off"] = (
                f"{share:.0%} of the completions of the last five steps were cut off"
                f"{never}, most of them before their answer: raise --max-new-tokens, now {self._config.max_new_tokens}"
            )
        steps = [entry for entry in self._history if "reward/total" in entry]  # without evaluations before and after
        if len(steps) >= 60:
            first, last = ([entry["reward/total"] for entry in part] for part in (steps[:20], steps[-20:]))
            correct = mean(entry.get("reward/correct", 0.0) for entry in steps[-20:])
            noise = ((stdev(first) ** 2 + stdev(last) ** 2) / 20) ** 0.5
            if mean(last) - mean(first) <= 2 * noise and correct <= 0.9:
                found["no rise beyond noise"] = (
                    f"the reward has not risen beyond noise in {len(steps)} steps ({mean(first):.2f} at first, "
                    f"{mean(last):.2f} now): raise --lr (now {self._config.lr:g}) or lower --kl-weight, and read "
                    "samples.jsonl: does the reward pay what you want?"
                )
        if (fall := self._over_optimised()) is not None:
            name, best, (proxy, risen), (gold, fallen) = fall
            found[OVER_OPTIMISED] = (
                f"the reward {name!r} is over-optimised: since step {best} it has risen from {proxy:.2f} to {risen:.2f}"
                f" on the held-out answers, and their accuracy has fallen from {gold:.2f} to {fallen:.2f}: stop there "
                "(--steps, or --stop-when over-optimised), raise --kl-weight, or pay for the accuracy, too "
                "(--reward-weight); a reward model can learn from more pairs"
            )
        if (pair := self._wrong_majority()) is not None:
            (then, agreed), (now, agrees) = pair
            found[WRONG_MAJORITY] = (
                f"the majority is wrong: since the best ten steps the agreement has risen from {agreed:.2f} to "
                f"{agrees:.2f}, and the accuracy has fallen from {then:.2f} to {now:.2f}: the policy becomes sure of "
                "its mistakes: ask questions whose most frequent answer is right (--data), or begin with a better "
                "policy (--model)"
            )
        failures, calls = self._mean("completion/failed_searches"), self._mean("reward/calls")
        if failures > 0.1 * calls:
            found["searches fail"] = (
                f"{failures / calls:.0%} of the calls of the last five steps were searches that the index could not "
                "answer: check --search-url, or raise --search-seconds"
            )
        return found
