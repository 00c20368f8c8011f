"""`group_advantages`: a completion is compared with its own group, and rounding errors are never trained on."""

import itertools
import math

import pytest
import torch

from common.advantages import EPS, group_advantages, has_signal


def advantages_by_hand(returns: list[list[float]], critic_type: str, eps: float) -> list[list[float]]:
    """arXiv 2402.03300, section 4.1.2, and arXiv 2503.20783, section 3.2, one completion at a time."""
    result = []
    for group in returns:
        mean = sum(group) / len(group)
        variance = sum((value - mean) ** 2 for value in group) / (len(group) - 1)
        scale = math.sqrt(variance) + eps if critic_type == "grpo" else 1.0
        result.append([(value - mean) / scale for value in group])
    return result


@pytest.mark.parametrize("critic_type", ["grpo", "drgrpo"])
@pytest.mark.parametrize("eps", [0.0, EPS, 0.5])
@pytest.mark.parametrize("group_size", [2, 3, 8])
def test_advantages_agree_with_a_loop_over_groups_and_completions(critic_type, eps, group_size):
    returns = torch.rand(5, group_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 - 1
    expected = torch.tensor(advantages_by_hand(returns.tolist(), critic_type, eps), dtype=torch.float64)
    torch.testing.assert_close(group_advantages(returns, critic_type, eps), expected, atol=1e-12, rtol=0)
    in_float32 = group_advantages(returns.float(), critic_type, eps)
    assert in_float32.dtype == torch.float32
    torch.testing.assert_close(in_float32, expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("critic_type", ["grpo", "drgrpo"])
def test_the_gradient_through_the_advantages_is_that_of_the_formula(critic_type):
    returns = torch.tensor([[0.1, 0.9, 0.4], [2.0, -1.0, 0.0]], dtype=torch.float64)

    def one_number(values: torch.Tensor) -> torch.Tensor:
        weights = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.7, -1.1]], dtype=torch.float64)
        return (group_advantages(values, critic_type) * weights).sum()

    gradient = torch.func.grad(one_number)(returns)
    for row, column in itertools.product(range(2), range(3)):
        step = torch.zeros_like(returns)
        step[row, column] = 1e-6
        slope = (one_number(returns + step) - one_number(returns - step)) / 2e-6
        assert gradient[row, column].item() == pytest.approx(slope.item(), abs=1e-6)


def test_the_standard_deviation_is_the_unbiased_one():
    """Divided by G - 1. The biased one would give 1, 1.732 and 2.646 for one right answer among 2, 4 and 8."""
    for group_size, right, wrong in ((2, 0.7071, -0.7071), (4, 1.5, -0.5), (8, 2.4749, -0.3536)):
        returns = torch.zeros(1, group_size)
        returns[0, 0] = 1.0
        expected = torch.tensor([[right] + [wrong] * (group_size - 1)])
        torch.testing.assert_close(group_advantages(returns, eps=0.0), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(group_advantages(-returns, eps=0.0), -expected, atol=1e-4, rtol=0)


def test_dr_grpo_does_not_divide_by_the_standard_deviation():
    returns = torch.tensor([[1.0, 0.0, 0.0, 0.0], [10.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[0.75, -0.25, -0.25, -0.25], [7.5, -2.5, -2.5, -2.5]])
    assert torch.equal(group_advantages(returns, critic_type="drgrpo"), expected)


@pytest.mark.parametrize("critic_type", ["grpo", "drgrpo"])
@pytest.mark.parametrize("value", [0.0, 0.1, 0.7, 1.0, 1.01, -3.3, 1e-8, 12345.678])
def test_equal_returns_give_exactly_zero_for_every_group_size(critic_type, value):
    """Twelve times 0.7 in float32, divided by a standard deviation of pure noise, was once an advantage of 0.886."""
    for group_size in range(2, 17):
        for dtype in (torch.float32, torch.float64):
            returns = torch.full((2, group_size), value, dtype=dtype)
            assert not has_signal(returns).any()
            assert torch.equal(group_advantages(returns, critic_type, eps=1e-8), torch.zeros_like(returns))


@pytest.mark.parametrize("weighted_rewards", [(0.5, -0.4, 1.1, 0.33, -0.9), (0.1, 0.2, -0.3, 0.7, -0.7)])
def test_returns_that_differ_by_float_noise_alone_give_exactly_zero(weighted_rewards):
    """The same weighted rewards, added up in every order, are equal to a reader and not to the machine."""
    orders = itertools.permutations(torch.tensor(weighted_rewards))
    returns = torch.stack([sum(order) for order in orders])[None]  # (1, 120)
    assert returns.unique().numel() > 1  # there is noise
    assert torch.equal(group_advantages(returns), torch.zeros_like(returns))


@pytest.mark.parametrize("difference", [1e-5, 1e-3, 1.0])
def test_a_small_but_real_difference_is_signal(difference):
    returns = torch.tensor([[0.7, 0.7 + difference, 0.7, 0.7]])
    assert has_signal(returns).all()
    assert group_advantages(returns, eps=0.0)[0, 1].item() == pytest.approx(1.5, rel=1e-2)


def test_float32_returns_on_a_large_offset_lose_nothing_beyond_their_own_rounding():
    returns = 1000.7 + 0.01 * torch.rand(4, 16, generator=torch.Generator().manual_seed(0))
    expected = torch.tensor(advantages_by_hand(returns.tolist(), "grpo", EPS))
    torch.testing.assert_close(group_advantages(returns), expected, atol=1e-6, rtol=0)


def test_a_group_is_its_own_baseline_and_no_others():
    returns = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    returns[1] = 0.3
    together = group_advantages(returns)
    for row in range(4):
        assert torch.equal(together[row], group_advantages(returns[row : row + 1])[0])
    torch.testing.assert_close(together.sum(dim=1), torch.zeros(4), atol=1e-5, rtol=0)


def test_integer_returns_do_not_truncate_the_advantages():
    returns = torch.tensor([[1, 0, 0, 0]])
    torch.testing.assert_close(group_advantages(returns).float(), group_advantages(returns.float()))


@pytest.mark.parametrize("shape", [(4,), (2, 2, 2), (3, 1), (3, 0)])
def test_returns_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="G >= 2"):
        group_advantages(torch.zeros(shape))


def test_an_unknown_critic_type_is_refused():
    with pytest.raises(ValueError, match="'ppo'"):
        group_advantages(torch.zeros(2, 2), critic_type="ppo")
