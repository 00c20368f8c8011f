"""The user's `policy_loss` as a function of a batch: its arguments, and its effect on every token."""

import inspect
import math
import re
from dataclasses import replace
from typing import Any

import torch

from doctor.batches import TOOL, Batch, make_batch
from doctor.findings import UnusableError, number
from doctor.user_file import UserFile, parameters_of

TENSORS = ("log_probs", "old_log_probs", "log_probs_ref", "advantages", "mask")  # in the order of docs/loss_template.py
OF_THE_MINIBATCH = ("num_rows", "num_tokens", "num_parts")
SETTINGS = ("clip_eps", "clip_low", "clip_high", "kl_weight", "max_new_tokens", *OF_THE_MINIBATCH, "prompt_length")
OTHER_NAMES = {
    "advantages": "advantage adv advs",
    "mask": "completion_mask response_mask action_mask loss_mask token_mask eos_mask masks",
    "kl_weight": "beta kl_loss_coef kl_coef kl_coeff kl_beta",
    "clip_eps": "epsilon cliprange clip_range clip_ratio clip_epsilon eps_clip",
    "clip_low": "epsilon_low cliprange_low clip_eps_low clip_ratio_low eps_low",
    "clip_high": "epsilon_high cliprange_high clip_eps_high clip_ratio_high eps_high",
    "max_new_tokens": "max_completion_length",
    "num_tokens": "num_items_in_batch",
    "num_parts": "gradient_accumulation_steps current_gradient_accumulation_steps",
}
ALIASES = {alias: name for name, aliases in OTHER_NAMES.items() for alias in aliases.split()}
OLD = "old|sampler|sampling|rollout|vllm|behavior|behaviour"  # all one policy in the doctor's batches: the sampler
LOG_PROBS = re.compile(
    rf"((?P<before>{OLD}|ref|reference|new|cur|current|policy|pi)_)?((per_)?token_)?log_?p(rob)?s?(_(?P<after>old|ref|new))?"
)
FORMS_OF_ADVANTAGES = ("tokens", "column", "rows")  # (B, W), (B, 1), (B,)
MASK_DTYPES = (torch.float32, torch.bool, torch.long)


def meaning(name: str) -> str:
    """The tensor or setting that a parameter of this name gets, else the name itself.

    >>> meaning("old_per_token_logps"), meaning("logprobs_ref"), meaning("new_logp"), meaning("x")
    ('old_log_probs', 'log_probs_ref', 'log_probs', 'x')
    """
    match = LOG_PROBS.fullmatch(name)
    if not match or (match["before"] and match["after"]):
        return ALIASES.get(name, name)
    policy = match["before"] or match["after"] or "new"
    if policy.startswith("ref"):
        return "log_probs_ref"
    return "old_log_probs" if policy in OLD.split("|") else "log_probs"


class Loss:
    """Calls the user's `policy_loss`. `check` is the name of the current check, for errors."""

    def __init__(self, file: UserFile):
        function = file.module.policy_loss
        if inspect.isclass(function):
            how = "give an object of it, as in policy_loss = MyLoss(clip_eps=0.2), or a function that calls it"
            raise UnusableError(f"policy_loss is a class: {how}, as docs/loss_trl.py does for TRL's trainer")
        function = function.forward if isinstance(function, torch.nn.Module) else function
        forms, dtypes = FORMS_OF_ADVANTAGES, MASK_DTYPES
        if list(parameters_of(function))[:3] == ["config", "log_probs", "micro"]:
            from doctor.textbook import textbook_loss

            function, forms, dtypes = textbook_loss(file.module), ("column",), (torch.long,)
        self.file, self.function, self.check = file, function, ""
        self.parameters = parameters_of(function)
        if not self.parameters:
            raise UnusableError("policy_loss has no parameters with names; docs/loss_template.py shows them")
        self.settings = {meaning(name): value for name, value in file.settings.items()}  # by our names
        self.meanings = {name: meaning(name) for name in self.parameters} | self._in_order()
        self.knows = {*self.meanings.values()}  # the tensors and settings that it receives
        self.changed: set[str] = set()  # inputs that a call has modified
        self.leaks = False  # whether tokens outside the mask are known to have a gradient
        self.terms: torch.Tensor | None = None  # the terms of the last call; None: the function returns none
        self._find_types(forms, dtypes)

    @property
    def clip_range(self) -> tuple[float, float] | None:
        """How far below and above 1 the ratio may go, if the function receives the range."""
        names = ("clip_low", "clip_high")
        names = ("clip_eps",) * 2 if "clip_eps" in self.knows and not self.knows & {*names} else names
        low, high = (self.settings.get(name, getattr(Batch, name)) for name in names)
        return (low, high) if self.knows >= {*names} else None

    def __call__(self, batch: Batch, may_be_nan: bool = False) -> tuple[float, torch.Tensor]:
        """The loss, and its gradient (B, W) by the log-probs."""
        leaf = batch.log_probs.clone().requires_grad_()
        what = f"policy_loss (in the check {self.check})" if self.check else "policy_loss"
        values = self._values(batch, leaf * 1)  # not a leaf, as in training, so that it can be modified
        before = {name: x.detach().clone() for name, x in values.items() if isinstance(x, torch.Tensor)}
        arguments = {name: values[each] for name, each in self.meanings.items() if each in values}
        result = self.file.call(what, self.function, **(arguments | self.file.settings))
        self.changed |= {name for name, x in before.items() if not torch.equal(x, values[name].detach().to(x.dtype))}
        result = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(result, dict):  # a number is the loss, a matrix its terms
            result = {"terms" if getattr(result, "shape", None) == leaf.shape else "loss": result}
        value, self.terms = result.get("loss"), result.get("terms")
        value = self.terms.sum() if value is None and self.terms is not None else value
        if not isinstance(value, torch.Tensor):
            raise UnusableError(f"{what} returned a {type(value).__name__} instead of a tensor with a gradient")
        if value.numel() != 1:
            raise UnusableError(f"{what} returned a tensor of shape {tuple(value.shape)}, not one number")
        gradient = None
        if value.requires_grad:  # false under torch.no_grad, or if everything is detached
            (gradient,) = self.file.call(what, torch.autograd.grad, value.sum(), leaf, allow_unused=True)
        gradient, value = torch.zeros_like(leaf) if gradient is None else gradient, float(value.detach())
        if not may_be_nan and not (math.isfinite(value) and gradient.isfinite().all()):
            raise UnusableError(f"{what} returned {number(value)} with a gradient that is not finite everywhere")
        return value, gradient

    def weights(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight of each token: minus the gradient by its log-prob, per unit of its row's advantage.

        Measured at a ratio of 1 and a KL of 0, with advantages of both signs, so that everything independent of the
        advantages drops out; that remainder is the second result. (B, W) each.
        """
        batch = batch.on_policy()
        _, plus = self(batch)
        _, minus = self(replace(batch, advantages=-batch.advantages))
        return -(plus - minus) / (2 * batch.advantages[:, None]), (plus + minus) / 2

    def _values(self, batch: Batch, log_probs: torch.Tensor) -> dict[str, Any]:
        """The possible arguments, by name; the tensors are fresh copies."""
        mask, advantages = batch.mask.to(self.mask_dtype), batch.advantages.clone()
        if self.form != "rows":
            advantages = advantages[:, None].repeat(1, mask.shape[1] if self.form == "tokens" else 1)
        values = {name: getattr(batch, name) for name in SETTINGS}
        values |= {"log_probs": log_probs, "advantages": advantages, "mask": mask}
        values["old_log_probs"] = None if batch.old_log_probs is None else batch.old_log_probs.clone()
        values["log_probs_ref"] = batch.log_probs_ref.clone()
        if "tool_mask" in self.parameters:  # as in TRL, the mask includes tool output, and this one is 0 there
            is_tool = batch.kinds == TOOL
            values |= {"mask": mask + is_tool.to(mask.dtype), "tool_mask": (~is_tool).to(mask.dtype)}
        return values

    def _in_order(self) -> dict[str, str]:
        """Map the first five parameters to our tensors in order, if the user has other names for them."""
        known = {*TENSORS, *SETTINGS, *self.file.settings, "tool_mask"}
        required = [name for name, each in self.parameters.items() if each.default is each.empty]
        unknown = [name for name in required if meaning(name) not in known]
        first = dict(zip(required, TENSORS, strict=False))
        in_order = all(name in unknown or meaning(name) == tensor for name, tensor in first.items())
        if len(first) == len(TENSORS) and {*unknown} <= {*first} and in_order:
            return first
        if not unknown:
            return {}
        if {"logits", "model", "input_ids"} & {*required}:
            why = ", but the doctor has no model: let it take log-probs, and put what computes them into log_probs"
        else:
            why = f" that the doctor does not know: it passes {', '.join(TENSORS)} in this order or by name, and "
            why += f"{', '.join(SETTINGS)} by name; give it a default, or a value in SETTINGS"
        raise UnusableError(f"policy_loss has a parameter {unknown[0]}{why}")

    def _find_types(self, forms: tuple[str, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        """Find the types that the function accepts, and check that it is deterministic.

        Masks: `x[mask]` and `~mask` expect booleans and are silently wrong on integers; `1 - mask` does not accept
        booleans. The first type that does not raise is right in all three cases. Advantages of a wrong shape raise, or
        are silently broadcast, so that the advantage of one row changes the gradient of another.
        """
        batch = make_batch()
        changed = replace(batch, advantages=batch.advantages * torch.tensor([2.0] + [1.0] * (len(batch.kinds) - 1)))
        working, errors = [], []
        for self.form in forms:
            for self.mask_dtype in dtypes:
                try:
                    (_, before), (_, after) = self(batch), self(changed)
                except UnusableError as error:
                    errors.append(error)
                    continue
                is_mixed = not torch.allclose(after[1:], before[1:], rtol=1e-4, atol=1e-8)
                working.append((is_mixed, self.form, self.mask_dtype))
                break
            if working and not working[-1][0]:
                break
        if not working:
            raise errors[0]
        # a loss that mixes rows with every form gets the usual form
        _, self.form, self.mask_dtype = min(working, key=lambda each: each[0])
        (first, before), (second, after) = self(batch), self(batch)
        if first != second or not torch.equal(before, after):
            results = f"two calls with the same inputs returned {number(first)} and {number(second)}"
            raise UnusableError(f"policy_loss depends on chance: {results}, so that no number can be compared")
