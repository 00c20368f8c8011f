"""A prompt that several rows share is encoded once; values, gradients and independence of rows stay the same."""

import pytest
import torch

from common.experience import collate
from common.fast import shared_prompts
from common.sampling import sample

VOCAB = 24
PROMPTS = ([3, 4], [5, 6, 7, 8, 9], [10], [3, 4, 11, 12])  # one begins like another, one is a single token
GROUP_SIZE = 3


@pytest.fixture
def policy(make_policy):
    return make_policy(VOCAB)


@pytest.fixture
def batch(policy):
    """Rows of very different lengths; one has tool tokens in the middle, and one has no action token."""
    trajectories = sample(policy, list(PROMPTS), GROUP_SIZE, max_new_tokens=20, key=(0, 0))
    experience = collate(trajectories, policy.pad_id)
    longest = int(experience.action_mask.sum(dim=1).argmax())
    start = int(experience.action_mask[longest].argmax())
    experience.action_mask[longest, start + 2 : start + 5] = 0
    experience.action_mask[1] = 0
    return experience


def plain_scores(policy, experience) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy from complete rows, computed directly."""
    logits = policy.model(experience.sequences, use_cache=False).logits[:, :-1].float()
    everything = (logits / policy.temperature).log_softmax(dim=-1)
    log_probs = everything.gather(-1, experience.sequences[:, 1:, None])[..., 0] * experience.action_mask
    return log_probs, -(everything.exp() * everything).sum(dim=-1) * experience.action_mask


def gradient(policy, log_probs: torch.Tensor) -> torch.Tensor:
    weights = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(1))
    parts = torch.autograd.grad((log_probs * weights).sum(), list(policy.parameters()))
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("tokens_at_once", [1, 20, 10_000])
def test_values_and_gradients_are_those_of_complete_rows(
    policy, batch, monkeypatch, tokens_at_once, attn_implementation
):
    policy.model.set_attn_implementation(attn_implementation)
    monkeypatch.setitem(shared_prompts.TOKENS_AT_ONCE, "cpu", tokens_at_once)
    assert shared_prompts.hidden_states(policy.model.get_decoder(), batch.sequences, batch.action_mask) is not None
    scores = policy(batch.sequences, batch.action_mask)
    log_probs, entropy = plain_scores(policy, batch)
    torch.testing.assert_close(scores.log_probs, log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.entropy, entropy, atol=1e-5, rtol=0)
    actual, expected = gradient(policy, scores.log_probs), gradient(policy, log_probs)
    assert (actual - expected).norm() <= 1e-5 * expected.norm()


def test_every_prompt_and_completion_token_is_run_once(policy, batch, monkeypatch):
    monkeypatch.setitem(shared_prompts.TOKENS_AT_ONCE, "cpu", 1)  # a row at a time: no padding
    seen = []
    policy.model.get_input_embeddings().register_forward_hook(lambda _, args, output: seen.append(args[0].shape))
    policy(batch.sequences, batch.action_mask)
    lengths = batch.attention_mask.sum(dim=1)
    # the last token of a prompt predicts the first of a completion, and a completion's last one predicts nothing
    widest = max(map(len, PROMPTS)) - 1
    with_actions = batch.action_mask.any(dim=1)
    completions = (lengths - batch.prompt_lengths)[with_actions]
    assert seen[0] == (len(PROMPTS), widest)
    assert sorted(shape[1] for shape in seen[1:]) == sorted(completions.tolist())


def test_a_row_does_not_depend_on_its_neighbours(policy, batch):
    before = policy(batch.sequences, batch.action_mask).log_probs
    changed = batch.sequences.clone()
    start = int(batch.prompt_lengths[0])
    changed[0, start:] = (changed[0, start:] + 7) % VOCAB
    after = policy(changed, batch.action_mask).log_probs
    torch.testing.assert_close(after[1:], before[1:], atol=1e-5, rtol=0)
    assert not torch.allclose(after[0], before[0])


def test_rows_without_a_common_prompt_are_run_in_full(policy, batch):
    rows = torch.arange(0, len(batch), GROUP_SIZE)
    alone = batch.select(rows)
    assert shared_prompts.hidden_states(policy.model.get_decoder(), alone.sequences, alone.action_mask) is None


def test_gradient_checkpointing_gives_the_same_without_sharing(policy, batch):
    expected = policy(batch.sequences, batch.action_mask).log_probs
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    policy.gradient_checkpointing = True
    log_probs = policy(batch.sequences, batch.action_mask).log_probs
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)
    assert gradient(policy, log_probs).norm() > 0


def test_micro_batches_keep_the_rows_of_a_prompt_together(batch):
    """Otherwise the prompt would be encoded in each of them."""
    shuffled = batch.select(torch.randperm(len(batch), generator=torch.Generator().manual_seed(0)))
    for micro in shuffled.split(GROUP_SIZE):
        assert len(micro.prompt_index.unique()) == 1
