"""A mesh of ranks, replicate x shard x tensor: dividing a model over it, sampling, and checkpoints that any mesh reads.

With 4 ranks and --tensor-parallel 2, ranks 0 and 1 form a tensor group, and so do 2 and 3. The ranks of a tensor group
have the same rows, and each computes a half of every layer. Ranks 0 and 2 compute the same half, of different rows;
FSDP2 shards its weights over them, and gathers one layer at a time. With 8 ranks and --replicas 2, ranks 4 to 7 hold a
second copy, divided in the same way (HSDP). split_vocabulary.py has the log-probs.
"""

import logging
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial

import torch
import torch.distributed.checkpoint as dcp
from split_vocabulary import check_same_ids, gather_logits, score_split_logits
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from common.errors import UserError
from common.parallel import data_size, gather_all, is_main, rank, split_tensors, world_size
from common.policy import Policy
from common.sampling import sample
from common.trajectory import Trajectory

from harness.base.config import ConfigT
from harness.base.ranks import num_launched, together
from harness.base.terminal import say
from harness.engines.engine import Engine
from harness.processes.processes import check_parts, start_processes
from harness.run.run import Run

Sampler = Callable[..., list[Trajectory]]  # as `common.sampling.sample`

# How a layer of transformers' plans is divided: by the columns of x W, so that its output is divided too; or by the
# rows, so that its input is, and the outputs of the ranks are added. A norm of single heads, whose weight every rank
# has, sees some of the heads on each rank: the gradients of its weight are added.
STYLES = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": partial(SequenceParallel, sequence_dim=2, use_local_output=True),
}


def start_mesh(config: ConfigT) -> tuple[ConfigT, DeviceMesh]:
    """Connect to the other processes; returns the settings, with an attention that works here, and the mesh."""
    replicas, size = (1, 1) if config.estimate else (config.replicas, config.tensor_parallel)
    num_ranks, unit = num_launched(), replicas * size
    if num_ranks % unit:
        raise UserError(
            f"--tensor-parallel {size} times --replicas {replicas}: {num_ranks} process{'es' * (num_ranks > 1)} cannot "
            f"be divided by {unit}: start a multiple of {unit}, for example with torchrun --nproc-per-node {2 * unit}"
        )
    if config.load_in is not None:
        raise UserError(f"--load-in {config.load_in}: quantised weights cannot be divided over ranks: omit it")
    if config.engine is not None and (config.dtype != "float32" or config.lora_rank or config.adapter_path is not None):
        raise UserError("--engine needs exact weights of the whole model: use --dtype float32, and no adapter")
    if config.attn_implementation == "flash_attention_2":  # the model is tried out before it is divided, on the CPU
        say("attention is computed with sdpa: FlashAttention 2 cannot run where the model is loaded")
        config = replace(config, attn_implementation="sdpa")
    split_tensors(size)
    start_processes(config)
    with together():
        check_parts(config)
    shape, names = (replicas, data_size() // replicas, size), ("replicate", "shard", "tensor")
    return config, init_device_mesh(torch.device(config.device).type, shape, mesh_dim_names=names)


def distribute(mesh: DeviceMesh, policy: Policy, reference: Policy | None) -> None:
    """Move this rank's parts of the policy and of its reference to its device. One process keeps all of them."""
    # If a weight is divided along two dimensions, gathering it takes two messages, and torch warns about that
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if mesh.size() == 1:
        for whole in filter(None, (policy, reference)):
            whole.to(mesh.device_type)
        return
    over = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]  # two dimensions: HSDP
    for copy in [policy] if reference is None or reference.trained is policy else [policy, reference]:
        if mesh["tensor"].size() > 1:
            _split_and_compare(copy, mesh["tensor"])
        for module in copy.model.modules():
            if type(module).__name__ in copy.model._no_split_modules:
                fully_shard(module, mesh=over)
        fully_shard(copy, mesh=over)  # the rest: embedding, last norm and head
    if reference is not None:
        reference.score = policy.score  # also where it is the policy without adapter


# Tensor parallelism ---------------------------------------------------------------------------------------------------


def _split_and_compare(policy: Policy, mesh: DeviceMesh) -> None:
    """Split the model, and check that it still computes the same: a plan of transformers can be incomplete."""
    ids = torch.arange(9)[None]  # (1, 9)
    action_mask = torch.ones_like(ids[:, 1:])
    what, name = f"--tensor-parallel {mesh.size()}", policy.model.config.architectures[0]
    with torch.no_grad():
        whole = policy(ids, action_mask).log_probs
        split_model(policy, mesh)
        try:
            split = policy.to(mesh.device_type)(ids.to(mesh.device_type), action_mask.to(mesh.device_type)).log_probs
            difference = (split.cpu() - whole).abs().max().item()
        except RuntimeError as error:  # shapes that are no longer those that a layer expects
            raise UserError(f"{what}: {name} does not run when it is split ({error})") from error
    if not difference <= (1e-3 if policy.compute_dtype == torch.float32 else 0.5):
        raise UserError(f"{what}: {name} computes other log-probs when it is split, by {difference:.2g} nats")


def split_model(policy: Policy, mesh: DeviceMesh) -> None:
    """Give this rank its part of every layer, of the embedding and of the LM head."""
    model = policy.model.get_base_model() if hasattr(policy.model, "peft_config") else policy.model
    plan, embedding, head = _plan_of(model, mesh.size()), model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    for name, module in list(model.get_decoder().named_modules()):
        if (style := plan.get(re.sub(r"\.\d+\.", ".*.", name))) is None:
            continue
        parts = [module]
        if hasattr(module, "lora_A"):  # W x + B A x: the columns of B are divided like W's, or the rows of A
            parts = [module.base_layer, *(module.lora_B if style == "colwise" else module.lora_A).values()]
        for part in parts:
            if isinstance(part, nn.Linear):
                part.__class__ = nn.Linear  # fast/matmul.py knows no divided weights
            parallelize_module(part, mesh, STYLES[style]())
    head.__class__ = nn.Linear
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))  # 0 for ids of other ranks, added
    parallelize_module(head, mesh, ColwiseParallel(output_layouts=Shard(-1)))  # (n, V/W)
    if is_tied:
        head.weight = embedding.weight
    group = mesh.get_group()
    policy.score = partial(score_split_logits, group=group)
    # The sampler calls the complete model, for the logits after the last token
    policy.model.register_forward_pre_hook(partial(check_same_ids, group=group), with_kwargs=True)
    policy.model.register_forward_hook(partial(gather_logits, group=group))


def _plan_of(model: nn.Module, size: int) -> dict[str, str]:
    """The style of each kind of layer, by name, from transformers; UserError if the model cannot be split."""
    config, what = model.config.get_text_config(), f"--tensor-parallel {size}"
    plan, embedding = dict(config.base_model_tp_plan or {}), model.get_input_embeddings()
    plan.pop("embed_tokens", None)  # some versions name it if it is tied; `split_model` divides every embedding
    others = sorted({*plan.values()} - STYLES.keys())
    if not plan or others or type(embedding) is not nn.Embedding:
        why = f"with layers of the kind {others[0]}" if others else "without a plan, or with its own kind of embedding"
        raise UserError(
            f"{what}: transformers describes {type(model).__name__} {why}: use a model such as Llama, Mistral, Qwen2, "
            "Qwen3 or SmolLM3, or --tensor-parallel 1"
        )
    counts = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "units of a feed-forward layer": config.intermediate_size,
        "ids of the vocabulary": len(embedding.weight),
    }
    for name, count in counts.items():
        if count % size:
            fitting = [n for n in range(2, size + 1) if not any(number % n for number in counts.values())]
            remedy = f"use {' or '.join(map(str, [1, *fitting]))}"
            raise UserError(f"{what}: the {count} {name} of the model cannot be divided by {size}: {remedy}")
    return plan


# Sampling -------------------------------------------------------------------------------------------------------------


def sampler_of(config: ConfigT, run: Run) -> Sampler:
    """`common.sampling.sample`, or the same by the vLLM server at `--engine`, which gets the weights one by one."""
    if config.engine is None:
        return sample
    with together():
        engine = Engine(config.engine, folder := run.directory / "engine")
    if is_main():
        run.contexts.callback(shutil.rmtree, folder, ignore_errors=True)  # as large as the model
    run.contexts.enter_context(closing(engine))
    size = world_size() // data_size()

    def ask(policy: Policy, prompts: list[list[int]], group_size: int, **settings) -> list[Trajectory]:
        """Only the first rank of a tensor group asks: two answers to the same request could differ."""
        rows = {} if rank() % size == 0 else {"rows": range(0)}
        return gather_all(engine.sample(policy, prompts, group_size, **settings | rows))[rank() - rank() % size]

    return ask


# Checkpoints ----------------------------------------------------------------------------------------------------------


class DistributedCheckpoint:
    """The trained weights and the optimizer's state; each rank writes its part, and any other mesh reads them."""

    def __init__(self, policy: Policy, optimizer: torch.optim.Optimizer):
        self.of, self.options = (policy, optimizer), StateDictOptions(ignore_frozen_params=True, strict=False)

    def save_state(self, path: str) -> None:
        weights, state = get_state_dict(*self.of, options=self.options)
        dcp.save({"weights": weights, "optimizer": state}, checkpoint_id=path)

    def load_state(self, path: str) -> None:
        weights, state = get_state_dict(*self.of, options=self.options)  # read in place
        dcp.load({"weights": weights, "optimizer": state}, checkpoint_id=path)
        set_state_dict(*self.of, model_state_dict=weights, optim_state_dict=state, options=self.options)
