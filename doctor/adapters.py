"""How a batch is handed to the user's loss: names and shapes of the user's own trainer, of TRL, of verl, or of ours.

native    (B, T-1) tensors, named as in docs/loss_template.py
trl       the completion's columns only, (B, C); advantages (B,); a function with TRL's names, or a GRPOTrainer
verl      the response's columns only, (B, C), advantages too; settings in a config, and a tuple returned
textbook  policy_loss(config, log_probs, micro, num_rows) of an experiment_*/train.py
"""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from doctor.batches import PROMPT_COLUMNS, TOOL, Batch
from doctor.findings import UnusableError
from doctor.names import OF_THE_MINIBATCH, SETTINGS, TENSORS, meaning
from doctor.stand_ins import textbook_arguments, trl_inputs, trl_trainer, verl_config

ADAPTERS = ("native", "trl", "verl", "textbook")


class LossFunction:
    """The user's `policy_loss`, as a function of a `Batch` and its log-probs.

    Raises:
        UnusableError: it has a parameter for which there is no value.
    """

    def __init__(self, module: ModuleType, adapter: str | None):
        function = module.policy_loss
        self.function = function.forward if isinstance(function, torch.nn.Module) else function
        self.given = dict(getattr(module, "SETTINGS", {}))
        self.settings = {meaning(name): value for name, value in self.given.items()}  # by our names
        self.is_trainer = inspect.isclass(self.function) and hasattr(self.function, "_compute_loss")
        self.names = names = [] if self.is_trainer else _parameters(self.function)
        self.takes_any_name = not self.is_trainer and _has(self.function, inspect.Parameter.VAR_KEYWORD)
        self.adapter = adapter or getattr(module, "ADAPTER", "") or self._detect(names)
        if self.adapter not in ADAPTERS:
            raise UnusableError(f"there is no adapter {self.adapter}; they are: {', '.join(ADAPTERS)}")
        if inspect.isclass(self.function) and not (self.is_trainer and self.adapter == "trl"):
            raise UnusableError(
                "policy_loss is a class: give an object of it, as in policy_loss = MyLoss(clip_eps=0.2); only TRL's "
                "trainers, with the adapter trl, are examined as classes"
            )
        if not names and not self.is_trainer:
            raise UnusableError("policy_loss has no parameters with names; docs/loss_template.py shows them")
        self.module = module
        self.mask_dtype = torch.long
        self.advantages_form = self.forms_of_advantages[0]
        self.changed: set[str] = set()  # inputs that a call has written to
        self.knows = self._knows(names)  # the tensors and settings that it is given
        self.in_order = self.adapter != "textbook" and not self.is_trainer and self._takes_tensors_in_order()

    @property
    def forms_of_advantages(self) -> tuple[str, ...]:
        """The shapes in which the function may want them, the usual one first."""
        if self.is_trainer or self.adapter == "textbook":
            return ("rows",)
        return ("rows", "column", "tokens") if self.adapter == "trl" else ("tokens", "column", "rows")

    @property
    def first_column(self) -> int:
        """Of those that the function is given: TRL and verl leave the prompt out."""
        return PROMPT_COLUMNS if self.adapter in ("trl", "verl") else 0

    @property
    def parts_add_up(self) -> bool:
        """Whether the function is told of the minibatch; otherwise a trainer takes the mean over micro-batches."""
        return bool(self.knows & OF_THE_MINIBATCH)

    @property
    def clip_range(self) -> tuple[float, float] | None:
        """How far below and above 1 the ratio may go, if the function is told."""
        low, high = (self.settings.get(name, getattr(Batch, name)) for name in ("clip_low", "clip_high"))
        if "clip_eps" in self.knows and not {"clip_low", "clip_high"} & self.knows:
            clip_eps = self.settings.get("clip_eps", low)
            return clip_eps, clip_eps
        return (low, high) if {"clip_low", "clip_high"} <= self.knows else None

    def may_be_none(self, tensor: str) -> bool:
        """Whether the function says that it can do without a tensor."""
        if self.is_trainer or self.adapter == "textbook":
            return tensor == "old_log_probs"
        for name, parameter in inspect.signature(self.function).parameters.items():
            if meaning(name) == tensor:
                return parameter.default is None or "None" in str(parameter.annotation)
        return False

    def __call__(self, batch: Batch, log_probs: torch.Tensor) -> tuple[Any, torch.Tensor | None]:
        """The loss and the terms of its tokens, of which the function may return one or both.

        Terms have the shape of the log-probs that it is given; without a loss, they add up to it. Which of its inputs
        the function writes to is noted.
        """
        values = self._values(batch, log_probs)
        inputs = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        copies = {name: value.detach().clone() for name, value in inputs.items()}
        result = self._call(batch, values)
        self.changed |= {
            name for name, copy in copies.items() if not torch.equal(copy, inputs[name].detach().to(copy.dtype))
        }
        if isinstance(result, tuple) and result:
            result = result[0]
        if not isinstance(result, dict):
            is_terms = getattr(result, "shape", None) == values["log_probs"].shape
            result = {"terms" if is_terms else "loss": result}
        loss, terms = result.get("loss"), result.get("terms")
        return (terms.sum() if loss is None and terms is not None else loss), terms

    def _call(self, batch: Batch, values: dict[str, Any]) -> Any:
        if self.adapter == "textbook":
            return self.function(*textbook_arguments(self.module, self.given, batch, values))
        if self.is_trainer:
            trainer = trl_trainer(self.function, batch, values["log_probs"], self.given)
            return trainer._compute_loss(trainer.model, trl_inputs(batch, values))
        if self.in_order:
            tensors = [values[name] for name in TENSORS]
            return self.function(*tensors, **self._keywords(values, self.names[len(TENSORS) :]))
        return self.function(**self._keywords(values, self.names))

    def _keywords(self, values: dict[str, Any], names: list[str]) -> dict[str, Any]:
        """A value for every parameter that has one; what is in SETTINGS comes first."""
        known = {name: values[meaning(name)] for name in names if meaning(name) in values}
        if self.takes_any_name:
            return known | {name: values[name] for name in SETTINGS} | self.given
        return known | {name: value for name, value in self.given.items() if name in names}

    def _values(self, batch: Batch, log_probs: torch.Tensor) -> dict[str, Any]:
        """What a parameter can be given, by name; tensors are the function's own."""

        def columns(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x[:, self.first_column :].clone()

        mask = columns(batch.mask).to(self.mask_dtype)
        advantages = batch.advantages.clone()
        if self.advantages_form != "rows":  # (B, 1), or (B, W)
            advantages = advantages[:, None].repeat(1, mask.shape[1] if self.advantages_form == "tokens" else 1)
        if self.adapter == "verl" and self.advantages_form == "tokens":  # as compute_grpo_outcome_advantage does
            advantages = advantages * mask
        values = {name: getattr(batch, name) for name in SETTINGS if hasattr(batch, name)}
        values |= {"clip_eps": batch.clip_low, "config": verl_config(batch, self.given)}
        values |= {"old_log_probs": columns(batch.old_log_probs), "log_probs_ref": columns(batch.log_probs_ref)}
        values |= {"log_probs": columns(log_probs), "advantages": advantages, "mask": mask}
        if self.is_trainer or (self.adapter == "trl" and "tool_mask" in self.names):
            values["tool_mask"] = 1 - columns(batch.kinds == TOOL).long()
            values["mask"] = mask + columns(batch.kinds == TOOL).to(mask.dtype)  # TRL's completion has tool output
        if self.adapter == "trl" and not self.is_trainer:
            values["num_tokens"] = torch.tensor(batch.num_tokens)
        return values

    def _knows(self, names: list[str]) -> set[str]:
        everything = {*TENSORS, "num_rows", "clip_eps", "kl_weight", "max_new_tokens"}
        if self.adapter == "textbook":
            return everything
        if self.is_trainer:
            return everything - {"num_rows", "clip_eps"} | {"num_tokens", "num_parts", "clip_low", "clip_high"}
        knows = {meaning(name) for name in names}
        if self.takes_any_name:
            knows |= {*SETTINGS} - {"clip_low", "clip_high"}
        if self.adapter == "verl" and "config" in names:
            knows |= {"num_rows", "num_tokens", "clip_low", "clip_high"}
        return knows

    def _takes_tensors_in_order(self) -> bool:
        """Whether the first five parameters have names of the user's own, and are the five tensors in our order."""
        parameters = inspect.signature(self.function).parameters.values()
        variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        required = [each.name for each in parameters if each.default is each.empty and each.kind not in variadic]
        known = {*TENSORS, *SETTINGS, *self.given, "config", "tool_mask"}
        unknown = [name for name in required if meaning(name) not in known]
        if not unknown:
            return False
        first = required[: len(TENSORS)]
        in_order = all(name in unknown or meaning(name) == tensor for name, tensor in zip(first, TENSORS, strict=False))
        if len(first) == len(TENSORS) and set(unknown) <= set(first) and in_order:
            self.knows |= {*TENSORS}
            return True
        if {"logits", "model", "input_ids"} & set(required):
            raise UnusableError(
                f"policy_loss has a parameter {unknown[0]}, but the doctor has no model: let it take log-probs, and "
                "put what computes them from logits into a function log_probs"
            )
        raise UnusableError(
            f"policy_loss has a parameter {unknown[0]} that the doctor does not know: it passes {', '.join(TENSORS)} "
            f"in this order or by name, and {', '.join(SETTINGS)} by name; give it a default, or a value in SETTINGS"
        )

    def _detect(self, names: list[str]) -> str:
        if names[:4] == ["config", "log_probs", "micro", "num_rows"]:
            return "textbook"
        if "response_mask" in names:
            return "verl"
        return "trl" if "completion_mask" in names or self.is_trainer else "native"


def _parameters(function: Callable) -> list[str]:
    """The names of what a function can be given.

    Raises:
        UnusableError: it is a function of C that does not say.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise UnusableError(f"the parameters of {name} are not known: wrap it in a function") from error
    return [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def _has(function: Callable, kind: Any) -> bool:
    return any(parameter.kind == kind for parameter in inspect.signature(function).parameters.values())


def arguments(function: Callable, name: str, values: dict[str, Any], num_in_order: int) -> tuple[list, dict]:
    """Arguments for a function other than `policy_loss`: the first ones in order, whatever they are called.

    Args:
        values: in their documented order.

    Raises:
        UnusableError: the function has another parameter without a default.
    """
    names = _parameters(function)
    parameters = inspect.signature(function).parameters
    rest = names[num_in_order:]
    unknown = [n for n in rest if n not in values and parameters[n].default is inspect.Parameter.empty]
    if len(names) < num_in_order or unknown:
        expected = ", ".join(values)
        raise UnusableError(f"{name} must take ({expected}), not ({', '.join(names)}); see docs/loss_template.py")
    return list(values.values())[:num_in_order], {n: values[n] for n in rest if n in values}
