"""The update of every experiment: skipping rows changes no gradient; draws depend on seed and step.

The metrics of a rollout match their names, counted by hand.
"""

import json
import math
import time
from types import SimpleNamespace

import pytest
import torch
from oracle import FORMULAS, clips_of, slow_row

from common.critic import ActorCritic
from common.experience import Experience, collate
from common.logprobs import token_log_probs
from common.sampling import sample
from common.trajectory import Trajectory

from harness.base.config import RunConfig
from harness.logs.clock import StepClock
from harness.logs.samples import TokenTexts, write_samples
from harness.logs.statistics import UpdateStatistics, rollout_metrics
from harness.models.loading import load_policy
from harness.task.task import load_task

GROUP_SIZE = 2


@pytest.fixture(params=["experiment_base", "experiment_drgrpo"])
def train(request, load_script):
    return load_script(f"{request.param}/train.py")


def settings(**others) -> dict:
    return {"kl_weight": 0.0, "group_size": GROUP_SIZE, "micro_batch_size": 2, "max_new_tokens": 6} | others


def sampled(policy, prompts: list[list[int]], advantages: list[float], group_size: int = GROUP_SIZE) -> Experience:
    experience = collate(sample(policy, prompts, group_size, max_new_tokens=6, key=(0,)), policy.pad_id)
    experience.advantages = torch.tensor(advantages)[:, None]
    experience.old_log_probs = experience.sampler_log_probs
    return experience


def update_at_rate_0(train, policy, experience, **others) -> tuple[torch.Tensor, UpdateStatistics]:
    """The gradient of all parameters, and the statistics."""
    policy.zero_grad()
    config = train.Config(**settings(max_grad_norm=1e9) | others)
    statistics = train.update(config, policy, torch.optim.SGD(policy.parameters(), lr=0.0), experience, step=1)
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]), statistics


@pytest.mark.parametrize("advantages", [[1.0, -1.0, 0.0, 0.0, 2.0, -2.0], [0.0] * 6])
def test_skipping_zero_variance_groups_changes_no_gradient(train, make_policy, monkeypatch, advantages):
    policy = make_policy()
    experience = sampled(policy, [[5, 6, 7], [8, 9], [10, 11, 12, 13]], advantages)
    skipping, trained = update_at_rate_0(train, policy, experience)
    split = Experience.split
    monkeypatch.setattr(Experience, "split", lambda self, size, skip_zero_advantages: split(self, size))
    everything, every = update_at_rate_0(train, policy, experience)
    assert (len(trained.rows), len(every.rows)) == (4 if any(advantages) else 1, 6)
    assert (skipping - everything).norm() <= 1e-6 * everything.norm()


def test_minibatches_are_shuffled_by_seed_step_and_epoch(train, make_policy):
    """Each of them changes the order of groups, and the same ones repeat it."""
    policy = make_policy()
    experience = sampled(policy, [[5 + n] for n in range(8)], [1.0, -1.0] * 8)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)

    def orders(seed: int, step: int) -> list[list[int]]:
        """The minibatch of every group, epoch by epoch."""
        config = train.Config(**settings(seed=seed, epochs_per_step=2, minibatch_size=GROUP_SIZE))
        rows = train.update(config, policy, optimizer, experience, step).rows
        return [[rows[prompt, 0][epoch].minibatch for prompt in range(8)] for epoch in range(2)]

    first = orders(seed=0, step=1)
    assert orders(seed=0, step=1) == first
    every = [*first, *orders(seed=1, step=1), *orders(seed=0, step=2)]
    assert all(sorted(order) == list(range(8)) for order in every)
    assert len({tuple(order) for order in every}) == len(every)


def test_completions_depend_on_seed_and_step(train, tmp_path):
    """For the same question: with different ones they would differ anyway."""
    path, policy = tmp_path / "one.jsonl", load_policy(RunConfig(device="cpu"))
    path.write_text('{"question": "What is 47 plus 29?", "answer": "76"}\n')
    given = {"data": str(path), "eval_data": str(path), "temperature": 1.0, "system_prompt": "", "prompts_per_step": 1}

    def completions(seed: int, step: int) -> list[list[int]]:
        config = train.Config(**settings(seed=seed, group_size=8, **given))
        return [row.ids for row in train.sample_completions(config, load_task(config), policy, step)]

    first = completions(seed=0, step=1)
    assert completions(seed=0, step=1) == first
    assert first != completions(seed=1, step=1)
    assert first != completions(seed=0, step=2)


@pytest.mark.parametrize(("dtype", "is_recorded"), [(torch.float32, True), (torch.bfloat16, False)])
def test_old_log_probs_are_those_of_the_arithmetic_of_training(train, make_policy, dtype, is_recorded):
    """In float32 the recorded ones; in bfloat16 sampling rounds differently, and they are recomputed."""
    policy = make_policy(compute_dtype=dtype)
    experience = sampled(policy, [[5, 6, 7], [8, 9]], [0.0] * 4)
    with torch.no_grad():
        trained = policy(experience.sequences, experience.action_mask).log_probs

    def old(**others) -> torch.Tensor | None:
        return train.old_log_probs(train.Config(**settings(micro_batch_size=4, **others)), policy, experience)

    assert (old(epochs_per_step=2) is experience.sampler_log_probs) == is_recorded
    torch.testing.assert_close(old(epochs_per_step=2), trained, atol=1e-5, rtol=0)
    assert old(epochs_per_step=1) is None
    assert torch.equal(old(epochs_per_step=1, minibatch_size=GROUP_SIZE), old(epochs_per_step=2))


def test_the_gradient_of_an_update_is_not_added_to_the_next(train, make_policy):
    """At a rate of 0 every epoch has the gradient of the first."""
    policy = make_policy()
    experience = sampled(policy, [[5, 6, 7]], [1.0, -0.5])
    once, twice = (update_at_rate_0(train, policy, experience, epochs_per_step=epochs)[0] for epochs in (1, 2))
    assert once.norm() > 0
    assert (twice - once).norm() <= 1e-6 * once.norm()


def test_the_last_micro_batch_of_each_update_is_marked(load_script, make_policy):
    """DeepSpeed takes its step in the marked backward pass; without DeepSpeed, nothing else shows a wrong mark."""
    train, policy, marks = load_script("experiment_accelerate/train.py"), make_policy(), []
    accelerator = SimpleNamespace(distributed_type=None)
    accelerator.backward = lambda loss: (loss.backward(), marks.append(accelerator.sync_gradients))
    experience = sampled(policy, [[5, 6], [7]], [1.0, -1.0] * 4, group_size=4)
    config = train.Config(**settings(prompts_per_step=2, group_size=4, minibatch_size=4))
    train.update(config, accelerator, policy, torch.optim.SGD(policy.parameters(), lr=0.0), experience, step=1)
    assert marks == [False, True, False, True]


@pytest.mark.parametrize("experiment", [name for name in FORMULAS if "accelerate" not in name])
def test_samples_hold_the_terms_and_pushes_of_the_loss(load_script, update, tmp_path, experiment):
    """Over two epochs of two minibatches, with tool output in rows: equal to a slow loop's, and adding up."""
    train, weighted = load_script(f"{experiment}/train.py"), experiment == "scale/engine"
    has_critic = experiment == "policy_gradients/ppo"
    formula = FORMULAS[experiment][0][0]
    policy = load_policy(RunConfig(device="cpu"))
    sizes = {"prompts_per_step": 2, "group_size": 2, "minibatch_size": 2, "micro_batch_size": 1, "max_new_tokens": 6}
    config = train.Config(epochs_per_step=2, kl_weight=0.05, **sizes, **clips_of(formula))
    if has_critic:
        policy = ActorCritic(policy)
    rows = sample(policy, [[5, 6, 7], [8, 9]], 2, max_new_tokens=6, key=(0,), prompt_index=[0, 1])
    for row in rows[::2]:
        row.observe([20, 21])
        row.ids, row.action_mask = [*row.ids, 30], [*row.action_mask, 1]
        row.sampler_log_probs = [*row.sampler_log_probs, -1.0]
    experience = collate(rows, policy.pad_id)
    experience.advantages = torch.tensor([1.0, -0.5, 2.0, -1.0])[:, None]
    scores, generator = token_log_probs(policy, experience, 4), torch.manual_seed(0)
    noise = [torch.randn(scores.shape, generator=generator) for _ in range(3)]
    experience.old_log_probs, experience.log_probs_ref = scores + 0.2 * noise[0], scores + 0.5 * noise[1]
    if has_critic:  # an advantage for each token
        experience.advantages = experience.advantages + noise[2] * experience.action_mask
        experience.values, experience.value_targets = torch.zeros_like(scores), torch.ones_like(scores)
    if weighted:
        experience.sampler_log_probs = experience.old_log_probs + noise[2]  # an engine's, far off
        experience.importance_weights = train.importance_weights(config, experience)
    statistics = update(train, config, policy, torch.optim.SGD(policy.parameters(), lr=0.01), experience, 1)
    texts = TokenTexts(tmp_path / "tokens.jsonl", policy.tokenizer, policy.end_of_turn_ids)
    write_samples(tmp_path / "samples.jsonl", texts, 1, load_task(config), 2, rows, experience, statistics)

    sizes = {"num_rows": 2, "kl_weight": 0.05, "budget": 6, **clips_of(formula)}
    total, clipped, weights = 0.0, 0, set()
    num_tokens = {index: sum(rows[index].action_mask + rows[index + 1].action_mask) for index in (0, 2)}
    for entry in map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines()):
        mask, old, ref = (entry[name] for name in ("action_mask", "old_log_probs", "log_probs_ref"))
        assert all(("importance_weight" in update) == weighted for update in entry["updates"])
        of_tokens = entry["updates"][0].get("importance_weight", mask)
        weights |= {*of_tokens}
        advantages = [entry["advantage"] * weight for weight in of_tokens]
        if has_critic:
            advantages = entry["updates"][0]["token_advantage"]
            assert entry["advantage"] == pytest.approx(sum(advantages) / sum(mask), abs=1e-5)
        assert [update["epoch"] for update in entry["updates"]] == [0, 1]
        for update in entry["updates"]:
            now = update["log_probs"]
            count = num_tokens[2 * entry["prompt_index"]]  # a minibatch is a group
            terms, pushes = slow_row(formula, mask, now, advantages, old, ref, num_tokens=count, **sizes)
            assert update["terms"] == pytest.approx(terms, abs=2e-6, rel=4e-6)
            assert update["push"] == pytest.approx(pushes, abs=2e-6)
            ratios = [math.exp(x - y) if bit else 0 for x, y, bit in zip(now, old, mask, strict=True)]
            if formula == "gspo":
                mean = math.exp(sum(math.log(ratio) for ratio in ratios if ratio) / sum(mask))
                ratios = [bit * mean for bit in mask]
            assert update["ratio"] == pytest.approx(ratios, abs=1e-5)
            kls = [bit * (math.exp(x - y) - (x - y) - 1) for x, y, bit in zip(ref, now, mask, strict=True)]
            assert update["kl"] == pytest.approx(kls, abs=1e-5)
            total, clipped = total + sum(update["terms"]), clipped + sum(update.get("clipped", update.get("capped")))
    assert total / 4 == pytest.approx(statistics.metrics()["loss/total"], abs=1e-6, rel=2e-6)
    assert abs(total) > 0.01
    assert clipped > 0
    assert max(weights) == (config.importance_cap if weighted else 1)


# The metrics of a rollout ---------------------------------------------------------------------------------------------


def completion(length: int, rewards: dict, finish_reason: str = "stop", **description: float) -> Trajectory:
    """A prompt of two tokens, one token of tool output, and so many action tokens."""
    mask = [0, 0, 1, 0] + [1] * (length - 1)
    row = Trajectory(list(range(len(mask))), 2, mask, [0.0] * len(mask), finish_reason=finish_reason)
    row.rewards, row.description = rewards, description
    return row


ROWS = [
    completion(3, {"correct": 1.0, "format": 0.0}, reasoned=1.0),
    completion(5, {"correct": 0.0, "format": 1.0}, reasoned=0.0),
    completion(4, {"correct": 1.0, "format": 1.0}, reasoned=1.0),
    completion(8, {"correct": 1.0, "format": 1.0}, "length", reasoned=1.0),
]
RETURNS = torch.tensor([[1.0, 0.5], [1.5, 1.5]])  # two groups of two, the second with zero variance


def test_every_metric_of_a_rollout_is_what_its_name_says():
    assert rollout_metrics(ROWS, RETURNS) == {
        "reward/total": 1.125,
        "reward_std/correct": pytest.approx(3**0.5 / 4),
        "reward_std/format": pytest.approx(3**0.5 / 4),
        "reward/correct": 0.75,
        "reward/format": 0.75,
        "completion/reasoned": 0.75,
        "completion/length": 5.0,  # action tokens only: neither prompt nor tool output
        "completion/length_right": 5.0,
        "completion/length_wrong": 5.0,
        "completion/stopped": 0.75,
        "completion/truncated": 0.25,
        "group/zero_reward_variance": 0.5,
    }


@pytest.mark.parametrize(
    ("rows", "right", "wrong"),
    [
        (ROWS[:2], 3.0, 5.0),
        ([completion(3, {"correct": 1.0})] * 2, 3.0, None),
        ([completion(3, {"correct": 0.5})] * 2, None, 3.0),
        ([completion(3, {"short": 1.0})] * 2, None, None),
    ],
)
def test_lengths_of_right_and_wrong_completions_are_told_apart(rows, right, wrong):
    metrics = rollout_metrics(rows, RETURNS[:1])
    assert (metrics.get("completion/length_right"), metrics.get("completion/length_wrong")) == (right, wrong)
    assert ("reward/correct" in metrics) == ("correct" in rows[0].rewards)


@pytest.mark.parametrize(
    "others",
    [(60, 0.5, {"sample": 3.0}, 10**18), (60, 0.0, {"sample": 0.0}, 1)],
    ids=["which needs more", "which needs less"],
)
def test_costs_are_those_of_all_processes(monkeypatch, others):
    """The largest memory, the mean share of waiting, and mean seconds by phase, with a second process."""
    own = []
    monkeypatch.setattr("harness.logs.clock.gather", lambda values: own.append(values) or [values, others])
    monkeypatch.setattr("harness.logs.clock.peak_memory_bytes", lambda device: 1000)
    clock = StepClock("cpu")
    with clock.waiting():
        time.sleep(0.01)
    clock.lap("sample")
    clock.lap("sample")  # adds up
    costs = clock.costs(num_tokens=40)
    assert costs["memory/peak_bytes"] == max(1000, others[3])
    assert 0 <= own[0][1] < 1
    assert costs["time/waiting"] == (own[0][1] + others[1]) / 2
    assert 0.01 <= own[0][2]["sample"] < costs["time/step"]
    assert costs["time/sample"] == (own[0][2]["sample"] + others[2]["sample"]) / 2
    assert costs["time/tokens_per_second"] == 100 / costs["time/step"]
