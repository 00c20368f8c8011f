"""LoRA adapters: a new one, one that an earlier run trained, and the reference for a run that trains one."""

import json
import warnings
from pathlib import Path

import torch

from common.errors import UserError
from common.policy import Policy, PolicyOutput

from harness.base.config import ADAPTER_SETTINGS
from harness.models.pretrained import check_finite

# Fields of adapter_config.json that describe what the adapter computes, and are kept
KEPT = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
)
# Fields that describe how it was made; dropout is off here. Any other setting makes it differ from W x + B A x
IGNORED = (
    *("auto_mapping", "peft_version", "base_model_name_or_path", "inference_mode", "lora_dropout", "runtime_config"),
    *("eva_config", "megatron_core", "qalora_group_size"),
)
ALLOWED = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "revision": (None, "main"),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # others also change the base
}


def is_lora(policy: Policy) -> bool:
    return getattr(policy.model, "peft_config", None) is not None


def add_adapter(
    model: torch.nn.Module, rank: int, alpha: float | None = None, seed: int = 0, targets: tuple[str, ...] = ()
) -> torch.nn.Module:
    """LoRA (arXiv 2106.09685) on linear layers: W x becomes W x + (alpha / rank) B A x, and B = 0 at first.

    `targets` are the last parts of their names; without any, all layers but the head get an adapter.
    """
    alpha = 2 * rank if alpha is None else alpha
    known = {name.rpartition(".")[2] for name in linear_layers(model)}
    if unknown := sorted({*targets} - known):
        raise UserError(f"--lora-targets {unknown[0]}: the linear layers of this model are {', '.join(sorted(known))}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # A is random
        return _inject(model, r=rank, lora_alpha=alpha, target_modules=list(targets) or "all-linear")


def linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The linear layers by their full names, without the head."""
    head, modules = model.get_output_embeddings(), dict(model.named_modules())
    linear = {name for name, x in modules.items() if isinstance(x, torch.nn.Linear) or type(x).__name__ == "Conv1D"}
    return {name: modules[name] for name in modules if name in linear and modules[name] is not head}


def load_adapter(model: torch.nn.Module, path: Path) -> torch.nn.Module:
    """Put the adapter from the directory `path` on its base, ready for further training, in float32."""
    from peft import set_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer
    from safetensors.torch import load_file

    settings = _read_settings(path)
    try:
        weights = load_file(path / "adapter_model.safetensors")
        with torch.random.fork_rng():  # the random values are replaced
            model = _inject(model, **settings)
        loaded = set_peft_model_state_dict(model, weights)
    except Exception as error:  # a damaged file can raise anything
        reason = " ".join(str(error).split())
        raise UserError(f"the adapter {path} cannot be put on its base {model.name_or_path}: {reason}") from error
    missing = [name for name in loaded.missing_keys if "lora_" in name]  # B would silently stay 0
    for names, fault in ((missing, "lacks weights that"), (loaded.unexpected_keys, "has other weights than")):
        if names:
            raise UserError(
                f"the adapter {path} {fault} its {ADAPTER_SETTINGS} describes for the base {model.name_or_path}: "
                f"{names[0]} for one"
            )
    check_finite(f"the adapter {path}", weights.items())
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if model.config.tie_word_embeddings and any(isinstance(module, BaseTunerLayer) for module in ends):
        raise UserError(f"the adapter {path} adapts one of the embeddings and the LM head, which share their weights")
    return model


def _inject(model: torch.nn.Module, **settings) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(task_type="CAUSAL_LM", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5.2x renames gradient checkpointing
        return get_peft_model(model, settings)


def _read_settings(path: Path) -> dict:
    """The computation that adapter_config.json describes; UserError if this code cannot do all of it."""
    try:
        fields = json.loads((path / ADAPTER_SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path / ADAPTER_SETTINGS} cannot be read ({error})") from error
    for name, value in fields.items():
        is_off = name in KEPT or name in IGNORED or value in (None, False, {}, [])
        if not (value in ALLOWED[name] if name in ALLOWED else is_off):
            raise UserError(
                f"the adapter {path} has {name}={json.dumps(value)} in its {ADAPTER_SETTINGS}: only plain LoRA "
                "adapters of a language model can be trained on here"
            )
    return {name: fields[name] for name in KEPT if name in fields}


class AdapterReference(Policy):
    """The reference of a policy with a LoRA adapter: the same model with the adapter as it was before this run.

    A new adapter is switched off, which needs no memory; an adapter from an earlier run is copied.
    """

    def __init__(self, policy: Policy):
        self.take_over(policy)
        self._of = (policy,)  # not as a module: that would register the same weights twice
        is_new = not any(weight.any() for name, weight in policy.named_parameters() if "_B." in name)  # B = 0
        self._weights = [weight for weight in self.model.parameters() if weight.requires_grad and not is_new]
        self._copies = [weight.detach().clone() for weight in self._weights]

    @property
    def trained(self) -> Policy:
        return self._of[0]

    @property
    def device(self) -> torch.device:
        return self.trained.device  # the weights are on another device if they are offloaded

    def forward(self, *arguments, **options) -> PolicyOutput:
        if not self._weights:
            with self.model.disable_adapter():
                return super().forward(*arguments, **options)
        with torch.no_grad():  # autograd would not notice the exchange
            self._exchange()
            try:
                return super().forward(*arguments, **options)
            finally:
                self._exchange()

    def _exchange(self) -> None:
        if not any(weight is self._weights[0] for weight in self.model.parameters()):
            raise UserError(
                "the reference of an adapter that is trained further is not available where weights are sharded: use "
                "--kl-weight 0, or a configuration without sharding"
            )
        for index, weight in enumerate(self._weights):
            weight.data, self._copies[index] = self._copies[index], weight.data
