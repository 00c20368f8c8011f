"""What only a GPU can show; on a CPU the same tests run in the slow tier, except where they say why not.

`python -m pytest -m gpu tests/gpu` runs them. Without CUDA, some compare the CPU with itself in another arithmetic.
"""

import copy
import itertools

import pytest
import torch
from policies import fill_adapters, load, random_rows

from common.chat import encode_prompt
from common.experience import collate
from common.logprobs import token_log_probs
from common.policy import Policy
from common.sampling import sample
from tasks import arithmetic

from harness.base.machine import is_out_of_memory
from harness.data.data import read_rows

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="shows something on CUDA only")
WIDEST = {"float32": 1e-3, "bfloat16": 0.25}  # nats between the log-probs of a token that were computed in two ways


def on(device: str, **settings) -> Policy:
    return load(device=device, **settings)


def sampled(policy: Policy, num_prompts: int = 4, group_size: int = 4) -> list:
    rows = itertools.islice(read_rows(str(arithmetic.TRAIN_DATA), arithmetic.FIELDS), num_prompts)
    prompts = [encode_prompt(policy.tokenizer, arithmetic.messages(row)) for row in rows]
    return sample(policy, prompts, group_size, max_new_tokens=64, key=(0, 1))


def log_probs_and_gradient(policy: Policy, experience) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probs of the sampled tokens, and the gradient of their mean in float32, in one vector."""
    policy.zero_grad()
    log_probs = policy(experience.sequences, experience.action_mask).log_probs
    (log_probs.sum() / experience.action_mask.sum()).backward()
    gradients = [weight.grad.flatten() for weight in policy.parameters() if weight.requires_grad]
    return log_probs.detach(), torch.cat(gradients).float()


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.double().cpu(), b.double().cpu(), dim=0).item()


def test_autocast_computes_in_bfloat16_and_keeps_float32():
    policy, seen = on(DEVICE, dtype="bfloat16"), []
    layer = next(module for module in policy.model.modules() if isinstance(module, torch.nn.Linear))
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    log_probs, gradient = log_probs_and_gradient(policy, collate(sampled(policy), policy.pad_id, policy.device))
    assert set(seen) == {torch.bfloat16}
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32} == {log_probs.dtype, gradient.dtype}
    before = copy.deepcopy(policy.state_dict())
    torch.optim.AdamW(policy.parameters(), lr=1e-6).step()  # rounded away in bfloat16 weights
    assert sum(int((weight != before[name]).sum()) for name, weight in policy.state_dict().items()) > 1e6


@pytest.mark.parametrize("dtype", WIDEST)
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_packed_rows_have_the_log_probs_and_gradients_of_padded_ones(attention, dtype):
    if attention == "flex_attention" and not HAS_GPU:
        pytest.skip("FlexAttention has no backward pass on CPUs")
    policy = on(DEVICE, dtype=dtype, attn_implementation=attention)
    assert policy.packing == attention
    experience = collate(sampled(policy), policy.pad_id, policy.device)
    packed = log_probs_and_gradient(policy, experience)
    policy.packing = None
    padded = log_probs_and_gradient(policy, experience)
    assert (packed[0] - padded[0]).abs().max() < WIDEST[dtype]
    assert cosine(packed[1], padded[1]) > {"float32": 0.99999, "bfloat16": 0.99}[dtype]
    assert (packed[1].norm() / padded[1].norm() - 1).abs() < {"float32": 1e-4, "bfloat16": 0.05}[dtype]


@pytest.mark.parametrize("dtype", WIDEST)
def test_sampler_and_trainer_agree(dtype):
    """In bfloat16 they round differently: single tokens differ by up to a tenth of a nat, their mean hardly."""
    policy = on(DEVICE, dtype=dtype)
    experience = collate(sampled(policy, 8), policy.pad_id, policy.device)
    mask = experience.action_mask.bool()
    difference = (token_log_probs(policy, experience, 64) - experience.sampler_log_probs)[mask]
    assert difference.abs().max() < WIDEST[dtype]
    assert difference.mean().abs() < 0.1 * WIDEST[dtype]


@needs_gpu
def test_the_gpu_samples_and_trains_like_the_cpu():
    """In float32: the same tokens but where rounding moves one across a boundary, and the same gradient on them."""
    gpu, cpu = on("cuda"), on("cpu")
    rows, expected = sampled(gpu, 8), sampled(cpu, 8)
    same = sum(row.ids == other.ids for row, other in zip(rows, expected, strict=True))
    assert same >= len(rows) - 2
    found = log_probs_and_gradient(gpu, collate(expected, gpu.pad_id, gpu.device))
    right = log_probs_and_gradient(cpu, collate(expected, cpu.pad_id))
    assert (found[0].cpu() - right[0]).abs().max() < WIDEST["float32"]
    assert cosine(found[1], right[1]) > 0.99999


@pytest.mark.parametrize("dtype", WIDEST)
def test_gradients_over_4_bit_weights_are_those_over_dequantised_ones(dtype):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    policy, rounded = (
        fill_adapters(on(DEVICE, dtype=dtype, lora_rank=4, load_in=load_in)) for load_in in ("4bit", None)
    )
    exact = copy.deepcopy(rounded)
    for module in rounded.modules():
        if hasattr(module, "get_base_layer"):
            weight = module.get_base_layer().weight.data
            packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
            weight.copy_(bitsandbytes.functional.dequantize_4bit(packed, state))
    experience = collate(sampled(policy), policy.pad_id, policy.device)  # after a rollout, which may repack weights
    found, expected, others = (log_probs_and_gradient(each, experience)[1] for each in (policy, rounded, exact))
    assert cosine(found, expected) > {"float32": 0.999, "bfloat16": 0.99}[dtype]
    assert cosine(found, others) < cosine(found, expected)  # they agree because they share the rounding


@pytest.mark.parametrize("dtype", WIDEST)
def test_checkpointing_changes_no_gradient(dtype):
    plain, saving = on(DEVICE, dtype=dtype), on(DEVICE, dtype=dtype, gradient_checkpointing=True)
    experience = collate(sampled(plain), plain.pad_id, plain.device)
    gradients = [log_probs_and_gradient(policy, experience)[1] for policy in (plain, saving)]
    assert cosine(*gradients) > 0.9999


@needs_gpu
def test_memory_is_given_back():
    """After a rollout and an update, nothing is left but weights, gradients, and what the results hold."""
    policy = on("cuda")
    log_probs_and_gradient(policy, collate(sampled(policy), policy.pad_id, policy.device))  # makes the gradients
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        rows = sampled(policy, 16, 8)
        assert torch.cuda.max_memory_allocated() > before
        log_probs_and_gradient(policy, collate(rows, policy.pad_id, policy.device))
    assert torch.cuda.memory_allocated() - before < 1e6


def test_a_full_device_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**16, dtype=torch.uint8, device=DEVICE)
    assert is_out_of_memory(caught.value)
    assert random_rows(8)[0].to(DEVICE).sum() > 0  # the device goes on working
