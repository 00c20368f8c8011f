"""The learning rate of each step, as --lr-schedule and --lr-warmup-steps say."""

import math

import torch


class LearningRate:
    """Follows a schedule that depends on the step alone: a resumed run has nothing to restore.

    `before`: the number of steps that a resumed run had until now.
    """

    def __init__(self, kind: str, warmup: int, before: int | None):
        self._kind, self._warmup, self._before = kind, warmup, before
        self._optimizer: torch.optim.Optimizer | None = None
        self._peaks: list[float] = []  # of its groups

    def guide(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over an optimizer, whose rates are the peaks."""
        self._optimizer, self._peaks = optimizer, [group["lr"] for group in optimizer.param_groups]

    def set(self, step: int, num_steps: int) -> None:
        if self._is_scheduled:
            factor = learning_rate_factor(self._kind, self._warmup, step, num_steps)
            for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
                group["lr"] = factor * peak

    def metrics(self) -> dict[str, float]:
        """The rate of this step, if it follows a schedule."""
        return {"lr": self._optimizer.param_groups[0]["lr"]} if self._is_scheduled else {}

    def describe_change(self, step: int, num_steps: int) -> str | None:
        """How another --steps moves the rate of a resumed run at `step`, its next one; None if it does not."""
        before = self._before
        if not before or not self._is_scheduled or not step <= num_steps != before:
            return None
        new = self._peaks[0] * learning_rate_factor(self._kind, self._warmup, step, num_steps)
        old = self._peaks[0] * learning_rate_factor(self._kind, self._warmup, min(step, before), before)
        if new == old:
            return None
        return (
            f"--lr-schedule {self._kind} falls until the last step, now {num_steps} instead of {before}: the learning "
            f"rate of step {step} is {new:.3g} "
            + (f"instead of {old:.3g}" if step <= before else f"and that of step {before} was {old:.3g}")
        )

    @property
    def _is_scheduled(self) -> bool:
        return self._kind != "constant" or self._warmup > 0


def learning_rate_factor(kind: str, warmup: int, step: int, num_steps: int) -> float:
    """The learning rate of a step, as a share of --lr: up in `warmup` steps, then as `kind` says.

    >>> [learning_rate_factor("linear", 2, step, 6) for step in range(1, 7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> [round(learning_rate_factor("cosine", 0, step, 4), 2) for step in range(1, 5)]
    [1.0, 0.85, 0.5, 0.15]
    """
    if step <= warmup:
        return step / warmup
    progress = (step - 1 - warmup) / (num_steps - warmup)
    return {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[kind]
