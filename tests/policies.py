"""Small policies, and log-probs computed in two ways, for the tests of models and of engines."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from common.experience import collate
from common.logprobs import token_log_probs
from common.policy import Policy
from common.trajectory import Trajectory

from harness.base.config import RunConfig
from harness.models.loading import load_policy


def load(model: Path | str = "tiny", **settings) -> Policy:
    fixed = {"device": "cpu", "dtype": "float32", "attn_implementation": "sdpa"}
    return load_policy(RunConfig(model=str(model), **fixed | settings))


def read_plain(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")


@torch.no_grad()
def fill_adapters(policy: Policy) -> Policy:
    """Give B, which starts at 0, random weights: otherwise the policy equals its base, and A has no gradient."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in policy.named_parameters():
        if "lora_" in name and not weight.any():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
    return policy


def random_rows(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences (3, 24) and a mask (3, 23) with holes."""
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(0, vocabulary, (3, 24), generator=generator)
    return sequences, (torch.rand(3, 23, generator=generator) < 0.7).long()


@torch.no_grad()
def log_probs_of(policy: Policy) -> torch.Tensor:
    return policy(*random_rows(policy.model.config.vocab_size)).log_probs


@torch.no_grad()
def plain_log_probs(model: torch.nn.Module) -> torch.Tensor:
    """The same log-probs, computed directly by a Hugging Face or peft model."""
    sequences, mask = random_rows(model.config.vocab_size)
    log_probs = model.eval()(input_ids=sequences).logits[:, :-1].float().log_softmax(dim=-1)
    return log_probs.gather(-1, sequences[:, 1:, None])[..., 0] * mask


def gap(policy: Policy, rows: list[Trajectory]) -> float:
    """The largest difference between recorded log-probs and training's, in nats."""
    experience = collate(rows, policy.pad_id)
    return (token_log_probs(policy, experience, 64) - experience.sampler_log_probs).abs().max().item()


@torch.no_grad()
def scale(policy: Policy, factor: float = 1.2) -> None:
    for weight in policy.parameters():
        weight.mul_(factor)
