"""The update: skipping rows changes no gradient, minibatches are shuffled by key, old log-probs are those of training.

The metrics of a rollout match their names, counted by hand.
"""

import time
from types import SimpleNamespace

import pytest
import torch

from common.experience import Experience, collate
from common.sampling import sample
from common.trajectory import Trajectory

from harness.logs.clock import StepClock
from harness.logs.statistics import UpdateStatistics, rollout_metrics

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


def test_the_last_micro_batch_of_each_update_is_marked(load_script, make_policy):
    """DeepSpeed takes its step in the marked backward pass; without DeepSpeed, nothing else shows a wrong mark."""
    train, policy, marks = load_script("experiment_accelerate/train.py"), make_policy(), []
    accelerator = SimpleNamespace(distributed_type=None)
    accelerator.backward = lambda loss: (loss.backward(), marks.append(accelerator.sync_gradients))
    experience = sampled(policy, [[5, 6], [7]], [1.0, -1.0] * 4, group_size=4)
    config = train.Config(**settings(prompts_per_step=2, group_size=4, minibatch_size=4))
    train.update(config, accelerator, policy, torch.optim.SGD(policy.parameters(), lr=0.0), experience, step=1)
    assert marks == [False, True, False, True]


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
        "completion/trajectory_length": 8.0,  # with the two tokens of the prompt and the one of the tool
        "completion/length_right": 5.0,
        "completion/length_wrong": 5.0,
        "completion/stopped": 0.75,
        "completion/truncated": 0.25,
        "group/zero_reward_variance": 0.5,
    }


def test_the_length_of_a_trajectory_is_logged_if_the_policy_has_not_sampled_all_of_it():
    alone, other = (Trajectory([5] * 6, 2, [0, 0, 1, 1, 1, 1], [0.0] * 6, rewards={"correct": 1.0}) for _ in "12")
    assert "completion/trajectory_length" not in rollout_metrics([alone, other], RETURNS[:1])
    other.observe([7, 7, 7])
    assert rollout_metrics([alone, other], RETURNS[:1])["completion/trajectory_length"] == 7.5


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
