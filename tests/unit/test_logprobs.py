"""`Policy.forward`: the log-probabilities that training sees, in value, gradient and memory.

Rows are packed, and a prompt that several rows share is encoded once; neither changes values, gradients or the
independence of rows.
"""

import warnings
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.experience import MicroBatchSize, collate
from common.logprobs import MAX_LOGITS, token_log_probs
from common.policy import Policy
from common.sampling import sample
from common.trajectory import Trajectory
from fast import packed_rows

from harness.models.loading import check_computation
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


def gradient(policy, log_probs: torch.Tensor) -> torch.Tensor:
    """The gradient of a sum in which all tokens have different weights."""
    weights = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(1))
    parts = torch.autograd.grad((log_probs * weights).sum(), list(policy.parameters()), retain_graph=True)
    return torch.cat([part.flatten() for part in parts])


def assert_close(found, expected) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def assert_scores_and_gradient(policy, sequences, mask) -> None:
    """Compare with complete rows and a complete softmax."""
    scores = policy(sequences, mask)
    log_probs, entropy = plain_scores(policy, sequences, mask)
    assert_close(list(scores), [log_probs, entropy])
    assert not scores.entropy.requires_grad
    actual, expected = gradient(policy, scores.log_probs), gradient(policy, log_probs)
    assert (actual - expected).norm() <= 1e-5 * expected.norm() != 0


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("max_logits", [2**25, 3 * VOCAB, 1])
def test_chunked_log_probs_and_entropy_equal_a_full_log_softmax(make_policy, temperature, max_logits):
    policy = make_policy(VOCAB, temperature=temperature)
    policy.max_logits = max_logits
    assert_scores_and_gradient(policy, *random_batch())


def test_bfloat16_arithmetic_still_ends_in_a_float32_softmax(make_policy):
    """A log-softmax in bfloat16 would be wrong by about 0.02 nats per token on average."""
    policy = make_policy(VOCAB, temperature=0.7, compute_dtype=torch.bfloat16)
    sequences, mask = random_batch()
    log_probs = policy(sequences, mask).log_probs
    with policy.autocast():
        assert policy.model(sequences, use_cache=False).logits.dtype == torch.bfloat16
        expected, _ = plain_scores(policy, sequences, mask)
    assert log_probs.dtype == torch.float32
    assert_close(log_probs, expected)


def test_a_batch_without_action_tokens_has_zero_gradients(make_policy):
    policy = make_policy(VOCAB)
    sequences, mask = random_batch()
    log_probs = policy(sequences, torch.zeros_like(mask)).log_probs
    assert torch.equal(log_probs, torch.zeros(mask.shape))
    assert not gradient(policy, log_probs).any()


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operation creates."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.numel = max([self.numel, *(x.numel() for x in tensors)])
        return result


def test_no_tensor_holds_the_logits_of_all_tokens():
    """In both the forward and the backward pass, with a network so narrow that only the logits are large."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab_size, num_tokens = 20_000, 60
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
    assert largest.numel == num_tokens * vocab_size  # the size without chunks


@pytest.mark.parametrize("pad_id", [0, 7])
def test_log_probs_do_not_depend_on_padding_or_neighbours(make_policy, pad_id):
    policy = make_policy(VOCAB)
    policy.max_logits = 3 * VOCAB
    sequences, _ = random_batch(rows=3, width=20)
    rows = [ids[:length].tolist() for ids, length in zip(sequences, (20, 9, 4), strict=True)]
    rows = [Trajectory(ids, 2, [0, 0] + [1] * (len(ids) - 2), [0.0] * len(ids)) for ids in rows]
    batch = collate(rows, pad_id)
    together = policy(batch.sequences, batch.action_mask)
    for index, row in enumerate(rows):
        single = collate([row], pad_id)
        end = len(row.ids) - 1
        assert_close([x[index, :end] for x in together], [x[0] for x in policy(single.sequences, single.action_mask)])
        assert not any(x[index, end:].any() for x in together)


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
    assert_close(log_probs, seen)
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


def after_update(train, policy, micro_batch_size: int) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Gradient, weights and metrics after `update` on the same 8 rows of very different lengths."""
    trajectories = sample(policy, [[3, 4], [5, 6, 7, 8, 9], [10], [11, 12]], 2, max_new_tokens=30, key=(0, 0))
    assert len({len(row.ids) for row in trajectories}) > 4
    experience = collate(trajectories, policy.pad_id)
    generator = torch.Generator().manual_seed(0)
    experience.advantages = torch.randn(8, 1, generator=generator)
    experience.old_log_probs = experience.sampler_log_probs
    noise = torch.randn(experience.action_mask.shape, generator=generator)
    experience.log_probs_ref = experience.sampler_log_probs + noise
    sizes = {"group_size": 2, "micro_batch_size": micro_batch_size, "max_new_tokens": 30}
    config = train.Config(kl_weight=0.1, max_grad_norm=1e9, **sizes)
    metrics = train.update(config, policy, torch.optim.SGD(policy.parameters(), lr=0.1), experience, step=1).metrics()
    weights = list(policy.parameters())
    return torch.cat([p.grad.flatten() for p in weights]), torch.cat([p.detach().flatten() for p in weights]), metrics


@pytest.mark.parametrize("experiment", ["experiment_base", "experiment_drgrpo"])
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_micro_batches_change_neither_gradient_nor_update(load_script, make_policy, micro_batch_size, experiment):
    train = load_script(f"{experiment}/train.py")
    gradient, weights, metrics = after_update(train, make_policy(VOCAB), micro_batch_size)
    expected, expected_weights, expected_metrics = after_update(train, make_policy(VOCAB), 8)
    assert (gradient - expected).norm() <= 2e-6 * expected.norm()  # a single row shares no prompt: other rounding
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=0)
    assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("kind", "is_bounded"), [("MULTI_GPU", True), ("FSDP", True), ("DEEPSPEED", False)])
def test_logits_stay_bounded_where_the_head_may_be_chunked(make_policy, kind, is_bounded):
    """Under ZeRO-3 each call of the LM head is a message, so the number of calls must not depend on the data."""
    accelerator = SimpleNamespace(
        distributed_type=DistributedType(kind), device=None, prepare=lambda *prepared: prepared
    )
    policy, _ = prepare(accelerator, make_policy(), None)
    assert (policy.max_logits == MAX_LOGITS) == is_bounded


# Rows that are packed, and prompts that several of them share --------------------------------------------------------

# One is a prefix of another, one is a single token, and two have different lengths in one bucket
PROMPTS = ([3, 4], [5, 6, 7, 8, 9, 13], [10], [3, 4, 11, 12, 14])
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


def make_model(name: str, initializer_range: float = 0.3):
    """A random model: llama, qwen2 (with biases), qwen3 (normalises q and k), mistral (sees only four tokens), ..."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        name, **shape, head_dim=8, intermediate_size=64, vocab_size=VOCAB, eos_token_id=2, tie_word_embeddings=False,
        initializer_range=initializer_range, **({"sliding_window": 4} if name == "mistral" else {}),
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("with_checkpoints", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_packed_rows_have_the_values_and_gradients_of_complete_rows(batch, name, with_checkpoints):
    policy = Policy(make_model(name), None, [2], pad_id=0, temperature=0.7)
    if with_checkpoints:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        policy.gradient_checkpointing = True
    assert policy.packing == "sdpa"
    assert_scores_and_gradient(policy, batch.sequences, batch.action_mask)


def test_rows_are_padded_where_attention_is_eager(batch):
    model = make_model("llama")
    model.set_attn_implementation("eager")
    policy = Policy(model, None, [2], pad_id=0)
    assert (policy.packing, policy.temperature) == (None, 1)
    assert_scores_and_gradient(policy, batch.sequences, batch.action_mask)


def test_rows_are_padded_where_attention_ignores_the_borders(capsys):
    """StableLM's attention is none of transformers' functions; with such weights, bfloat16 could hide its error."""
    policy = Policy(make_model("stablelm", initializer_range=0.02), None, [2], pad_id=0, compute_dtype=torch.bfloat16)
    assert policy.packing == "sdpa"
    check_computation(policy)
    assert policy.packing is None
    assert "rows are padded, not packed: the attention of StableLmForCausalLM" in capsys.readouterr().out


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_every_prompt_and_completion_token_is_run_once_in_one_call(policy, batch, is_checkpointed):
    policy.gradient_checkpointing = is_checkpointed
    seen = []
    policy.model.get_input_embeddings().register_forward_hook(lambda _, args, output: seen.append(args[0].shape))
    policy(batch.sequences, batch.action_mask)
    # the last token of a prompt predicts the first of a completion, and a completion's last one predicts nothing
    completions = (batch.attention_mask.sum(dim=1) - batch.prompt_lengths)[batch.action_mask.any(dim=1)]
    num_tokens = sum(len(prompt) - 1 for prompt in PROMPTS) + int(completions.sum())
    assert seen == [(1, num_tokens)]


@pytest.mark.slow
def test_a_block_mask_of_flex_attention_gives_the_same_values(policy, batch):
    """Only the forward pass: FlexAttention has no backward pass on CPUs."""
    expected = policy(batch.sequences, batch.action_mask).log_probs
    policy.packing = packed_rows.FLEX
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is not compiled here
        assert_close(policy(batch.sequences, batch.action_mask).log_probs, expected.detach())


def test_flash_attention_gets_the_borders_of_complete_rows(batch):
    """FlashAttention needs a GPU; transformers' own attention finds the same borders where positions restart."""
    row = packed_rows.lay_out(batch.sequences, batch.action_mask, share_prompts=False)
    borders = packed_rows._flash_borders(row.segments, torch.device("cpu"))
    starts = borders["cu_seq_lens_q"].tolist()
    assert [start for start, position in enumerate(row.positions) if position == 0] == starts[:-1]
    assert starts[-1] == len(row.ids)
    assert borders["max_length_q"] == max(after - before for before, after in pairwise(starts))
    decoder = make_model("llama").eval().model
    packed, flat = packed_rows.hidden_states(decoder, batch.sequences, batch.action_mask, packed_rows.FLASH)
    assert_close(packed, decoder(batch.sequences, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)[flat])


def test_micro_batches_of_tokens_hold_every_row_once(policy, batch):
    batch = batch.select(torch.randperm(len(batch), generator=torch.Generator().manual_seed(0)))
    lengths = batch.attention_mask.sum(dim=1)
    parts = batch.micro_batch_rows(MicroBatchSize(rows=5, num_tokens=40))
    assert sorted(torch.cat(parts).tolist()) == list(range(len(batch)))
    assert len(parts) > 3
    for rows in parts:
        part = batch.select(rows)
        row = packed_rows.lay_out(part.sequences, part.action_mask)
        assert len(rows) <= 5
        assert len(row.ids) <= 40
    longest = int(lengths.max())
    alone = batch.micro_batch_rows(MicroBatchSize(rows=5, num_tokens=longest - 5))
    assert any(len(rows) == 1 and lengths[rows[0]] == longest for rows in alone)
    complete = policy(batch.sequences, batch.action_mask).log_probs.detach()
    for size in (MicroBatchSize(5, 40), 1, 4, 100):
        log_probs = token_log_probs(policy, batch, size)
        assert not log_probs.requires_grad
        assert_close(log_probs, complete)


def test_micro_batches_keep_the_rows_of_a_prompt_together(batch):
    """Otherwise each of them would encode the prompt."""
    shuffled = batch.select(torch.randperm(len(batch), generator=torch.Generator().manual_seed(0)))
    for micro in shuffled.split(GROUP_SIZE):
        assert len(micro.prompt_index.unique()) == 1
