"""`Policy.forward`: the log-probabilities that training sees, in value, gradient and memory.

A prompt that several rows share is encoded once; values, gradients and independence of rows stay the same.
"""

from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.experience import collate
from common.fast import shared_prompts
from common.logprobs import MAX_LOGITS, token_log_probs
from common.policy import Policy
from common.sampling import sample
from common.trajectory import Trajectory

from harness.processes.accelerator import prepare

VOCAB = 24


@pytest.fixture(scope="module")
def train(load_script):
    return load_script("experiment_base/train.py")


def random_batch(rows: int = 4, width: int = 11, vocab_size: int = VOCAB) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids (B, T) and an action mask (B, T-1) with holes, whose last row has no action token."""
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(vocab_size, (rows, width), generator=generator)
    mask = (torch.rand(rows, width - 1, generator=generator) < 0.6).long()
    mask[-1] = 0
    return sequences, mask


def full_log_probs(policy, sequences: torch.Tensor, **model_arguments) -> torch.Tensor:
    """(B, T-1, V) log-probabilities of the complete vocabulary at every position, computed directly."""
    logits = policy.model(sequences, use_cache=False, **model_arguments).logits[:, :-1].float()
    return (logits / policy.temperature).log_softmax(dim=-1)


def plain_scores(policy, sequences: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy (B, T-1) from complete rows, computed directly."""
    everything = full_log_probs(policy, sequences)
    log_probs = everything.gather(-1, sequences[:, 1:, None])[..., 0] * mask
    return log_probs, -(everything.exp() * everything).sum(dim=-1) * mask


def gradients(policy, value: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(value, list(policy.parameters()), retain_graph=True))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("max_logits", [2**25, 3 * VOCAB, 1])
def test_chunked_log_probs_and_entropy_equal_a_full_log_softmax(make_policy, temperature, max_logits):
    """In value and gradient, for chunks of several sizes."""
    policy = make_policy(VOCAB, temperature=temperature)
    sequences, mask = random_batch()
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1))

    policy.max_logits = max_logits
    scores = policy(sequences, mask)
    expected, entropy = plain_scores(policy, sequences, mask)
    torch.testing.assert_close(scores.log_probs, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.entropy, entropy, atol=1e-5, rtol=0)
    assert not scores.entropy.requires_grad

    found, wanted = (gradients(policy, (values * weights).sum()) for values in (scores.log_probs, expected))
    for gradient, other in zip(found, wanted, strict=True):
        assert (gradient - other).norm() <= 1e-4 * other.norm()
        assert other.norm() > 0


def test_bfloat16_arithmetic_still_ends_in_a_float32_softmax(make_policy):
    """A log-softmax in bfloat16 would be wrong by about 0.02 nats per token on average."""
    policy = make_policy(VOCAB, temperature=0.7, compute_dtype=torch.bfloat16)
    sequences, mask = random_batch()
    scores = policy(sequences, mask)
    with policy.autocast():
        logits = policy.model(sequences, use_cache=False).logits
    assert logits.dtype == torch.bfloat16
    expected = (logits[:, :-1].float() / 0.7).log_softmax(dim=-1).gather(-1, sequences[:, 1:, None])[..., 0] * mask
    assert scores.log_probs.dtype == torch.float32
    torch.testing.assert_close(scores.log_probs, expected, atol=1e-5, rtol=0)


def test_a_batch_without_action_tokens_has_zero_gradients(make_policy):
    """Its log-probs are zero too."""
    policy = make_policy(VOCAB)
    sequences, mask = random_batch()
    scores = policy(sequences, torch.zeros_like(mask))
    assert torch.equal(scores.log_probs, torch.zeros(mask.shape))
    assert all((gradient == 0).all() for gradient in gradients(policy, scores.log_probs.sum()))


class LargestTensor(TorchDispatchMode):
    """Records how many entries the largest tensor has that any operation makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.numel = max([self.numel, *(x.numel() for x in tensors)])
        return result


def test_no_tensor_holds_the_logits_of_all_tokens():
    """Neither in the forward nor in the backward pass, with a network so narrow that only the logits are large."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab_size, num_tokens = 128_256, 60
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    policy = Policy(LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **sizes)), None, [2], pad_id=0)
    sequences = torch.arange(2 * 31).view(2, 31)
    mask = torch.ones(2, 30, dtype=torch.long)
    most = 10 * vocab_size  # also more than the 8 * V weights of the head and their gradient
    for max_logits, is_bounded in ((most, True), (2**40, False)):
        with LargestTensor() as largest:
            policy.max_logits = max_logits
            policy(sequences, mask).log_probs.sum().backward()
        assert (largest.numel <= most) == is_bounded
    assert largest.numel == num_tokens * vocab_size  # what it would be without chunks


@pytest.mark.parametrize("max_logits", [2**25, 3 * VOCAB])
def test_log_probs_do_not_depend_on_padding_or_neighbours(make_policy, max_logits):
    policy = make_policy(VOCAB)
    sequences, _ = random_batch(rows=3, width=20)
    rows = [sequences[0, :20].tolist(), sequences[1, :9].tolist(), sequences[2, :4].tolist()]
    trajectories = [Trajectory(ids, 2, [0, 0] + [1] * (len(ids) - 2), [0.0] * len(ids)) for ids in rows]
    for pad_id in (0, 7):
        batch = collate(trajectories, pad_id)
        policy.max_logits = max_logits
        together = policy(batch.sequences, batch.action_mask)
        for index, row in enumerate(trajectories):
            single = collate([row], pad_id)
            alone = policy(single.sequences, single.action_mask)
            for x, y in zip(together, alone, strict=True):
                torch.testing.assert_close(x[index, : len(row.ids) - 1], y[0], atol=1e-5, rtol=0)
                assert (x[index, len(row.ids) - 1 :] == 0).all()


def test_prompt_tokens_equal_to_pad_keep_their_attention(make_policy):
    """Llama 3 writes its end-of-turn token into every prompt; a mask `ids != pad` would hide those tokens."""
    pad = 2
    policy = make_policy(VOCAB, end_of_turn_ids=(pad,), pad_id=pad)
    prompt, completion = [5, pad, 6, pad, 7], [8, 9, pad]
    row = Trajectory(prompt + completion, len(prompt), [0] * 5 + [1] * 3, [0.0] * 8)
    longer = Trajectory(prompt + [3] * 12, len(prompt), [0] * 5 + [1] * 12, [0.0] * 17)
    batch = collate([row, longer], pad)

    log_probs = policy(batch.sequences, batch.action_mask).log_probs[0, 4:7]
    ids = torch.tensor([row.ids])
    seen, hidden = (
        full_log_probs(policy, ids, attention_mask=mask).gather(-1, ids[:, 1:, None])[0, 4:7, 0]
        for mask in (torch.ones_like(ids), (ids != pad).long())
    )
    torch.testing.assert_close(log_probs, seen, atol=1e-5, rtol=0)
    assert (seen - hidden).abs().max() > 0.1  # such a mask would matter here


def test_the_end_of_turn_token_is_trained_even_as_pad_id(train, make_policy):
    end = 2
    policy = make_policy(VOCAB, end_of_turn_ids=(end,), pad_id=end)
    ended = Trajectory([4, 5, 6, end], 2, [0, 0, 1, 1], [0.0] * 4)
    longer = Trajectory([4, 5, 6, 7, 8, 9, end], 2, [0, 0, 1, 1, 1, 1, 1], [0.0] * 7)
    batch = collate([ended, longer], pad_id=end)
    batch.advantages = torch.tensor([[1.0], [-1.0]])
    assert batch.action_mask.sum(dim=1).tolist() == [2, 5]

    logits = []
    policy.model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output))
    log_probs = policy(batch.sequences, batch.action_mask).log_probs
    terms, _ = train.policy_loss(train.Config(kl_weight=0.0), log_probs, batch, num_rows=2)
    by_logits, by_log_probs = torch.autograd.grad(terms.sum(), [logits[0], log_probs])  # (N, V), (B, T-1)
    # token 1 of the 7 action tokens ends the better row: raising its logit lowers the loss; the last ends the worse row
    assert by_logits[1, end] < 0 < by_logits[6, end]
    assert (by_log_probs[0] != 0).tolist() == [False, True, True, False, False, False]


def test_token_log_probs_in_micro_batches_are_those_of_all_rows(make_policy):
    policy = make_policy(VOCAB, temperature=0.7)
    experience = collate(sample(policy, [[3, 4], [5, 6, 7], [8]], 3, max_new_tokens=12, key=(0,)), policy.pad_id)
    complete = policy(experience.sequences, experience.action_mask)
    for micro_batch_size in (1, 4, 9, 100):
        log_probs = token_log_probs(policy, experience, micro_batch_size)
        assert not log_probs.requires_grad
        torch.testing.assert_close(log_probs, complete.log_probs.detach(), atol=1e-5, rtol=0)


EXPERIMENTS = [("experiment_base", {}), ("experiment_drgrpo", {}), ("experiment_drgrpo", {"critic_type": "grpo"})]


def updated_policy(train, make_policy, micro_batch_size: int, optimizer_class, lr: float, **settings):
    """A fresh policy after `update` on the same 8 rows of very different lengths, and its metrics."""
    policy = make_policy(VOCAB)
    trajectories = sample(policy, [[3, 4], [5, 6, 7, 8, 9], [10], [11, 12]], 2, max_new_tokens=30, key=(0, 0))
    assert len({len(row.ids) for row in trajectories}) > 4
    experience = collate(trajectories, policy.pad_id)
    generator = torch.Generator().manual_seed(0)
    experience.advantages = torch.randn(8, 1, generator=generator)
    experience.old_log_probs = experience.sampler_log_probs
    experience.log_probs_ref = experience.sampler_log_probs + torch.randn(
        experience.action_mask.shape, generator=generator
    )
    sizes = {"group_size": 2, "micro_batch_size": micro_batch_size, "max_new_tokens": 30}
    config = train.Config(kl_weight=0.1, max_grad_norm=1e9, **sizes, **settings)
    optimizer = optimizer_class(policy.parameters(), lr=lr)
    return policy, train.update(config, policy, optimizer, experience, step=1).metrics()


@pytest.mark.parametrize(("experiment", "flags"), EXPERIMENTS, ids=str)
@pytest.mark.parametrize("micro_batch_size", [1, 3, 4])
def test_micro_batches_change_neither_gradient_nor_update(
    load_script, make_policy, micro_batch_size, experiment, flags
):
    train = load_script(f"{experiment}/train.py")

    def both(*arguments, **settings):
        return [
            updated_policy(train, make_policy, size, *arguments, **settings, **flags) for size in (micro_batch_size, 8)
        ]

    (split, split_metrics), (complete, metrics) = both(torch.optim.SGD, 0.1)
    gradient, expected = (torch.cat([p.grad.flatten() for p in policy.parameters()]) for policy in (split, complete))
    assert (gradient - expected).norm() <= 2e-6 * expected.norm()  # a single row shares no prompt: other roundings
    for a, b in zip(split.parameters(), complete.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    assert split_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)

    # Adam turns the noise of a gradient near zero into a step of size lr, hence the wider tolerance.
    (split, _), (complete, _) = both(torch.optim.AdamW, 1e-4, epochs_per_step=3)
    for a, b in zip(split.parameters(), complete.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kind", "shares", "is_bounded"), [("MULTI_GPU", True, True), ("FSDP", False, True), ("DEEPSPEED", False, False)]
)
def test_logits_stay_bounded_where_the_head_may_be_chunked(make_policy, kind, shares, is_bounded):
    """Under ZeRO-3 each call of the LM head is a message, whose number must not depend on the data."""
    accelerator = SimpleNamespace(
        distributed_type=DistributedType(kind), device=None, prepare=lambda *prepared: prepared
    )
    policy, _ = prepare(accelerator, make_policy(), None)
    assert policy.share_prompts == shares
    assert (policy.max_logits == MAX_LOGITS) == is_bounded


# Prompts that several rows share --------------------------------------------------------------------------------------

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
    log_probs, entropy = plain_scores(policy, batch.sequences, batch.action_mask)
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
