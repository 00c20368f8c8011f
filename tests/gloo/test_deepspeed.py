"""Two processes under DeepSpeed's ZeRO-2 and ZeRO-3 make the update of one process that has all rows.

As a program, this file is one of the two processes: `torchrun --nproc-per-node 2 tests/gloo/test_deepspeed.py 3`.
"""

import faulthandler
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.experience import Experience, collate
from common.loss import masked_mean
from common.parallel import in_step, rank, world_size
from common.policy import Policy
from common.sampling import sample
from common.trajectory import Trajectory

from common.plumbing import deepspeed as ours

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS, OF_RANK_0 = 7, 5  # 3 micro-batches of two rows on rank 0, 1 on rank 1
BAD_STEP = 1  # the loss of one micro-batch of one rank is not a number
MAX_GRAD_NORM = 0.5


def make_model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=24,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            initializer_range=0.3,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def load_policy(directory: str) -> Policy:
    from transformers import AutoModelForCausalLM

    return Policy(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), None, [2], pad_id=0)


def make_micro_batches(step: int, rows: range) -> list[Experience]:
    """Micro-batches of the given rows of a step's seven, whose lengths differ."""
    generator = torch.Generator().manual_seed(step)
    trajectories = []
    for index in range(NUM_ROWS):
        length, prompt = int(torch.randint(6, 25, (), generator=generator)), 1 + index % 4
        mask = [0] * prompt + [1] * (length - prompt)
        ids = torch.randint(3, 24, (length,), generator=generator).tolist()
        trajectories.append(Trajectory(ids, prompt, mask, [0.0] * length, index, 0))
    experience = collate(trajectories, pad_id=0)
    experience.advantages = torch.randn(NUM_ROWS, 1, generator=generator)
    return list(experience.select(torch.tensor(rows)).split(2))


def part_of_loss(policy: torch.nn.Module, micro: Experience, step: int) -> torch.Tensor:
    log_probs, _ = policy(micro.sequences, micro.action_mask)
    loss = -masked_mean(log_probs * micro.advantages, micro.action_mask, dim=1).sum() / NUM_ROWS
    return loss * float("nan") if step == BAD_STEP and (micro.prompt_index == 6).any() else loss


def make_optimizer(policy: Policy) -> torch.optim.Optimizer:
    return torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.1)


def train_alone(directory: str) -> tuple[Policy, list[float]]:
    """The plain loop with all rows: the trained policy, and the norm of each step's gradient."""
    policy = load_policy(directory)
    optimizer = make_optimizer(policy)
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        for micro in make_micro_batches(step, range(NUM_ROWS)):
            part_of_loss(policy, micro, step).backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
        if torch.isfinite(norm):
            optimizer.step()
        norms.append(float(norm))
    return policy, norms


def main(stage: int, directory: str) -> None:
    """One of the two processes."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import InitProcessGroupKwargs

    faulthandler.dump_traceback_later(120, exit=True)  # ranks that wait for each other for good say where
    # Accelerate needs to be told the backend: on a CPU it would take itself for the only process.
    accelerator = Accelerator(
        mixed_precision="bf16",  # the policy alone decides
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    ours.fill_settings(accelerator, micro_batch_size=2, max_grad_norm=MAX_GRAD_NORM)
    # by default weights as small as these are not sharded
    accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    policy, full = load_policy(directory), load_policy(directory)
    engine, _ = accelerator.prepare(policy, make_optimizer(policy))
    is_sharded = engine.module.model.lm_head.weight.numel() == 0
    assert (accelerator.num_processes, is_sharded) == (2, stage == 3)

    norms = []
    for step in range(4):
        rows = range(OF_RANK_0) if rank() == 0 else range(OF_RANK_0, NUM_ROWS)
        micro_batches = make_micro_batches(step, rows)
        filler = micro_batches[0].select(torch.tensor([0]))
        filler.action_mask = torch.zeros_like(filler.action_mask)
        micro_batches = in_step(micro_batches, filler)
        for number, micro in enumerate(micro_batches, start=1):
            loss = part_of_loss(engine, micro, step) * world_size()
            ours.backward(engine, loss, is_last=number == len(micro_batches))
        norms.append(float(ours.step(engine)))

    before = {name: weight.clone() for name, weight in full.named_parameters()}
    ours.copy_weights(engine, full)
    alone, norms_alone = train_alone(directory)
    for name, weight in alone.named_parameters():
        torch.testing.assert_close(full.get_parameter(name), weight, atol=1e-5, rtol=0)
        assert not torch.equal(before[name], weight), f"{name} was not trained"
    assert norms[BAD_STEP] == float("inf")
    assert not torch.isfinite(torch.tensor(norms_alone[BAD_STEP]))
    del norms[BAD_STEP], norms_alone[BAD_STEP]
    torch.testing.assert_close(norms, norms_alone, rtol=1e-4, atol=0)
    # the copy samples for different times on the two ranks, and neither waits for the other
    samples, expected = (
        sample(model, [[5, 6, 7]], 2, max_new_tokens=2 if rank() == 0 else 30, key=(0, 0)) for model in (full, alone)
    )
    assert [row.ids for row in samples] == [row.ids for row in expected]
    torch.distributed.barrier()
    print(f"rank {rank()} of {world_size()}: equal", flush=True)
    torch.distributed.destroy_process_group()
    os._exit(0)  # the interpreter's own exit sometimes aborts under ZeRO-3, after all work is done


@pytest.mark.parametrize("stage", [2, 3])
def test_update_under_deepspeed_equals_one_process(stage, tmp_path):
    pytest.importorskip("deepspeed", exc_type=ImportError)
    make_model().save_pretrained(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [*launch, __file__, str(stage), str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert all(f"rank {number} of 2: equal" in result.stdout for number in range(2))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
