"""The metrics of a rollout are what their names say, counted by hand."""

import time

import pytest
import torch

from common.trajectory import Trajectory

from common.plumbing.clock import StepClock
from common.plumbing.rollout import rollout_metrics


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
    monkeypatch.setattr("common.plumbing.clock.gather", lambda values: own.append(values) or [values, others])
    monkeypatch.setattr("common.plumbing.clock.peak_memory_bytes", lambda device: 1000)
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
