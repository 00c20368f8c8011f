"""What a loss does to every token, measured: its value, and its gradient by each log-prob."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from doctor.adapters import LossFunction
from doctor.batches import Batch, make_batch
from doctor.findings import UnusableError, number
from doctor.guard import TooSlowError, call

MASK_DTYPES = (torch.float32, torch.bool, torch.long)


@dataclass
class Shape:
    """What is known of the surrogate and of the KL penalty, for the check of the whole loss."""

    low: float | None = None  # the clip range
    high: float | None = None
    kl: str = ""  # a key of KL_SLOPES
    kl_weight: float = 0.0


class Probe:
    """Calls the user's `policy_loss`. `check` is the name of the check that does so, for errors."""

    def __init__(self, loss: LossFunction, path: Path):
        self.loss, self.path, self.check = loss, path, ""
        self.leaks = False  # whether tokens outside the mask are known to have a gradient
        self.terms: torch.Tensor | None = None  # those of the last call; None: the function returns none

    def __call__(self, batch: Batch, may_be_nan: bool = False) -> tuple[float, torch.Tensor]:
        """The loss, and its gradient (B, W) by the log-probs, 0 in columns that the function does not get.

        Raises:
            UnusableError: the function raised, or did not return one finite number with a gradient.
        """
        leaf = batch.log_probs.clone().requires_grad_()
        what = f"policy_loss (in the check {self.check})" if self.check else "policy_loss"
        # as in training no leaf, so that it can be changed
        value, self.terms = call(what, self.path, self.loss, batch, leaf * 1)
        if not isinstance(value, torch.Tensor):
            raise UnusableError(f"{what} returned a {type(value).__name__} instead of a tensor with a gradient")
        if value.numel() != 1:
            raise UnusableError(f"{what} returned a tensor of shape {tuple(value.shape)}, not one number")
        if not value.requires_grad:  # under torch.no_grad, or everything is detached
            return float(value), torch.zeros_like(leaf)
        (gradient,) = call(what, self.path, torch.autograd.grad, value.sum(), leaf, allow_unused=True)
        gradient = torch.zeros_like(leaf) if gradient is None else gradient
        value = value.detach()
        if not may_be_nan and not (math.isfinite(value) and gradient.isfinite().all()):
            raise UnusableError(f"{what} returned {number(float(value))} with a gradient that is not finite everywhere")
        return float(value), gradient

    def prepare(self) -> None:
        """Find the types that the function works with, and that it does not depend on chance.

        Masks: `x[mask]` and `~mask` want booleans and are silently wrong on integers; `1 - mask` cannot take booleans.
        The first type that does not raise is right in all three cases. Advantages: those of a wrong shape raise, or are
        silently broadcast over the rows.
        """
        batch = make_batch()
        dtypes = MASK_DTYPES if self.loss.adapter == "native" else (torch.long,)
        kinds = [(form, dtype) for form in self.loss.forms_of_advantages for dtype in dtypes]
        working, errors = [], []
        for form, dtype in kinds:
            if form in (each for each, _ in working):
                continue
            self.loss.advantages_form, self.loss.mask_dtype = form, dtype
            try:
                first = self(batch)
                working.append((form, dtype))
                if self._rows_are_apart(batch, first[1]):
                    break
            except TooSlowError:
                raise
            except UnusableError as error:
                errors.append(error)
        else:  # a loss that mixes rows whatever it is given
            if not working:
                raise errors[0]
            self.loss.advantages_form, self.loss.mask_dtype = working[0]
            first = self(batch)
        second = self(batch)
        if first[0] != second[0] or not torch.equal(first[1], second[1]):
            raise UnusableError(
                f"policy_loss depends on chance: two calls with the same inputs returned {number(first[0])} and "
                f"{number(second[0])}, so that no number can be compared"
            )

    def _rows_are_apart(self, batch: Batch, gradient: torch.Tensor) -> bool:
        """Whether the advantage of one row changes the gradient of no other row."""
        changed = batch.advantages.clone()
        changed[0] *= 2
        _, after = self(replace(batch, advantages=changed))
        return torch.allclose(after[1:], gradient[1:], rtol=1e-4, atol=1e-8)

    def weights(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """How much each token counts: minus the gradient by its log-prob, per unit of its row's advantage.

        Measured at a ratio of 1 and a KL of 0, with advantages of both signs, so that what does not depend on them
        drops out; that is the second result. (B, W) each.
        """
        batch = batch.on_policy()
        _, plus = self(batch)
        _, minus = self(replace(batch, advantages=-batch.advantages))
        return -(plus - minus) / (2 * batch.advantages[:, None]), (plus + minus) / 2
