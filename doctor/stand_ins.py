"""What stands in for the objects that losses of TRL, verl and this repository are called with."""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from doctor.batches import PROMPT_COLUMNS, Batch


class VerlConfig(Mapping):
    """The settings of verl's ActorConfig that its losses read, as attributes and as keys."""

    def __init__(self, batch: Batch, given: dict[str, Any]):
        values = {
            "clip_ratio": batch.clip_low,
            "clip_ratio_low": batch.clip_low,
            "clip_ratio_high": batch.clip_high,
            "clip_ratio_c": 3.0,
            "kl_loss_coef": batch.kl_weight,
            "kl_loss_type": "low_var_kl",
            "use_kl_loss": True,
            "tau_pos": 1.0,
            "tau_neg": 1.05,
            "policy_loss": {},
            "loss_agg_mode": given.get("loss_agg_mode", "token-mean"),
        } | given
        values["global_batch_info"] = {
            "dp_size": 1,
            "batch_num_tokens": batch.num_tokens,
            "global_batch_size": batch.num_rows,
            "loss_scale_factor": given.get("loss_scale_factor"),
        }
        self.__dict__.update(values)  # verl's own class, see below, can only be assigned to once

    def __getitem__(self, name: str) -> Any:
        return self.__dict__[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.__dict__.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__)

    def __len__(self) -> int:
        return len(self.__dict__)


def verl_config(batch: Batch, given: dict[str, Any]) -> VerlConfig:
    """Settings for a loss of verl; where the user's file has imported verl, also an instance of its ActorConfig."""
    verl = sys.modules.get("verl.workers.config")
    kind = type("ActorConfig", (VerlConfig, verl.ActorConfig), {}) if verl else VerlConfig
    policy_loss = {"policy_loss": verl.PolicyLossConfig()} if verl else {}
    return kind(batch, policy_loss | given)


class _Accelerator:
    """One process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    gather_for_metrics = gather

    def reduce(self, x: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        return x


def trl_trainer(kind: type, batch: Batch, log_probs: torch.Tensor, given: dict[str, Any]) -> Any:
    """A GRPOTrainer, or a class derived from it, without a model: its log-probs are given. As of TRL 1.16."""
    from trl import GRPOConfig

    trainer = kind.__new__(kind)
    trainer.__dict__ |= {
        "model": SimpleNamespace(training=True),
        "accelerator": _Accelerator(),
        "_metrics": {mode: defaultdict(list) for mode in ("train", "eval")},
        "current_gradient_accumulation_steps": batch.num_parts,
        "epsilon_low": batch.clip_low,
        "epsilon_high": batch.clip_high,
        "beta": batch.kl_weight,
        "max_completion_length": batch.max_new_tokens,
        "loss_type": "dapo",  # as in GRPOConfig
        "importance_sampling_level": "token",
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
    }
    defaults = {field.name: field.default for field in fields(GRPOConfig)}
    trainer.args = SimpleNamespace(**(defaults | {"steps_per_generation": batch.num_parts} | given))
    trainer.__dict__ |= given
    scores = log_probs, torch.ones_like(log_probs), None
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: scores
    return trainer


def trl_inputs(batch: Batch, values: dict[str, Any]) -> dict[str, Any]:
    """The `inputs` of TRL's `_compute_loss`."""
    prompt = torch.ones(len(batch.kinds), PROMPT_COLUMNS, dtype=torch.long)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": torch.ones_like(values["mask"], dtype=torch.long),
        "completion_mask": values["mask"],
        "tool_mask": values["tool_mask"],
        "advantages": values["advantages"],
        "ref_per_token_logps": values["log_probs_ref"],
        "num_items_in_batch": torch.tensor(batch.num_tokens),
    }
    old = values["old_log_probs"]
    return inputs if old is None else inputs | {"old_per_token_logps": old}


def textbook_arguments(module: ModuleType, given: dict[str, Any], batch: Batch, values: dict[str, Any]) -> tuple:
    """(config, log_probs, micro, num_rows) for the policy_loss of an experiment_*/train.py."""
    from common.experience import Experience

    names = ("kl_weight", "max_new_tokens")
    config = module.Config(**({name: getattr(batch, name) for name in names} | {"clip_eps": batch.clip_low} | given))
    mask = values["mask"]
    rows = torch.zeros(len(mask), dtype=torch.long)
    micro = Experience(
        sequences=torch.zeros(mask.shape[0], mask.shape[1] + 1, dtype=torch.long),
        attention_mask=torch.ones(mask.shape[0], mask.shape[1] + 1, dtype=torch.long),
        action_mask=mask,
        sampler_log_probs=torch.zeros(mask.shape),
        prompt_index=rows,
        prompt_lengths=rows,
        completion_index=rows,
        old_log_probs=values["old_log_probs"],
        log_probs_ref=values["log_probs_ref"],
        advantages=values["advantages"][:, None],
        importance_weights=torch.ones(mask.shape),  # as if the tokens were the policy's own
    )
    return config, values["log_probs"], micro, batch.num_rows
