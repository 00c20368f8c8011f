"""Diagnosis: a run's fault is reported once, with advice; a healthy run reports none; the metrics are right."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.experience import Experience, collate
from common.sampling import sample
from viewer.groups import name_of
from viewer.results import read_runs

from harness.base.config import RunConfig
from harness.base.places import in_experiments
from harness.logs.diagnosis import Diagnosis
from harness.logs.statistics import UpdateStatistics
from harness.models.loading import load_policy

pytestmark = pytest.mark.all_questions

ROOT = Path(__file__).resolve().parents[2]

RULES = {  # a phrase that only its sentence contains, and a flag that it names
    "skipped": ("was not finite", "--lr"),
    "sampling difference": ("disagree about the policy", "--attn-implementation"),
    "zero variance": ("have earned the same", "--group-size"),
    "solved": ("have earned the same", "--data"),
    "constant": ("which teaches nothing", "--reward-weight"),
    "cut off": ("were cut off", "--max-new-tokens"),
    "entropy": ("the entropy has collapsed", "--kl-weight"),
    "KL": ("the KL to the policy at the start", "--kl-weight"),
    "clip": ("the clip has silenced", "--epochs-per-step"),
    "too old": ("away from its samples", "--lag"),
    "few groups": ("have completions of equal rewards", "--max-rounds"),
    "gradient": ("was scaled down", "--max-grad-norm"),
    "flat": ("has not risen beyond noise", "--lr"),
    "below 0": ("returns below 0", "--reward-weight"),
    "searches": ("could not answer", "--search-url"),
    "wrong majority": ("the majority is wrong", "--data"),
    "nothing right": ("of the held-out answers is right before", "--system-prompt"),
    "nothing kept": ("this step imitates nothing", "--keep-above"),
    "hints": ("raises wrong completions more than right ones", "--hint"),
}


def the_sentence(rule: str, said: list[str]) -> str:
    """The rule's sentence; `said` must contain exactly one."""
    marker, flag = RULES[rule]
    found = [sentence for sentence in said if marker in sentence]
    assert len(found) == 1, said
    assert flag in found[0]
    return found[0]


# rules about a single update ----------------------------------------------------------------------------------------


@pytest.fixture
def update(load_script):
    """Sample with a policy, apply `change`, and return the metrics of two epochs of updates."""
    script = load_script("experiment_base/train.py")

    def update(policy, change=lambda policy, experience: None) -> dict[str, float]:
        config = script.Config(
            group_size=2, epochs_per_step=2, minibatch_size=4, micro_batch_size=3, dtype="float32", kl_weight=0.0
        )
        prompts = [[5, 6, 7] * 6, [8, 9] * 6, [10, 11, 12, 13] * 6]
        trajectories = sample(policy, prompts, 2, max_new_tokens=24, key=(0,))
        experience = collate(trajectories, policy.pad_id)
        experience.advantages = torch.tensor([[0.7], [-0.7]] * 3)
        experience.old_log_probs = script.old_log_probs(config, policy, experience)
        change(policy, experience)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
        return script.update(config, policy, optimizer, experience, step=1).metrics()

    return update


def diagnose(metrics: dict[str, float], dtype: str = "float32") -> list[str]:
    """The reports on three steps with the same metrics."""
    diagnosis = Diagnosis(SimpleNamespace(dtype=dtype, max_grad_norm=1.0))
    return [sentence for _ in range(3) for sentence in diagnosis.check(metrics)]


def test_a_gradient_that_is_not_finite_is_reported_and_skipped(make_policy, update):
    def spoil(rows: slice):
        return lambda policy, experience: experience.advantages[rows].fill_(math.nan)

    policy = make_policy()
    start = {name: weight.clone() for name, weight in policy.named_parameters()}
    metrics = update(policy, spoil(slice(None)))
    assert (metrics["loss/skipped"], metrics["loss/grad_clipped"]) == (4, 0)  # two epochs of two minibatches
    assert diagnose(metrics) == [the_sentence("skipped", diagnose(metrics))]
    assert all(torch.equal(weight, start[name]) for name, weight in policy.named_parameters())
    assert update(make_policy(), spoil(slice(2, 3)))["loss/skipped"] == 2
    metrics = update(policy)
    assert metrics["loss/skipped"] == 0
    assert diagnose(metrics) == []
    assert not all(torch.equal(weight, start[name]) for name, weight in policy.named_parameters())


def score_at_another_temperature(policy, _) -> None:
    policy.temperature = 1.0


def shift_the_mask(_, experience: Experience) -> None:
    experience.action_mask = torch.nn.functional.pad(experience.action_mask, (1, -1))


@pytest.mark.parametrize("change", [score_at_another_temperature, shift_the_mask])
def test_disagreement_of_sampling_and_training_is_reported(make_policy, update, change):
    assert diagnose(update(make_policy(temperature=0.7))) == []
    metrics = update(make_policy(temperature=0.7), change)
    said = diagnose(metrics)
    assert len(said) == 1
    assert f"differ by {metrics['policy/sampling_log_prob_difference']:.2g} nats" in the_sentence(
        "sampling difference", said
    )
    assert "first ratio" not in said[0]


def test_a_first_ratio_other_than_1_is_reported_on_its_own(make_policy, update):
    def age(_, experience: Experience) -> None:
        experience.old_log_probs = experience.sampler_log_probs - 0.01

    metrics = update(make_policy(), age)
    assert metrics["policy/sampling_log_prob_difference"] < 1e-4
    assert "the first ratio differs from 1 by 0.01 (" in the_sentence("sampling difference", diagnose(metrics))
    assert diagnose(metrics, dtype="bfloat16") == []  # bfloat16 rounds by as much


def test_rounding_to_bfloat16_is_no_disagreement_in_bfloat16(update):
    policy = load_policy(RunConfig(device="cpu", dtype="bfloat16", attn_implementation="sdpa"))
    metrics = update(policy)
    assert metrics["policy/sampling_log_prob_difference"] > 1e-5
    assert diagnose(metrics, dtype="bfloat16") == []


# rules about several steps ------------------------------------------------------------------------------------------


SETTINGS = SimpleNamespace(
    dtype="float32",
    max_grad_norm=1.0,
    max_new_tokens=5,
    lr=5e-5,
    max_rounds=4,
    prompts_per_step=16,
    reward_weight=(),
    lag=4,
)
USUAL = {"policy/entropy": 0.5, "reward/correct": 0.4, "reward/total": 0.4}
STALE = {"policy/sampling_log_prob_difference": 0.41, "policy/staleness": 4.0}
COLLAPSED = [USUAL] * 5 + [USUAL | {"policy/entropy": 0.02, "group/zero_reward_variance": 0.95}] * 6
NOISE = [{"reward/total": 0.5 + 0.1 * (-1) ** step} for step in range(60)]
FIRST = {"step": 0, "eval/greedy/accuracy": 0.0, "eval/sampled/accuracy": 0.0}


def turn(first: float, last: float) -> list[dict[str, float]]:
    """Ten steps with one accuracy, and some with another, while the agreement rises."""
    accuracies = [first] * 10 + [last] * 10
    return [{"reward/correct": value, "reward/agreement": 0.6 + 0.2 * (n >= 10)} for n, value in enumerate(accuracies)]


HISTORIES = {  # steps; the rule that reports after the last one, and not before; a part of its sentence
    "cut off": ([{"completion/truncated": 0.3}] * 5, "cut off", "30% of the completions"),
    "never stops": ([{"completion/truncated": 1.0}] * 5, "cut off", "(none ended by itself: "),
    "seldom cut off": ([{"completion/truncated": 0.2}] * 9, None, ""),
    "unanswerable": ([USUAL | {"group/zero_reward_variance": 1.0}] * 10, "zero variance", "ask easier questions"),
    "solved": ([{"group/zero_reward_variance": 1.0, "reward/correct": 1.0, "reward/total": 1.0}] * 10, "solved",
               "(mean 1.00): every advantage is 0, and nothing is learned: the questions are solved: ask harder"),
    "one group differs": ([{"group/zero_reward_variance": 1.0}] * 9 + [{"group/zero_reward_variance": 0.9}], None, ""),
    "a teacher": ([{"group/zero_reward_variance": 1.0, "teacher/kl": 0.4}] * 12, None, ""),
    "collapsed": (COLLAPSED[:10], "entropy", "from 0.500 to 0.0200 nats"),
    "collapsed and right": ([row | {"reward/correct": 0.95} for row in COLLAPSED], None, ""),
    "collapsed and unlike": ([row | {"group/zero_reward_variance": 0.5} for row in COLLAPSED], None, ""),
    "KL": ([{"loss/kl": 0.1}] * 4 + [{"loss/kl": 5.1}], "KL", "has reached 1.1 nats"),
    "clipped": ([{"policy/clipped": 0.31}] * 5, "clip", "31% of the action tokens"),
    "too old": ([STALE] * 5, "too old", "0.41 nats per token away from its samples (mean of five "
                "steps), whose weights are 4.0 steps old: try --correction dppo"),
    "old": ([STALE | {"policy/sampling_log_prob_difference": 0.39}] * 9, None, ""),
    "few groups": ([{"sampling/groups_without_signal": 3, "sampling/groups": 64}], "few groups", "3 of the 16 groups"),
    "scaled": ([{"loss/grad_clipped": 1.0, "loss/grad_norm": 5.1}] * 20, "gradient", "from 5.1 to --max-grad-norm 1:"),
    "scaled a little": ([{"loss/grad_clipped": 1.0, "loss/grad_norm": 4.9}] * 25, None, ""),
    "flat": (NOISE, "flat", "in 60 steps (0.50 at first, 0.50 now): raise --lr (now 5e-05)"),
    "rises": ([{"reward/total": step / 100} for step in range(80)], None, ""),
    "flat because solved": ([row | {"reward/correct": 0.95} for row in NOISE], None, ""),
    "penalties": ([{"group/below_zero": 0.25}], "below 0", "25% of the groups"),  # of MaxRL
    "penalties elsewhere": ([{"group/below_zero": 0.25}], None, ""),
    "searches": ([{"completion/failed_searches": 0.2, "reward/calls": 1.5}] * 5, "searches", "13% of the calls"),
    "a constant": ([USUAL | {"reward/f": 1.0, "reward_std/f": 0.0}] * 10, "constant", "the same value of f (always 1)"),
    "a constant mean": ([USUAL | {"reward/f": 0.0, "reward_std/f": 1.0}] * 12, None, ""),  # normalised in its batch
    "changes": ([USUAL | {"reward/f": 1.0 / step, "reward_std/f": 0.0} for step in range(1, 12)], None, ""),
    "no weight": ([USUAL | {"reward/g": 1.0, "reward_std/g": 0.0}] * 12, None, ""),
    "nothing is right": ([FIRST], "nothing right", "a reward for right answers alone teaches nothing: read some"),
    "nothing ends": ([FIRST | {"eval/sampled/stopped": 0.2}], "nothing right", "first raise --max-new-tokens, as 80%"),
    "one is right": ([FIRST | {"eval/sampled/accuracy": 1 / 192}], None, ""),
    "greedy is right": ([FIRST | {"eval/greedy/accuracy": 1 / 24}], None, ""),
    "no accuracy": ([{"step": 0, "eval/greedy/reward_short": 0.0, "eval/sampled/reward_short": 0.0}], None, ""),
    "nothing is right later": ([FIRST | {"step": 80}], None, ""),
    "kept nothing": ([{"kept/share": 0.1}] * 3 + [{"kept/share": 0.0}], "nothing kept", "raise --group-size, ask"),
    "wrong hints": ([{"teacher/agreement": 0.4}] * 5, "hints", "below 0.5"),
    "right hints": ([{"teacher/agreement": 0.4}] * 2 + [{"teacher/agreement": 0.6}] * 5, None, ""),
    "a wrong majority": (turn(0.4, 0.2), "wrong majority", "since the best ten steps the agreement has risen from 0.60 "
                         "to 0.80, and the accuracy has fallen from 0.40 to 0.20"),
    "a right majority": (turn(0.4, 0.9), None, ""),
    "agreement falls, too": ([row | {"reward/agreement": row["reward/correct"]} for row in turn(0.4, 0.2)], None, ""),
    "few fail": ([{"completion/failed_searches": 0.1, "reward/calls": 1.5}] * 6, None, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_a_rule_speaks_once_and_at_its_step(name, monkeypatch):
    steps, rule, part = HISTORIES[name]
    if name == "penalties":
        monkeypatch.setattr(sys.modules[type(SETTINGS).__module__], "success_rate", None, raising=False)
    diagnosis = Diagnosis(SETTINGS, ("correct", "f"))  # the rewards with a weight
    said = [diagnosis.check(row) for row in [{"eval/greedy/accuracy": 0.3}, *steps]]
    if rule is None:
        assert not any(said)
        return
    assert not any(said[:-1])
    assert part in the_sentence(rule, said[-1])
    assert diagnosis.check(steps[-1]) == []  # already reported
    assert len(diagnosis.findings) == 1  # and still true


REPORTS_OF_RESULTS = {
    "broken_mask": ["sampling difference", "flat"],
    "max_new_tokens_16": ["cut off", "flat"],
    "experiment_multiturn_tool_calling/broken_mask": ["sampling difference", "KL"],
    "experiment_multiturn_qa/broken_mask": ["sampling difference", "KL", "flat"],
    "experiment_multiturn_qa/paid_calls_1": ["KL"],
    # without the search no answer can be right
    **{f"experiment_multiturn_qa/no_tool_seed{seed}": ["zero variance", "flat"] for seed in range(5)},
    # samples of weights that are four steps old, uncorrected
    **{f"asynchronous/{run}": ["too old"] for run in ("none_seed0", "swap8_seed0", "swap8_seed2")},
    "asynchronous/none_seed2": ["too old", "cut off"],
    "likelihood/decimals_seed0": ["zero variance"],  # no thought makes the references probable
    **{f"slips_seed{seed}": ["wrong majority"] for seed in range(3)},
    # an engine that keeps its initial weights
    **{f"never_corrected_seed{seed}": ["flat"] for seed in (0, 1)},
    "never_corrected_seed2": ["flat", "KL"],
    **{f"never_uncorrected_seed{seed}": ["KL", "gradient", "flat"] for seed in range(3)},
}
RESULTS = [
    run
    for folder in sorted(in_experiments("results"))
    for run in read_runs(folder).values()
    if "group_size" in run.config
]


@pytest.mark.parametrize("run", RESULTS, ids=name_of)
def test_of_the_published_runs_only_broken_ones_are_reported(run):
    settings = SimpleNamespace(**run.config)
    diagnosis = Diagnosis(settings)
    rows = run.metrics.rows
    assert len(rows) > 25
    said = []
    for row in rows:
        if "loss/grad_norm" in row:  # one update per step; older runs did not log derivable values
            derived = {
                "loss/grad_clipped": float(row["loss/grad_norm"] > getattr(settings, "max_grad_norm", math.inf)),
                "completion/truncated": 1 - row["completion/stopped"],
                "loss/skipped": 0,
            }
            row = derived | row
        said += diagnosis.check(row)
    names = (name_of(run), run.directory.name)
    expected = next((REPORTS_OF_RESULTS[name] for name in names if name in REPORTS_OF_RESULTS), [])
    assert said == [the_sentence(rule, said) for rule in expected]


def test_a_reward_that_is_not_a_number_disables_no_rule():
    rows = read_runs(ROOT / "experiment_base/results")["seed0"].metrics.rows
    diagnosis = Diagnosis(SimpleNamespace(dtype="float32", max_grad_norm=1.0, lr=5e-5))
    for row in rows:
        if row["step"] in (3, 15, 75):
            row |= {name: math.nan for name in row if name.startswith(("reward/", "loss/"))} | {"loss/skipped": 1}
    said = [sentence for row in rows for sentence in diagnosis.check(row)]
    assert said == [the_sentence("skipped", said)]


# UpdateStatistics ---------------------------------------------------------------------------------------------------

CLIP_EPS, KL_WEIGHT, MAX_GRAD_NORM = 0.2, 0.1, 1.0
B, W = 6, 9  # rows, and entries per row


@pytest.fixture
def experience(make_experience) -> Experience:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(B, W, generator=generator) < 0.6).long()
    fields = ("old_log_probs", "log_probs_ref")
    made = make_experience(
        mask,
        **{name: -3 * torch.rand(B, W, generator=generator) for name in fields},
        completion_index=torch.arange(B) % 2,
        advantages=torch.tensor([[1.0], [-1.0], [0.0], [0.5], [-2.0], [0.3]]),
    )
    made.prompt_index = torch.arange(B) // 2 + 10
    made.sampler_log_probs = made.old_log_probs + 0.01 * torch.randn(B, W, generator=generator)
    return made


def updates_of(experience: Experience) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
    """Log-probs (B, T-1), entropy (B, T-1) and gradient norm of three updates."""
    generator = torch.Generator().manual_seed(1)
    norms = (0.5, 3.0, 7.0)  # the limit is 1
    old, shape = experience.old_log_probs, experience.action_mask.shape
    return [
        (old + 0.3 * torch.randn(shape, generator=generator), torch.rand(shape, generator=generator), n) for n in norms
    ]


def gather(
    train, experience: Experience, updates: list, micro_batch_size: int, kl_weight: float = KL_WEIGHT
) -> UpdateStatistics:
    """Add the updates as experiment_base does, `micro_batch_size` rows at a time."""
    statistics = UpdateStatistics(MAX_GRAD_NORM)
    config = SimpleNamespace(clip_eps=CLIP_EPS, kl_weight=kl_weight)
    for epoch, (log_probs, entropy, norm) in enumerate(updates):
        for rows in torch.arange(B).split(micro_batch_size):
            micro = experience.select(rows)
            width = micro.action_mask.shape[1]
            leaf = log_probs[rows, :width].clone().requires_grad_()
            terms, diagnostics = train.policy_loss(config, leaf, micro, num_rows=B)
            terms.sum().backward()
            statistics.add(epoch, 0, micro, leaf, terms, entropy=entropy[rows, :width], **diagnostics)
        statistics.end_update(torch.tensor(norm))
    return statistics


def slow_metrics(experience: Experience, updates: list) -> dict[str, float]:
    """The same metrics, computed one token at a time."""
    entropies, ratios, clipped, differences, losses, kls = ([] for _ in range(6))
    for log_probs, entropy, _ in updates:
        losses.append(0.0), kls.append(0.0)
        for row in range(B):
            advantage = experience.advantages[row, 0].item()
            places = [t for t in range(W) if experience.action_mask[row, t]]
            for t in places:
                ratio = math.exp(log_probs[row, t] - experience.old_log_probs[row, t])
                log_r = float(experience.log_probs_ref[row, t] - log_probs[row, t])
                k3 = math.exp(log_r) - log_r - 1
                within = min(max(ratio, 1 - CLIP_EPS), 1 + CLIP_EPS)
                losses[-1] += (-min(ratio * advantage, within * advantage) + KL_WEIGHT * k3) / len(places) / B
                kls[-1] += k3 / len(places) / B
                entropies.append(float(entropy[row, t]))
                ratios.append(ratio)
                clipped.append((ratio > 1 + CLIP_EPS and advantage > 0) or (ratio < 1 - CLIP_EPS and advantage < 0))
                differences.append(abs(float(log_probs[row, t] - experience.sampler_log_probs[row, t])))
    first = len(ratios) // len(updates)
    norms = [norm for *_, norm in updates]
    return {
        "loss/total": sum(losses) / len(losses),
        "loss/kl": kls[0],
        "loss/grad_norm": sum(norms) / len(norms),
        "loss/grad_clipped": sum(norm > MAX_GRAD_NORM for norm in norms) / len(norms),
        "loss/skipped": 0,
        "policy/entropy": sum(entropies) / len(entropies),
        "policy/ratio": sum(ratios) / len(ratios),
        "policy/clipped": sum(clipped) / len(clipped),
        "policy/first_ratio": sum(ratios[:first]) / first,
        "policy/sampling_log_prob_difference": sum(differences[:first]) / first,
        "policy/ratio_min": min(ratios),
        "policy/ratio_max": max(ratios),
    }


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_metrics_of_a_step_equal_a_slow_loop(load_script, experience, micro_batch_size):
    updates = updates_of(experience)
    expected = slow_metrics(experience, updates)
    assert 0 < expected["policy/clipped"] < 1
    train = load_script("experiment_base/train.py")
    statistics = gather(train, experience, updates, micro_batch_size)
    assert statistics.metrics() == pytest.approx(expected, rel=1e-5)
    assert sorted(statistics.rows) == [(prompt, completion) for prompt in (10, 11, 12) for completion in (0, 1)]
    for (prompt, completion), seen in statistics.rows.items():
        index = 2 * (prompt - 10) + completion
        mask = experience.action_mask[index]
        assert [(update.epoch, update.minibatch) for update in seen] == [(0, 0), (1, 0), (2, 0)]
        for update, (log_probs, entropy, _) in zip(seen, updates, strict=True):
            assert torch.equal(update.measurements["log_probs"], log_probs[index] * mask)
            assert torch.equal(update.measurements["entropy"], entropy[index] * mask)


def test_terms_of_rows_are_refused(experience):
    """Otherwise they would count once for every token."""
    leaf = torch.zeros(experience.action_mask.shape, requires_grad=True)
    with pytest.raises(ValueError, match=r"a term for every token, \(6, 9\), not \(6, 1\)"):
        UpdateStatistics(MAX_GRAD_NORM).add(0, 0, experience, leaf, leaf.sum(dim=1, keepdim=True))
