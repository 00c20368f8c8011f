"""From trajectories to tensors and from a rollout to minibatches: no token and no row is lost or moved."""

import dataclasses

import pytest
import torch

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
    """Rows of different lengths, every token of which is unique; all per-token fields are filled."""
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
    for index in range(len(experience)):
        length = int(experience.attention_mask[index].sum())
        assert experience.attention_mask[index].tolist() == [1] * length + [0] * (width - length)
        assert (experience.action_mask[index, length - 1 :] == 0).all()
        about_next_token = (
            experience.action_mask,
            experience.sampler_log_probs,
            experience.old_log_probs,
            experience.log_probs_ref,
            experience.advantages,
            experience.importance_weights,
        )
        rows.append(
            (
                experience.prompt_index[index].item(),
                experience.prompt_lengths[index].item(),
                experience.sequences[index, :length].tolist(),
                *(field[index, : length - 1].tolist() for field in about_next_token),
            )
        )
    return rows


def test_collate_shifts_masks_and_log_probs_to_their_targets():
    """The first completion token counts, the first padding token does not."""
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
    """Also with tool tokens in the middle, and ids equal to the pad id."""
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
    """The width of a selection is the length of its longest row."""
    experience = rollout(4, 3)
    everything = rows_of(experience)
    shortest = experience.attention_mask.sum(dim=1).argsort()
    for rows in (shortest[:1], shortest[:4], torch.tensor([5, 0, 3]), torch.arange(len(experience))):
        part = experience.select(rows)
        assert rows_of(part) == [everything[row] for row in rows.tolist()]
        assert part.sequences.shape[1] == part.attention_mask.sum(dim=1).max()
        assert part.action_mask.shape[1] == part.sequences.shape[1] - 1
        assert part.advantages.shape == (len(rows), 1)


@pytest.mark.parametrize("micro_batch_size", [1, 5, 12, 100])
def test_micro_batches_hold_every_row_once(micro_batch_size):
    experience = rollout(4, 3)
    parts = list(experience.split(micro_batch_size))
    assert all(len(part) <= micro_batch_size for part in parts)
    assert sorted(row for part in parts for row in rows_of(part)) == sorted(rows_of(experience))
    assert sum(part.sequences.numel() for part in parts) <= experience.sequences.numel()


def test_a_rank_without_rows_has_a_filler_with_weights():
    """Every field that a loss can read is there, and none of its tokens counts."""
    (only,) = rollout(2, 2).select(torch.tensor([], dtype=torch.long)).split(4)
    read = (only.log_probs_ref, only.advantages, only.importance_weights, only.action_mask)
    assert [(x.shape, x.any().item()) for x in read] == [((1, 1), False)] * 4


def test_micro_batches_can_leave_out_rows_without_advantage():
    """But never all rows: one remains if no row has an advantage."""
    experience = rollout(num_prompts=4, group_size=2)
    experience.advantages = torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0])[:, None]
    everything = [row for micro in experience.split(2) for row in rows_of(micro)]
    assert sorted(everything) == sorted(rows_of(experience))
    kept = [row for micro in experience.split(2, skip_zero_advantages=True) for row in rows_of(micro)]
    assert sorted(kept) == sorted(rows_of(experience.select(torch.tensor([0, 1, 6]))))
    experience.advantages.zero_()
    (only,) = experience.split(2, skip_zero_advantages=True)
    assert len(only) == 1


@pytest.mark.parametrize("minibatch_size", [3, 6, 9, 300, None])
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


def test_the_shuffle_is_fixed_by_its_key_and_by_nothing_else():
    def order(key) -> list[int]:
        return torch.cat([minibatch.prompt_index for minibatch in rollout(16, 2).minibatches(8, 2, key)]).tolist()

    first = order((0, 1, 0))
    torch.manual_seed(1)
    assert order((0, 1, 0)) == first
    assert first != sorted(first)
    others = [order(key) for key in ((1, 1, 0), (0, 2, 0), (0, 1, 1))]
    assert len({tuple(rows) for rows in (first, *others)}) == 4


def test_incomplete_groups_are_refused():
    with pytest.raises(ValueError, match="6 rows are not complete groups of 4"):
        next(rollout(2, 3).minibatches(None, 4, key=(0,)))
    with pytest.raises(ValueError, match="6 rows are not complete groups of 4"):
        next(rollout(2, 4).minibatches(6, 4, key=(0,)))
