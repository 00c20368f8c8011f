"""The weights of a task's reward components: its own, with those of the experiment and of `--reward-weight`."""

from types import ModuleType

from common.errors import UserError

from common.plumbing.checks import is_finite, is_text, parse_numbers
from common.plumbing.terminal import printable


def reward_weights(
    name: str, module: ModuleType, given: tuple[str, ...], more_weights: dict[str, float]
) -> tuple[tuple[str, ...], dict[str, float]]:
    """The components that the task itself gives, and the weights of all.

    Args:
        name: what the user calls the task.
        given: NAME=NUMBER, as in `--reward-weight`.
        more_weights: of components that the experiment gives.

    Raises:
        UserError: naming the component.
    """
    own = getattr(module, "REWARD_WEIGHTS", None)
    if not isinstance(own, dict) or not own or not all(is_text(k) and is_finite(v) for k, v in own.items()):
        raise UserError(f"{name}: REWARD_WEIGHTS must be a dict of a number for each component, not {short(own)}")
    if "total" in own:
        raise UserError(f"{name}: no component can be called 'total', which is their weighted sum")
    if taken := own.keys() & more_weights.keys():
        raise UserError(f"{name}: the experiment itself rewards {min(taken)!r}: give the task's component another name")
    weights = {component: float(weight) for component, weight in (own | more_weights).items()}
    for component, weight in parse_numbers("--reward-weight", given).items():
        if component not in weights:
            raise UserError(f"--reward-weight {component}: {name} has the components {', '.join(weights)}")
        weights[component] = weight
    if not any(weights.values()):
        raise UserError(f"{name}: the weights of all components are 0, so that nothing would be learned")
    return tuple(own), weights


def short(value: object) -> str:
    """A value that a user's code has given, for an error message."""
    try:
        return printable(repr(value), 80)
    except Exception:  # of the value's own class
        return f"a {type(value).__name__}"
