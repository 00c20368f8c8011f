"""The update of every experiment: skipping rows changes no gradient; what is drawn depends on seed and step.

The metrics of a rollout are what their names say, counted by hand.
"""

import dataclasses
import json
import math
import time
from types import SimpleNamespace

import pytest
import torch
from oracle import FORMULAS, slow_row

from common.experience import Experience, collate
from common.logprobs import token_log_probs
from common.sampling import sample
from common.trajectory import Trajectory

from harness.base.config import RunConfig
from harness.data.data import load_task
from harness.logs.metrics import StepClock
from harness.logs.samples import TokenTexts, write_samples
from harness.logs.statistics import rollout_metrics
from harness.models.loading import load_policy

GROUP_SIZE = 2


@pytest.mark.parametrize("experiment", ["experiment_base", "experiment_drgrpo"])
@pytest.mark.parametrize("advantages", [[1.0, -1.0, 0.0, 0.0, 2.0, -2.0], [0.0] * 6])
def test_skipping_zero_variance_groups_changes_no_gradient(load_script, monkeypatch, experiment, advantages):
    train = load_script(f"{experiment}/train.py")
    config = train.Config(kl_weight=0.0, group_size=GROUP_SIZE, micro_batch_size=2, max_grad_norm=1e9, max_new_tokens=6)
    policy = load_policy(RunConfig(device="cpu"))
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    experience = collate(sample(policy, prompts, GROUP_SIZE, max_new_tokens=6, key=(0,)), policy.pad_id)
    experience.advantages = torch.tensor(advantages)[:, None]

    def gradient() -> tuple[torch.Tensor, int]:
        policy.zero_grad()
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        statistics = train.update(config, policy, optimizer, experience, step=1)
        assert all(parameter.grad is not None for parameter in policy.parameters())
        return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]), len(statistics.rows)

    skipping, trained = gradient()
    split = Experience.split
    monkeypatch.setattr(Experience, "split", lambda self, size, skip_zero_advantages: split(self, size))
    everything, all_rows = gradient()
    assert (trained, all_rows) == (4 if any(advantages) else 1, 6)
    assert (skipping - everything).norm() <= 1e-6 * everything.norm()


@pytest.mark.parametrize("experiment", ["experiment_base", "experiment_drgrpo"])
def test_minibatches_are_shuffled_by_seed_step_and_epoch(load_script, experiment):
    """Each of them gives groups another order, and the same ones give the same."""
    train = load_script(f"{experiment}/train.py")
    policy = load_policy(RunConfig(device="cpu"))
    prompts = [[5 + n] for n in range(8)]
    experience = collate(sample(policy, prompts, GROUP_SIZE, max_new_tokens=2, key=(0,)), policy.pad_id)
    experience.advantages = torch.tensor([1.0, -1.0] * len(prompts))[:, None]
    experience.old_log_probs = experience.sampler_log_probs
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)

    def orders(seed: int, step: int) -> list[list[int]]:
        """The minibatch of every group, epoch by epoch."""
        config = train.Config(
            seed=seed, epochs_per_step=2, minibatch_size=GROUP_SIZE, group_size=GROUP_SIZE, micro_batch_size=2,
            kl_weight=0.0, max_new_tokens=2,
        )  # fmt: skip
        rows = train.update(config, policy, optimizer, experience, step).rows
        return [[rows[prompt, 0][epoch].minibatch for prompt in range(len(prompts))] for epoch in range(2)]

    first = orders(seed=0, step=1)
    assert orders(seed=0, step=1) == first
    every = [*first, *orders(seed=1, step=1), *orders(seed=0, step=2)]
    assert all(sorted(order) == list(range(len(prompts))) for order in every)
    assert len({tuple(order) for order in every}) == len(every)


@pytest.mark.parametrize("experiment", ["experiment_base", "experiment_drgrpo"])
def test_completions_depend_on_seed_and_step(load_script, tmp_path, experiment):
    """Of the same question: with other ones they would differ anyway."""
    train = load_script(f"{experiment}/train.py")
    (tmp_path / "one.jsonl").write_text('{"question": "What is 47 plus 29?", "answer": "76"}\n')
    policy = load_policy(RunConfig(device="cpu"))

    def completions(seed: int, step: int) -> list[list[int]]:
        files = {"data": str(tmp_path / "one.jsonl"), "eval_data": str(tmp_path / "one.jsonl")}
        config = train.Config(
            seed=seed, prompts_per_step=1, group_size=8, max_new_tokens=8, temperature=1.0, system_prompt="", **files
        )
        return [row.ids for row in train.sample_completions(config, load_task(config), policy, step)]

    first = completions(seed=0, step=1)
    assert completions(seed=0, step=1) == first
    assert first != completions(seed=1, step=1)
    assert first != completions(seed=0, step=2)


@pytest.mark.parametrize("experiment", ["experiment_base", "experiment_drgrpo"])
def test_old_log_probs_are_those_of_the_arithmetic_of_training(load_script, experiment):
    """In float32 the recorded ones; in bfloat16 sampling rounds differently, and they are computed again."""
    train = load_script(f"{experiment}/train.py")
    for dtype, is_recorded in (("float32", True), ("bfloat16", False)):
        policy = load_policy(RunConfig(device="cpu", dtype=dtype))
        rows = sample(policy, [[5, 6, 7], [8, 9]], GROUP_SIZE, max_new_tokens=6, key=(0,))
        experience = collate(rows, policy.pad_id)
        config = train.Config(epochs_per_step=2, group_size=GROUP_SIZE, micro_batch_size=4, max_new_tokens=6)
        with torch.no_grad():
            trained = policy(experience.sequences, experience.action_mask).log_probs
        old = train.old_log_probs(config, policy, experience)
        assert torch.equal(old, experience.sampler_log_probs) == is_recorded
        torch.testing.assert_close(old, trained, atol=1e-5, rtol=0)
        assert train.old_log_probs(dataclasses.replace(config, epochs_per_step=1), policy, experience) is None
        smaller = dataclasses.replace(config, epochs_per_step=1, minibatch_size=GROUP_SIZE)
        assert torch.equal(train.old_log_probs(smaller, policy, experience), old)


@pytest.mark.parametrize("experiment", ["experiment_base", "experiment_drgrpo"])
def test_the_gradient_of_an_update_is_not_added_to_the_next(load_script, experiment):
    """At a rate of 0 every epoch has the gradient of the first."""
    train = load_script(f"{experiment}/train.py")
    policy = load_policy(RunConfig(device="cpu"))
    experience = collate(sample(policy, [[5, 6, 7]], GROUP_SIZE, max_new_tokens=6, key=(0,)), policy.pad_id)
    experience.advantages = torch.tensor([[1.0], [-0.5]])
    experience.old_log_probs = experience.sampler_log_probs
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)

    def gradient(epochs: int) -> torch.Tensor:
        policy.zero_grad()
        config = train.Config(
            epochs_per_step=epochs, kl_weight=0.0, group_size=GROUP_SIZE, micro_batch_size=1, max_grad_norm=1e9,
            max_new_tokens=6,
        )  # fmt: skip
        train.update(config, policy, optimizer, experience, step=1)
        return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])

    once, twice = gradient(epochs=1), gradient(epochs=2)
    assert once.norm() > 0
    assert (twice - once).norm() <= 1e-6 * once.norm()


def test_the_last_micro_batch_of_each_update_is_marked(load_script):
    """DeepSpeed takes its step in the backward pass that is marked; without it, nothing else shows a wrong mark."""
    train, marks = load_script("experiment_accelerate/train.py"), []
    policy = load_policy(RunConfig(device="cpu"))
    accelerator = SimpleNamespace(distributed_type=None)
    accelerator.backward = lambda loss: (loss.backward(), marks.append(accelerator.sync_gradients))
    experience = collate(sample(policy, [[5, 6], [7]], 4, max_new_tokens=4, key=(0,)), policy.pad_id)
    experience.advantages = torch.tensor([1.0, -1.0] * 4)[:, None]
    experience.old_log_probs = experience.sampler_log_probs
    config = train.Config(
        prompts_per_step=2, group_size=4, minibatch_size=4, micro_batch_size=2, kl_weight=0.0, max_new_tokens=4
    )
    train.update(config, accelerator, policy, torch.optim.SGD(policy.parameters(), lr=0.0), experience, step=1)
    assert marks == [False, True, False, True]


@pytest.mark.parametrize("experiment", [name for name in FORMULAS if "accelerate" not in name])
def test_samples_hold_the_terms_and_pushes_of_the_loss(load_script, update, tmp_path, experiment):
    """Over two epochs of two minibatches, with tool output in rows: as a slow loop gives them, and adding up."""
    train, weighted = load_script(f"{experiment}/train.py"), experiment == "experiment_engine"
    policy = load_policy(RunConfig(device="cpu"))
    sizes = {"prompts_per_step": 2, "group_size": 2, "minibatch_size": 2, "micro_batch_size": 1, "max_new_tokens": 6}
    config = train.Config(epochs_per_step=2, kl_weight=0.05, **sizes)
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
    if weighted:
        experience.sampler_log_probs = experience.old_log_probs + noise[2]  # those of an engine that is far off
        experience.importance_weights = train.importance_weights(config, experience)
    statistics = update(train, config, policy, torch.optim.SGD(policy.parameters(), lr=0.01), experience, 1)
    texts = TokenTexts(tmp_path / "tokens.jsonl", policy.tokenizer, policy.end_of_turn_ids)
    write_samples(tmp_path / "samples.jsonl", texts, 1, load_task(config), 2, rows, experience, statistics)

    settings = {"num_rows": 2, "clip_eps": config.clip_eps, "kl_weight": 0.05, "budget": 6}
    total, clipped, weights = 0.0, 0, set()
    for entry in map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines()):
        mask, old, ref = (entry[name] for name in ("action_mask", "old_log_probs", "log_probs_ref"))
        assert all(("importance_weight" in update) == weighted for update in entry["updates"])
        of_tokens = entry["updates"][0].get("importance_weight", mask)
        weights |= {*of_tokens}
        advantages = [entry["advantage"] * weight for weight in of_tokens]
        assert [update["epoch"] for update in entry["updates"]] == [0, 1]
        for update in entry["updates"]:
            now = update["log_probs"]
            terms, pushes = slow_row(FORMULAS[experiment][0][0], mask, now, advantages, old, ref, **settings)
            assert update["terms"] == pytest.approx(terms, abs=2e-6)
            assert update["push"] == pytest.approx(pushes, abs=2e-6)
            ratios = [math.exp(x - y) if bit else 0 for x, y, bit in zip(now, old, mask, strict=True)]
            assert update["ratio"] == pytest.approx(ratios, abs=1e-5)
            kls = [bit * (math.exp(x - y) - (x - y) - 1) for x, y, bit in zip(ref, now, mask, strict=True)]
            assert update["kl"] == pytest.approx(kls, abs=1e-5)
            total, clipped = total + sum(update["terms"]), clipped + sum(update["clipped"])
    assert total / 4 == pytest.approx(statistics.metrics()["loss/total"], abs=1e-6)
    assert abs(total) > 0.01
    assert clipped > 0
    assert max(weights) == (config.importance_cap if weighted else 1)


# The metrics of a rollout ---------------------------------------------------------------------------------------------


def completion(length: int, rewards: dict, finish_reason: str = "stop", **description: float) -> Trajectory:
    """A prompt of two tokens, tool output of one, and so many action tokens."""
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


def test_right_and_wrong_completions_are_not_confused():
    metrics = rollout_metrics(ROWS[:2], RETURNS[:1])
    assert (metrics["completion/length_right"], metrics["completion/length_wrong"]) == (3.0, 5.0)


@pytest.mark.parametrize(("correct", "absent"), [(1.0, "wrong"), (0.0, "right"), (0.5, "right")])
def test_lengths_of_no_completions_are_absent(correct, absent):
    metrics = rollout_metrics([completion(3, {"correct": correct})] * 2, RETURNS[:1])
    assert f"completion/length_{absent}" not in metrics


def test_a_task_without_correct_has_no_right_completions():
    metrics = rollout_metrics([completion(3, {"short": 1.0})] * 2, RETURNS[:1])
    assert metrics["reward/short"] == 1.0
    assert not {"completion/length_right", "completion/length_wrong", "reward/correct"} & metrics.keys()


@pytest.mark.parametrize(
    "others", [(0.5, {"sample": 3.0}, 10**18), (0.0, {"sample": 0.0}, 1)], ids=["which needs more", "which needs less"]
)
def test_costs_are_those_of_all_processes(monkeypatch, others):
    """Memory of the one that needs most, mean share of waiting, mean seconds by phase, with another process of two."""
    own = []
    monkeypatch.setattr("harness.logs.metrics.gather", lambda values: own.append(values) or [values, others])
    monkeypatch.setattr("harness.logs.metrics.peak_memory_bytes", lambda device: 1000)
    clock = StepClock("cpu")
    with clock.waiting():
        time.sleep(0.01)
    clock.lap("sample")
    clock.lap("sample")  # adds up
    costs = clock.costs(num_tokens=100)
    assert costs["memory/peak_bytes"] == max(1000, others[2])
    assert 0 <= own[0][0] < 1
    assert costs["time/waiting"] == (own[0][0] + others[0]) / 2
    assert 0.01 <= own[0][1]["sample"] < costs["time/step"]
    assert costs["time/sample"] == (own[0][1]["sample"] + others[1]["sample"]) / 2
    assert costs["time/tokens_per_second"] == 100 / costs["time/step"]
