"""Checks of `advantages`: returns of groups in, advantages out."""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from doctor.adapters import arguments
from doctor.findings import NOT_EXAMINED, NOTE, OK, TRAP, Finding, UnusableError, compare, number
from doctor.formulas import group_advantages
from doctor.guard import call

NAME = "advantages"
SMALL = 0.01  # beside advantages of about 1; a standard deviation plus 1e-4 leaves 0.001
RETURNS = ((1.0, 0.0, 0.0, 0.5), (0.1, 1.0, 0.7, 1.0), (2.0, 5.0, 3.0, 4.0))  # Q = 3 groups, G = 4
DIVISORS = {
    "G-1": "GRPO's: divided by the group's standard deviation, with G - 1 (as torch.std has it)",
    "G": "GRPO's: divided by the group's standard deviation, with G (as numpy.std has it), "
    "which makes them 15 % larger than G - 1 does when G = 4",
    "none": "Dr. GRPO's: not divided by a standard deviation",
    "leave-one-out": "RLOO's: each return minus the mean of the others",
}


def check_advantages(module: ModuleType, path: Path) -> list[Finding]:
    """All checks of the user's `advantages`."""
    advantages = _adapted(module, path)
    returns = torch.tensor(RETURNS)
    result = advantages(returns)
    own = _own_group(advantages, returns, result)
    if own.status == TRAP:
        sentence = "Not examined before another trap is gone: std_wrong_axis."
        others = ("baseline", "advantage_sign", "divisor", "equal_rewards_noise")
        return [own, *(Finding(check, NAME, NOT_EXAMINED, sentence) for check in others)]
    return [own, _centered(result), _sign(result), _divisor(result), _equal_rewards(advantages)]


def _adapted(module: ModuleType, path: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """The user's function as one from returns (Q, G) to advantages (Q, G), by the names of its parameters."""
    function = module.advantages
    names = list(inspect.signature(function).parameters)

    def examined(returns: torch.Tensor) -> torch.Tensor:
        num_groups, size = returns.shape
        if "token_level_rewards" in names:  # verl: the reward is at the last token of a response
            mask = torch.ones(returns.numel(), 3, dtype=torch.long)
            mask[1::2, 2] = 0
            rewards = torch.zeros(mask.shape)
            rewards[torch.arange(len(mask)), mask.sum(dim=1) - 1] = returns.flatten()
            index = torch.arange(num_groups).repeat_interleave(size).numpy()
            values = {"token_level_rewards": rewards, "response_mask": mask, "index": index}
        elif "num_generations" in names:  # TRL: the rewards of all groups in one row
            values = {names[0]: returns.flatten(), "num_generations": size}
        else:
            values = {"returns": returns.clone()}
        in_order, by_name = arguments(function, NAME, values, len(values) if len(values) == 3 else 1)
        result = call(NAME, path, function, *in_order, **by_name)
        result = result[0] if isinstance(result, tuple) else result
        result = torch.from_numpy(result) if isinstance(result, np.ndarray) else result
        if isinstance(result, torch.Tensor) and len(values) == 3 and result.dim() == 2:
            result = result[:, 0]
        shape = (num_groups, size) if "returns" in values else (num_groups * size,)
        if not isinstance(result, torch.Tensor) or result.shape != shape:
            shown = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise UnusableError(f"advantages must return a tensor of shape {shape}, not {shown}")
        if not result.isfinite().all():
            raise UnusableError("advantages returned a number that is not finite")
        return result.detach().double().reshape(num_groups, size)

    return examined


def _own_group(advantages: Callable, returns: torch.Tensor, result: torch.Tensor) -> Finding:
    changed = returns.clone()
    changed[2] = torch.tensor([20.0, -50.0, 3.0, 7.0])
    got = advantages(changed)
    at = int((got[:2] - result[:2]).abs().argmax())
    expected, found = float(result[:2].flatten()[at]), float(got[:2].flatten()[at])
    trap = (
        "Other returns in one group change another's advantages: mean or standard deviation are over the wrong axis. "
        "(Is it for one group at a time? Then hand over torch.stack([yours(group) for group in returns]).)"
    )
    ok = "A group's advantages depend on its own returns only."
    return compare("std_wrong_axis", NAME, expected, found, trap, ok)


def _centered(result: torch.Tensor) -> Finding:
    worst = float(result.sum(dim=1)[result.sum(dim=1).abs().argmax()])
    trap = "The advantages of a group do not add up to 0: its mean is no baseline."
    got = worst if abs(worst) > 1e-4 else 0.0
    return compare("baseline", NAME, 0.0, got, trap, "The advantages of a group add up to 0.")


def _sign(result: torch.Tensor) -> Finding:
    expected = group_advantages(list(RETURNS[0]), "none")[0]
    got = float(result[0, 0])
    if expected * got > 0:
        return Finding("advantage_sign", NAME, OK, "The best return of a group has a positive advantage.")
    return Finding("advantage_sign", NAME, TRAP, "The best return of a group has no positive advantage.", expected, got)


def _divisor(result: torch.Tensor) -> Finding:
    """Which known advantages these are, by all groups."""
    for divisor, name in DIVISORS.items():
        expected = torch.tensor([group_advantages(list(group), divisor) for group in RETURNS], dtype=torch.float64)
        if torch.allclose(result, expected, rtol=5e-3, atol=1e-4):
            return Finding("divisor", NAME, NOTE, f"The advantages are {name}.")
    expected = group_advantages(list(RETURNS[0]), "G-1")[0]
    sentence = "The advantages are none that the doctor knows; beside them is GRPO's for the first return of a group."
    return Finding("divisor", NAME, NOTE, sentence, expected, float(result[0, 0]))


def _equal_rewards(advantages: Callable) -> Finding:
    """Groups of equal returns, whose mean in float32 is another number, and of returns equal but for rounding."""
    cases = {f"Equal returns of {number(value)}": [value] * 12 for value in (0.7, 0.1, 1.01, 0.9)}
    rounded = float(3 * torch.tensor(0.3))  # 0.9 but for rounding, as a weighted sum of rewards may give it
    cases["Returns of 0.9, equal but for rounding in float32,"] = [rounded] + [0.9] * 11
    found = {}
    for size in (6, 7, 12):
        for name, group in cases.items():
            largest = float(advantages(torch.tensor([group[:size]] * 2)).abs().max())
            found[name] = max(largest, found.get(name, 0.0))
    worst = max(found.values())
    if worst <= SMALL:
        more = "" if worst == 0 else f", but for at most {number(worst)}"
        return Finding("equal_rewards_noise", NAME, OK, f"Equal returns have advantages of 0{more}.", 0.0, worst)
    name, worst = next((name, largest) for name, largest in found.items() if largest > SMALL)
    sentence = f"{name} have advantages that are not 0: rounding, divided by a tiny standard deviation."
    return Finding("equal_rewards_noise", NAME, TRAP, sentence, 0.0, worst)
