"""Automatic batch sizes: errors of memory, planted where they are rare, leave the results as they would have been."""

import copy
import dataclasses
import errno
import json
import pickle

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import common.sampling
from common.errors import UserError
from common.experience import Experience, collate
from common.fast.auto_size import AutoSize, fits, is_out_of_memory, rows_now
from common.fast.kept_rows import KeptRows
from common.logprobs import token_log_probs
from common.policy import Policy
from common.sampling import begin_rows, continue_rows, sample

from common.plumbing.auto_sizes import out_of_memory
from common.plumbing.config import RunConfig
from common.plumbing.loading import load_policy
from common.plumbing.parse import parse_config
from common.plumbing.processes import meet
from common.plumbing.update_memory import within_memory

pytestmark = pytest.mark.slow

NO_MEMORY = RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")
GROUP_SIZE = 4


@pytest.fixture
def policy() -> Policy:
    return load_policy(RunConfig(device="cpu"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NO_MEMORY, True),
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("MPS backend out of memory"), True),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("could not create a primitive descriptor for the matmul primitive."), False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_of_memory_are_told_from_others(error, expected):
    assert is_out_of_memory(error) is expected


def test_a_real_failed_allocation_is_an_error_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_a_copy_of_an_automatic_size_is_its_number_now():
    size = AutoSize(8)
    size.on_change = print
    assert size.halve(NO_MEMORY, num_rows=6)
    assert (size.now, int(size), rows_now(size), json.dumps(size)) == (3, 8, 3, "8")
    for same in (copy.deepcopy(size), copy.copy(size), pickle.loads(pickle.dumps(size))):
        assert (same, type(same)) == (3, int)


def test_sizes_end_at_one_row():
    size, calls = AutoSize(5), []

    def fail() -> None:
        calls.append(size.now)
        raise NO_MEMORY

    assert [fits(size, None, fail) for _ in range(3)] == [False] * 3
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        fits(size, None, fail)
    assert calls == [5, 3, 2, 1]


def limited(monkeypatch, most: int) -> list[int]:
    """Let sampling run out of memory in its third decode step where a batch has more than `most` rows."""
    calls, decode = [], common.sampling.next_logits

    def next_logits(policy, ids, *arguments):
        calls.append(len(ids))
        if len(ids) > most and ids.shape[1] == 1 and len(calls) % 4 == 3:
            raise NO_MEMORY
        return decode(policy, ids, *arguments)

    monkeypatch.setattr(common.sampling, "next_logits", next_logits)
    return calls


def test_sampling_in_parts_gives_the_same_rows(policy, monkeypatch):
    settings = {"max_new_tokens": 12, "key": (0, 1)}
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12]]
    expected = sample(policy, prompts, GROUP_SIZE, generation_batch_size=12, **settings)
    size = AutoSize(12)
    limited(monkeypatch, most=3)
    rows = sample(policy, prompts, GROUP_SIZE, generation_batch_size=size, **settings)
    assert size.now < 12
    assert [(row.ids, row.finish_reason) for row in rows] == [(row.ids, row.finish_reason) for row in expected]


def test_later_turns_in_parts_give_the_same_rows(policy, monkeypatch):
    """What the batch that failed had kept of its rows is of tokens that were never recorded."""

    def talk(size: int, monkey: bool = False) -> list[list[int]]:
        rows, kept = begin_rows([[5, 6, 7], [8, 9]], GROUP_SIZE), KeptRows()
        for turn in range(3):
            if monkey and turn == 1:
                limited(monkeypatch, most=2)
            continue_rows(
                policy, rows, max_new_tokens=24, key=(0, 1), max_length=12 + 12 * turn, generation_batch_size=size,
                kept=kept,
            )  # fmt: skip
            for row in rows:
                row.observe([20 + turn, 21], 1000)
        return [row.ids for row in rows]

    expected, size = talk(8), AutoSize(8)
    assert talk(size, monkey=True) == expected
    assert size.now < 8


def test_log_probs_in_smaller_parts_are_the_same(policy, monkeypatch):
    experience = collate(sample(policy, [[5, 6], [7]], GROUP_SIZE, max_new_tokens=6, key=(0,)), policy.pad_id)
    expected, forward, size = token_log_probs(policy, experience, 8), Policy.forward, AutoSize(8)

    def narrow(self, sequences, action_mask):
        if len(sequences) > 2:
            raise NO_MEMORY
        return forward(self, sequences, action_mask)

    monkeypatch.setattr(Policy, "forward", narrow)
    torch.testing.assert_close(token_log_probs(policy, experience, size), expected, atol=1e-5, rtol=0)
    assert size.now == 2


def sampled(policy: Policy) -> Experience:
    experience = collate(sample(policy, [[5, 6], [7], [8]], GROUP_SIZE, max_new_tokens=6, key=(0,)), policy.pad_id)
    experience.advantages = torch.tensor([1.0, -1.0, 0.5, -0.5] * 3)[:, None]
    experience.old_log_probs = experience.sampler_log_probs
    return experience


@pytest.mark.parametrize("minibatch_size", [None, GROUP_SIZE])
@pytest.mark.parametrize("fails_in", ["forward", "backward", "step"])
@pytest.mark.parametrize("num_before", [0, 1])
def test_the_update_is_that_of_a_run_without_limit(
    load_script, policy, monkeypatch, minibatch_size, fails_in, num_before
):
    """Also where the error comes after optimizer steps of the same update, and before the optimizer has a state."""
    train, experience = load_script("experiment_base/train.py"), sampled(policy)
    config = train.Config(
        prompts_per_step=3, group_size=GROUP_SIZE, minibatch_size=minibatch_size, micro_batch_size=4, kl_weight=0.0,
        max_new_tokens=6, lr=1e-3,
    )  # fmt: skip
    start = copy.deepcopy(policy.state_dict())

    def updated(size: int, fail_at: int | None) -> tuple[list[torch.Tensor], dict]:
        policy.load_state_dict(start)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
        for step in range(num_before):
            train.update(config, policy, optimizer, experience, step)
        calls = [0]

        def failing(name: str, call):
            def wrapped(*arguments, **named):
                calls[0] += name == fails_in
                if fail_at is not None and name == fails_in and calls[0] == fail_at:
                    raise NO_MEMORY
                return call(*arguments, **named)

            return wrapped

        limits = dataclasses.replace(config, micro_batch_size=size)
        with monkeypatch.context() as patch:
            patch.setattr(Policy, "forward", failing("forward", Policy.forward))
            patch.setattr(torch.Tensor, "backward", failing("backward", torch.Tensor.backward))
            patch.setattr(torch.Tensor, "addcdiv_", failing("step", torch.Tensor.addcdiv_))
            statistics = train.update(limits, policy, optimizer, experience, 5)
        return [weight.detach().clone() for weight in policy.parameters()], statistics.metrics()

    expected, metrics = updated(4, None)
    size, several = AutoSize(4), minibatch_size is not None
    fail_at = {"forward": 3, "backward": 3, "step": 50}[fails_in]
    if fails_in == "step" and not several:
        with pytest.raises(UserError, match="optimizer's step, which smaller micro-batches do not help"):
            updated(size, 5)
        return
    weights, found = updated(size, fail_at)
    assert size.now == 2
    assert max((a - b).abs().max().item() for a, b in zip(weights, expected, strict=True)) <= 1e-5
    assert found == pytest.approx(metrics, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("fail_at", [1, 3, 4], ids=["first backward", "last backward", "second epoch"])
def test_one_process_of_ddp_begins_again_in_a_backward_pass(load_script, policy, fail_at):
    """Where some gradients are there, and others are not: DDP waits for them, and would refuse the next pass."""
    meet("gloo")
    train, experience = load_script("experiment_accelerate_ddp/train.py"), sampled(policy)
    config = train.Config(
        prompts_per_step=3, group_size=GROUP_SIZE, micro_batch_size=4, epochs_per_step=2, kl_weight=0.0,
        max_new_tokens=6, lr=1e-3,
    )  # fmt: skip
    start, calls = copy.deepcopy(policy.state_dict()), [0]

    def fail(_: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] == fail_at:
            raise NO_MEMORY

    def updated(size: int) -> list[torch.Tensor]:
        policy.load_state_dict(start)
        model, optimizer = DistributedDataParallel(policy), torch.optim.SGD(policy.parameters(), lr=0.1)
        for step in (1, 2):
            train.update(dataclasses.replace(config, micro_batch_size=size), model, optimizer, experience, step)
        return [weight.detach().clone() for weight in policy.parameters()]

    expected, size = updated(4), AutoSize(4)
    policy.model.model.layers[0].mlp.down_proj.weight.register_hook(fail)
    weights = updated(size)
    assert size.now == 2
    assert calls[0] == fail_at + 2 * 2 * 6  # two steps of two epochs, of 6 micro-batches
    assert max((a - b).abs().max().item() for a, b in zip(weights, expected, strict=True)) <= 1e-5


def test_other_errors_of_an_update_go_up():
    calls = []

    @within_memory
    def update(config, optimizer):
        calls.append(config.micro_batch_size)
        raise ValueError("a mistake")

    config = dataclasses.make_dataclass("Config", ["micro_batch_size", "epochs_per_step", "minibatch_size"])
    config.prompts_per_step, config.group_size = 2, 2
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match="a mistake"):
        update(config(AutoSize(4), 1, None), optimizer)
    assert calls == [4]


def test_flags_become_numbers_and_stay_automatic(load_script):
    train = load_script("experiment_base/train.py")
    flags = ["--micro-batch-size", "auto", "--generation-batch-size", "auto", "--device", "cpu"]
    config = parse_config(train.Config, flags, description="")
    assert all(
        isinstance(size, AutoSize) and size >= 1 for size in (config.micro_batch_size, config.generation_batch_size)
    )
    assert config.micro_batch_size <= 128
    plain = dataclasses.asdict(config)
    assert type(plain["micro_batch_size"]) is int


def test_the_sentence_says_what_helps_and_how_to_resume(load_script):
    config = load_script("experiment_base/train.py").Config(micro_batch_size=8)
    assert str(out_of_memory(config, MemoryError(), "python x --resume y")) == (
        "memory ran out (MemoryError); what helps: --micro-batch-size 4, --generation-batch-size 64, "
        "--gradient-checkpointing, --lora-rank 16, a smaller model; resume with: python x --resume y "
        "--micro-batch-size auto --generation-batch-size auto"
    )
    config = dataclasses.replace(config, micro_batch_size=AutoSize(1), generation_batch_size=AutoSize(1), lora_rank=2)
    assert str(out_of_memory(config, NO_MEMORY, None)).endswith("what helps: --gradient-checkpointing, a smaller model")
