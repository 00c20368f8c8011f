"""Advantages: a completion is compared with its own group, and rounding errors are never trained on."""

import itertools
import math

import pytest
import torch

from common.advantages import STD_EPS, group_advantages, group_std, has_reward_variance


def scaled_advantages(returns: torch.Tensor, eps: float = STD_EPS) -> torch.Tensor:
    """As experiment_base composes them."""
    return group_advantages(returns) / (group_std(returns) + eps)


def advantages_by_hand(returns: list[list[float]], is_scaled: bool) -> torch.Tensor:
    """arXiv 2402.03300, section 4.1.2, and arXiv 2503.20783, section 3.2, one completion at a time."""
    result = []
    for group in returns:
        mean = sum(group) / len(group)
        variance = sum((value - mean) ** 2 for value in group) / (len(group) - 1)
        scale = math.sqrt(variance) + STD_EPS if is_scaled else 1.0
        result.append([(value - mean) / scale for value in group])
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("group_size", [2, 3, 8])
@pytest.mark.parametrize(("formula", "is_scaled"), [(group_advantages, False), (scaled_advantages, True)])
def test_advantages_equal_a_slow_loop(formula, is_scaled, group_size):
    returns = torch.rand(5, group_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 - 1
    expected = advantages_by_hand(returns.tolist(), is_scaled)
    torch.testing.assert_close(formula(returns), expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(formula(returns.float()), expected, atol=1e-5, rtol=1e-5)
    assert formula(returns.float()).dtype == torch.float64


@pytest.mark.parametrize(("experiment", "is_scaled"), [("experiment_base", True), ("experiment_drgrpo", False)])
def test_each_experiment_trains_on_its_own_advantages(load_script, tmp_path, monkeypatch, experiment, is_scaled):
    """The advantages that reach the update are those of the paper."""
    train = load_script(f"{experiment}/train.py")
    seen = []
    monkeypatch.setattr(train, "update", lambda config, policy, optimizer, experience, step: seen.append(experience))
    with pytest.raises(AttributeError):  # an update without statistics ends the step
        train.main(
            [
                *("--steps", "1", "--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "16"),
                *("--eval-prompts", "1", "--runs-dir", str(tmp_path), "--name", "x", "--reward-weight", "format=0.3"),
            ]
        )
    advantages = seen[0].advantages.view(4, 4)
    assert seen[0].advantages.shape == (16, 1)
    assert advantages.dtype == torch.float32
    stds = advantages.std(dim=1)
    varied = stds > 0
    assert varied.any()
    if is_scaled:
        torch.testing.assert_close(stds[varied], torch.ones(int(varied.sum())), atol=1e-3, rtol=0)
        assert (stds[varied] < 1 - 5e-5).all()  # by STD_EPS
    else:
        differences = (advantages[:, :, None] - advantages[:, None, :]).abs().flatten()  # of returns
        assert all(min(abs(x - known) for known in (0.0, 0.3, 0.7, 1.0, 1.3)) < 1e-6 for x in differences.tolist())


def test_gradient_through_the_advantages_is_that_of_the_formula():
    returns = torch.tensor([[0.1, 0.9, 0.4], [2.0, -1.0, 0.0]], dtype=torch.float64)
    weights = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.7, -1.1]], dtype=torch.float64)
    for formula in (group_advantages, scaled_advantages):
        gradient = torch.func.grad(lambda x, formula=formula: (formula(x) * weights).sum())(returns)
        for row, column in itertools.product(range(2), range(3)):
            step = torch.zeros_like(returns)
            step[row, column] = 1e-6
            slope = ((formula(returns + step) - formula(returns - step)) * weights).sum() / 2e-6
            assert gradient[row, column].item() == pytest.approx(slope.item(), abs=1e-6)


def test_standard_deviation_is_the_unbiased_one():
    """Divided by G - 1. The biased one would give 1, 1.732 and 2.646 for one right answer among 2, 4 and 8."""
    for group_size, right, wrong in ((2, 0.7071, -0.7071), (4, 1.5, -0.5), (8, 2.4749, -0.3536)):
        returns = torch.zeros(1, group_size)
        returns[0, 0] = 1.0
        expected = torch.tensor([[right] + [wrong] * (group_size - 1)], dtype=torch.float64)
        torch.testing.assert_close(scaled_advantages(returns, eps=0.0), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(scaled_advantages(-returns, eps=0.0), -expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("formula", [group_advantages, lambda returns: scaled_advantages(returns, eps=1e-8)])
@pytest.mark.parametrize("value", [0.0, 0.1, 0.7, 1.0, 1.01, -3.3, 1e-8, 12345.678])
def test_equal_returns_give_exactly_zero_for_every_group_size(formula, value):
    """Twelve returns of 0.7 in float32, divided by a std of pure noise, would give an advantage of 0.886."""
    for group_size in range(2, 17):
        for dtype in (torch.float32, torch.float64):
            returns = torch.full((2, group_size), value, dtype=dtype)
            assert not has_reward_variance(returns).any()
            assert (formula(returns) == 0).all()


@pytest.mark.parametrize("weighted_rewards", [(0.5, -0.4, 1.1, 0.33, -0.9), (0.1, 0.2, -0.3, 0.7, -0.7)])
def test_returns_that_differ_by_float_noise_give_exactly_zero(weighted_rewards):
    """The same weighted rewards, summed in every order, are equal in exact arithmetic but not in floating point."""
    orders = itertools.permutations(torch.tensor(weighted_rewards))
    returns = torch.stack([sum(order) for order in orders])[None]  # (1, 120)
    assert returns.unique().numel() > 1  # there is noise
    assert (scaled_advantages(returns) == 0).all()


@pytest.mark.parametrize("difference", [1e-5, 1e-3, 1.0])
def test_a_small_but_real_difference_is_trained_on(difference):
    returns = torch.tensor([[0.7, 0.7 + difference, 0.7, 0.7]])
    assert has_reward_variance(returns).all()
    assert scaled_advantages(returns, eps=0.0)[0, 1].item() == pytest.approx(1.5, rel=1e-2)


def test_float32_returns_on_a_large_offset_lose_nothing():
    """No precision is lost beyond the rounding of the returns themselves."""
    returns = 1000.7 + 0.01 * torch.rand(4, 16, generator=torch.Generator().manual_seed(0))
    expected = advantages_by_hand(returns.tolist(), is_scaled=True)
    torch.testing.assert_close(scaled_advantages(returns), expected, atol=1e-6, rtol=0)


def test_a_group_is_its_own_baseline_and_no_others():
    returns = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    returns[1] = 0.3
    together = scaled_advantages(returns)
    for row in range(4):
        assert torch.equal(together[row], scaled_advantages(returns[row : row + 1])[0])
    torch.testing.assert_close(together.sum(dim=1), torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)


def test_integer_returns_do_not_truncate_the_advantages():
    returns = torch.tensor([[1, 0, 0, 0]])
    assert torch.equal(scaled_advantages(returns), scaled_advantages(returns.float()))


def test_a_return_that_is_not_finite_gives_nan():
    returns = torch.tensor([[1.0, float("nan")], [float("inf"), float("inf")]])
    assert scaled_advantages(returns).isnan().all()


@pytest.mark.parametrize("shape", [(4,), (2, 2, 2), (3, 1), (3, 0)])
def test_returns_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="G >= 2"):
        group_advantages(torch.zeros(shape))
