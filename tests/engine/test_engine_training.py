"""Training on an engine's samples: the update of experiment_base, importance weights, and the ends of runs."""

import math

import pytest
import torch

from common.errors import EngineError
from common.experience import Experience, collate
from common.logprobs import token_log_probs
from common.sampling import sample

from harness.run.start_engine import compare_with_engine

pytestmark = pytest.mark.all_questions

PROMPTS = [[5, 6, 7], list(range(40, 60)), [9, 8]]
GROUP_SIZE = 2
SETTINGS = {"group_size": GROUP_SIZE, "micro_batch_size": 4, "max_new_tokens": 8, "dtype": "float32"}


@pytest.fixture(scope="module")
def train(load_script):
    return load_script("scale/engine/train.py")


def made_up(policy) -> Experience:
    """Rows of our own sampler with recorded log-probs that are far off."""
    rows = sample(policy, PROMPTS, GROUP_SIZE, max_new_tokens=8, key=(0, 1))
    experience = collate(rows, policy.pad_id)
    experience.advantages = torch.tensor([1.0, -0.5, 2.0, 0.0, -1.0, 0.25])[:, None]
    experience.old_log_probs = token_log_probs(policy, experience, 4)
    noise = torch.randn(experience.action_mask.shape, generator=torch.manual_seed(0))
    experience.sampler_log_probs = experience.old_log_probs + noise
    return experience


def gaps(experience: Experience) -> list[tuple[int, int, float]]:
    """Row, place, and old log-prob minus the sampler's, for each action token."""
    found = (experience.old_log_probs - experience.sampler_log_probs).tolist()
    return [(row, place, found[row][place]) for row, place in experience.action_mask.nonzero().tolist()]


@pytest.mark.parametrize("cap", [2.0, 1.0, 0.0])
def test_importance_weights_equal_a_slow_loop(policy, train, cap):
    experience = made_up(policy)
    experience.sampler_log_probs[0, -1] = math.nan  # after the end of a row, where nothing is read
    assert not experience.action_mask[0, -1]
    weights = train.importance_weights(train.Config(importance_cap=cap, **SETTINGS), experience)
    assert not weights.requires_grad
    assert weights.shape == experience.action_mask.shape
    expected = torch.ones(weights.shape)
    for row, place, gap in gaps(experience):
        expected[row, place] = min(math.exp(gap), cap) if cap else 1.0
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=0)
    assert (expected == cap).sum() > 3 or not cap


def test_the_loss_multiplies_advantages_by_the_weights(policy, train):
    """Value and gradient, against a slow loop, after the policy has moved away from the old one."""
    experience = made_up(policy)
    config = train.Config(kl_weight=0.0, **SETTINGS)
    experience.importance_weights = train.importance_weights(config, experience)
    noise = torch.randn(experience.action_mask.shape, generator=torch.manual_seed(1)) * 0.3
    log_probs = (experience.old_log_probs + noise).requires_grad_()
    loss = train.policy_loss(config, log_probs, experience, num_rows=6)[0].sum()
    loss.backward()
    total, gradient = 0.0, torch.zeros(log_probs.shape)
    for row, place, gap in gaps(experience):
        ratio = math.exp((log_probs - experience.old_log_probs)[row, place].item())
        advantage = min(math.exp(gap), 2.0) * experience.advantages[row, 0].item()
        limited, count = min(max(ratio, 0.8), 1.2), experience.action_mask[row].sum().item()
        total -= min(ratio * advantage, limited * advantage) / count / 6
        if ratio * advantage <= limited * advantage:
            gradient[row, place] = -ratio * advantage / count / 6
    assert loss.item() == pytest.approx(total, abs=1e-6)
    torch.testing.assert_close(log_probs.grad, gradient, atol=1e-6, rtol=0)


def test_old_log_probs_are_never_those_of_the_engine(stand_in, train, monkeypatch, tmp_path):
    """Also with a second epoch, when experiment_base uses the recorded log-probs of its sampler."""
    caught, real = [], train.update

    def update(config, policy, optimizer, experience, step):
        caught.append((experience, token_log_probs(policy, experience, 64)))
        return real(config, policy, optimizer, experience, step)

    monkeypatch.setattr(train, "update", update)
    flags = ["--engine-url", stand_in(dtype="bfloat16").url, "--engine-dtype", "bfloat16", "--epochs-per-step", "2"]
    flags += ["--steps", "2", "--prompts-per-step", "2", "--group-size", "4", "--max-new-tokens", "6", "--lr", "1e-3"]
    flags += ["--eval-prompts", "1", "--eval-every", "0", "--checkpoint-every", "0"]
    train.main([*flags, "--device", "cpu", "--runs-dir", str(tmp_path)])
    assert len(caught) == 2
    for experience, log_probs in caught:
        assert torch.equal(experience.old_log_probs, log_probs)
        weights = (log_probs - experience.sampler_log_probs).exp().clamp(max=2.0)
        torch.testing.assert_close(experience.importance_weights, weights)
    assert (experience.sampler_log_probs - log_probs).abs().max() > 1e-3  # for trained and then rounded weights


# The ends of runs -----------------------------------------------------------------------------------------------------


def test_the_comparison_with_the_engine_equals_a_slow_loop(policy, train):
    experience = made_up(policy)
    config = train.Config(engine_dtype="bfloat16", push_every=2, **SETTINGS)
    experience.importance_weights = train.importance_weights(config, experience)
    differences = [gap for *_, gap in gaps(experience)]
    weights = [min(math.exp(gap), 2.0) for gap in differences]
    found = compare_with_engine(config, experience)
    assert found == {
        "policy/sampling_log_prob_difference_max": pytest.approx(max(map(abs, differences))),
        "policy/importance_capped": pytest.approx(weights.count(2.0) / len(weights)),
    }
    assert 0 < found["policy/importance_capped"] < 1


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, 1e-3),
        ({"engine_dtype": "bfloat16"}, 0.1),
        ({"top_p": 0.9}, 0.1),
        ({"push_every": 4}, 1.0),
        ({"steps_ahead": 1}, 0.1),
    ],
)
def test_an_engine_that_is_far_off_ends_the_run(policy, train, settings, limit):
    experience, config = made_up(policy), train.Config(**SETTINGS | settings)
    for difference, is_refused in ((0.9 * limit, False), (1.1 * limit, True), (math.nan, True), (math.inf, True)):
        experience.sampler_log_probs = experience.old_log_probs - difference
        experience.importance_weights = train.importance_weights(config, experience)
        if not is_refused:
            assert compare_with_engine(config, experience)["policy/sampling_log_prob_difference_max"] > 0
            continue
        with pytest.raises(
            EngineError, match=rf"by (nan|inf|{difference:.2g}) nats on average, with {limit:g} as the "
        ):
            compare_with_engine(config, experience)
