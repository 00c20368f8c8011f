"""From trajectories to tensors and from a rollout to minibatches: no token and no row is lost or moved.

Advantages: a completion is compared with its own group, and rounding errors never enter training.
"""

import dataclasses
import itertools
import math

import pytest
import torch

from common.advantages import STD_EPS, group_advantages, group_std, has_reward_variance, success_rate
from common.experience import Experience, collate
from common.trajectory import Trajectory

PAD = 99


def trajectory(
    prompt: list[int], completion: list[int], prompt_index: int = 0, completion_index: int = 0
) -> Trajectory:
    """A row whose log-probs encode their tokens: token 21 has -21."""
    return Trajectory(
        ids=prompt + completion,
        prompt_length=len(prompt),
        action_mask=[0] * len(prompt) + [1] * len(completion),
        sampler_log_probs=[0.0] * len(prompt) + [-float(token) for token in completion],
        prompt_index=prompt_index,
        completion_index=completion_index,
    )


def rollout(num_prompts: int, group_size: int, longest: int = 6) -> Experience:
    """Rows of different lengths in which every token is unique; all per-token fields are filled."""
    rows, token = [], 0
    for prompt in range(num_prompts):
        for completion in range(group_size):
            length = 1 + (5 * prompt + 3 * completion) % longest
            ids = list(range(token, token + 2 + length))
            token += len(ids)
            rows.append(trajectory(ids[:2], ids[2:], prompt, completion))
    experience = collate(rows, PAD)
    experience.old_log_probs = experience.sampler_log_probs * 2
    experience.log_probs_ref = experience.sampler_log_probs * 3
    experience.importance_weights = experience.sampler_log_probs * 4
    experience.advantages = -torch.arange(len(rows), dtype=torch.float32)[:, None]
    return experience


def rows_of(experience: Experience) -> list[tuple]:
    """Every row as plain lists without padding, to compare experiences of different widths."""
    rows = []
    width = experience.sequences.shape[1]
    names = ("action_mask", "sampler_log_probs", "old_log_probs", "log_probs_ref", "advantages", "importance_weights")
    for index in range(len(experience)):
        length = int(experience.attention_mask[index].sum())
        assert experience.attention_mask[index].tolist() == [1] * length + [0] * (width - length)
        assert (experience.action_mask[index, length - 1 :] == 0).all()
        about_next_token = [getattr(experience, name)[index, : length - 1].tolist() for name in names]
        known = (experience.prompt_index[index].item(), experience.prompt_lengths[index].item())
        rows.append((*known, experience.sequences[index, :length].tolist(), *about_next_token))
    return rows


def test_collate_shifts_masks_and_log_probs_to_their_targets():
    first = trajectory([11, 12, 13], [21, 22, 23], prompt_index=7)
    second = trajectory([31], [41, 42], prompt_index=8)
    experience = collate([first, second], PAD)
    assert experience.sequences.tolist() == [[11, 12, 13, 21, 22, 23], [31, 41, 42, PAD, PAD, PAD]]
    assert experience.sequences[:, 1:].tolist() == [[12, 13, 21, 22, 23], [41, 42, PAD, PAD, PAD]]  # the targets
    assert experience.action_mask.tolist() == [[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert experience.sampler_log_probs.tolist() == [[0, 0, -21, -22, -23], [-41, -42, 0, 0, 0]]
    assert experience.attention_mask.tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]
    assert experience.prompt_index.tolist() == [7, 8]
    assert experience.prompt_lengths.tolist() == [3, 1]
    assert experience.old_log_probs is None


def test_masks_are_carried_over_and_never_rebuilt_from_ids():
    row = Trajectory([PAD, 5, PAD, 6, 7, PAD], 2, [0, 0, 1, 0, 0, 1], [0.0, 0.0, -1.0, 0.0, 0.0, -2.0])
    experience = collate([row, trajectory([1, 2], [3] * 6)], PAD)
    assert experience.action_mask[0].tolist() == [0, 1, 0, 0, 1, 0, 0]
    assert experience.attention_mask[0].tolist() == [1] * 6 + [0] * 2
    assert experience.sampler_log_probs[0].tolist() == [0, -1, 0, 0, -2, 0, 0]


def test_collate_refuses_lists_of_different_lengths_by_their_row():
    row = trajectory([1, 2], [3, 4], prompt_index=5, completion_index=6)
    for field in ("action_mask", "sampler_log_probs"):
        broken = dataclasses.replace(row, **{field: getattr(row, field)[:-1]})
        with pytest.raises(ValueError, match="prompt 5, completion 6: 4 ids"):
            collate([row, broken], PAD)
    with pytest.raises(ValueError, match="at least one"):
        collate([], PAD)


def test_selected_rows_keep_all_tokens_and_no_extra_padding():
    experience = rollout(4, 3)
    everything = rows_of(experience)
    shortest = experience.attention_mask.sum(dim=1).argsort()
    for rows in (shortest[:1], shortest[:4], torch.tensor([5, 0, 3]), torch.arange(len(experience))):
        part = experience.select(rows)
        assert rows_of(part) == [everything[row] for row in rows.tolist()]
        assert part.sequences.shape[1] == part.attention_mask.sum(dim=1).max()
        assert part.action_mask.shape[1] == part.sequences.shape[1] - 1
        assert part.advantages.shape == (len(rows), 1)


@pytest.mark.parametrize("micro_batch_size", [1, 5, 100])
def test_micro_batches_hold_every_row_once(micro_batch_size):
    experience = rollout(4, 3)
    parts = list(experience.split(micro_batch_size))
    assert all(len(part) <= micro_batch_size for part in parts)
    assert sorted(row for part in parts for row in rows_of(part)) == sorted(rows_of(experience))
    assert sum(part.sequences.numel() for part in parts) <= experience.sequences.numel()


def test_a_rank_without_rows_has_a_filler_with_weights(monkeypatch):
    monkeypatch.setattr("common.parallel.gather", lambda own: [own, 1])
    (only,) = rollout(2, 2).select(torch.tensor([], dtype=torch.long)).split(4)
    read = (only.log_probs_ref, only.advantages, only.importance_weights, only.action_mask, only.observation_mask)
    assert [(x.shape, x.any().item()) for x in read] == [((1, 1), False)] * 5


def test_a_rank_has_as_many_micro_batches_as_another_one(monkeypatch):
    monkeypatch.setattr("common.parallel.gather", lambda own: [own, 5])
    parts = list(rollout(4, 3).split(4))
    assert [int(part.action_mask.sum()) > 0 for part in parts] == [True] * 3 + [False] * 2


def test_denominators_are_those_of_all_ranks_divided_by_their_number(monkeypatch):
    monkeypatch.setattr("common.experience.gather", lambda own: [own, own + 3, 0])
    monkeypatch.setattr("common.experience.data_size", lambda: 3)
    experience = rollout(4, 3)
    assert experience.num_rows == (2 * 12 + 3) / 3
    assert experience.num_tokens == (2 * int(experience.action_mask.sum()) + 3) / 3


def test_micro_batches_can_leave_out_rows_without_advantage():
    experience = rollout(num_prompts=4, group_size=2)
    experience.advantages = torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0])[:, None]
    everything = [row for micro in experience.split(2) for row in rows_of(micro)]
    assert sorted(everything) == sorted(rows_of(experience))
    kept = [row for micro in experience.split(2, skip_zero_advantages=True) for row in rows_of(micro)]
    assert sorted(kept) == sorted(rows_of(experience.select(torch.tensor([0, 1, 6]))))
    experience.advantages.zero_()
    (only,) = experience.split(2, skip_zero_advantages=True)
    assert len(only) == 1


@pytest.mark.parametrize("minibatch_size", [3, 9, None])
@pytest.mark.parametrize("advantages_per", ["row", "token"])
def test_minibatches_hold_every_group_once_and_complete(minibatch_size, advantages_per):
    experience = rollout(7, 3)
    if advantages_per == "token":
        experience.advantages = experience.old_log_probs * 5

    minibatches = list(experience.minibatches(minibatch_size, group_size=3, key=(0, 1, 0)))
    size = len(experience) if minibatch_size is None else minibatch_size
    assert all(len(minibatch) == size for minibatch in minibatches[:-1])
    for minibatch in minibatches:
        assert minibatch.sequences.shape[1] == minibatch.attention_mask.sum(dim=1).max()
        groups = minibatch.prompt_index.view(-1, 3)
        assert (groups == groups[:, :1]).all()
    seen = [row for minibatch in minibatches for row in rows_of(minibatch)]
    assert sorted(seen) == sorted(rows_of(experience))


def test_incomplete_groups_are_refused():
    with pytest.raises(ValueError, match="6 rows are not complete groups of 4"):
        next(rollout(2, 3).minibatches(None, 4, key=(0,)))
    with pytest.raises(ValueError, match="6 rows are not complete groups of 4"):
        next(rollout(2, 4).minibatches(6, 4, key=(0,)))


# Advantages -----------------------------------------------------------------------------------------------------------


def scaled_advantages(returns: torch.Tensor, eps: float = STD_EPS) -> torch.Tensor:
    """As experiment_base computes them."""
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


@pytest.mark.parametrize("group_size", [2, 8, 64])
def test_no_group_of_maxrl_is_divided_by_a_mean_of_nearly_0(group_size):
    """Means below 0, and means of 0 where signs cancel; rewards of -1 and 1 are 0 and 1, measured from the lowest."""
    generator = torch.Generator().manual_seed(0)
    returns = torch.randn(500, group_size, generator=generator, dtype=torch.float64) * 3 - 1
    returns[:100] -= returns[:100].mean(dim=1, keepdim=True)
    advantages = group_advantages(returns) / success_rate(returns)
    assert advantages.abs().max() <= group_size - 1 + 1e-9
    assert (advantages[:100] / (returns[:100] / -returns[:100].amin(dim=1, keepdim=True)) - 1).abs().max() < 1e-9
    right = (returns > 1).double()
    expected, found = (group_advantages(x) / success_rate(x) for x in (right, 2 * right - 1))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("formula", [group_advantages, lambda returns: scaled_advantages(returns, eps=1e-8)])
@pytest.mark.parametrize("value", [0.0, 0.7, 1.01, -3.3, 1e-8, 12345.678])
def test_equal_returns_give_exactly_zero_for_every_group_size(formula, value):
    for group_size in range(2, 17):
        for dtype in (torch.float32, torch.float64):
            returns = torch.full((2, group_size), value, dtype=dtype)
            assert not has_reward_variance(returns).any()
            assert (formula(returns) == 0).all()


@pytest.mark.parametrize("weighted_rewards", [(0.5, -0.4, 1.1, 0.33, -0.9), (0.1, 0.2, -0.3, 0.7, -0.7)])
def test_returns_that_differ_by_float_noise_give_exactly_zero(weighted_rewards):
    orders = itertools.permutations(torch.tensor(weighted_rewards))
    returns = torch.stack([sum(order) for order in orders])[None]  # (1, 120)
    assert returns.unique().numel() > 1  # there is rounding noise
    assert (scaled_advantages(returns) == 0).all()


@pytest.mark.parametrize("difference", [1e-5, 1e-3, 1.0])
def test_a_small_but_real_difference_is_trained_on(difference):
    returns = torch.tensor([[0.7, 0.7 + difference, 0.7, 0.7]])
    assert has_reward_variance(returns).all()
    assert scaled_advantages(returns, eps=0.0)[0, 1].item() == pytest.approx(1.5, rel=1e-2)


@pytest.mark.parametrize("formula", [group_advantages, scaled_advantages])
@pytest.mark.parametrize("group", ["nan 1 1", "inf 1 1", "-inf 1 1", "inf inf inf"])
def test_a_return_that_is_not_finite_is_seen(formula, group):
    assert not formula(torch.tensor([list(map(float, group.split()))])).isfinite().any()


@pytest.mark.parametrize("shape", [(4,), (2, 2, 2), (3, 1), (3, 0)])
def test_returns_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="G >= 2"):
        group_advantages(torch.zeros(shape))
