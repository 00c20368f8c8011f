"""GAE as a sum over all later steps, instead of a recursion."""

import torch

from dojo.judge import Call


def case(rewards: list, values: list, mask: list, gamma: float, gae_lambda: float, about: str) -> Call:
    arguments = {"rewards": torch.tensor([rewards]), "values": torch.tensor([values]), "mask": torch.tensor([mask])}
    return Call("gae", arguments | {"gamma": gamma, "gae_lambda": gae_lambda}, about=about)


CALLS = [
    case([0.0, 0.0, 1.0], [0.5, 0.25, 0.5], [1, 1, 1], 1.0, 0.5, "no hole"),
    case([0.0, 0.0, 1.0], [0.5, 0.25, 0.5], [1, 1, 1], 0.5, 0.5, "gamma and lambda below 1"),
    case([0.0, 0.0, 0.0, 1.0], [0.5, 0.75, 0.75, 0.25], [1, 0, 0, 1], 0.5, 1.0, "a tool's answer at 1 and 2"),
    case(
        [1.0, 0.0, 0.0, 2.0, 0.0],
        [0.5, 1.0, 9.0, 0.5, 9.0],
        [1, 1, 0, 1, 0],
        0.8,
        0.5,
        "a hole, and padding at the end",
    ),
    case([0.0, 0.0, 1.0], [0.5, 0.25, 0.5], [1, 1, 1], 1.0, 0.0, "lambda = 0"),
    case([3.0, 0.0, 5.0], [1.0, 2.0, 1.0], [0, 1, 0], 0.9, 0.9, "a reward where the mask is 0, which nobody earned"),
]


def over_steps(call: Call, steps: list[int], decay: float, gamma: float) -> list[float]:
    """A_t = sum over j >= t of decay^(j-t) delta_j, where j and t count the steps; by positions."""
    rewards, values = (call.arguments[name][0].tolist() for name in ("rewards", "values"))
    deltas = []
    for j, t in enumerate(steps):
        next_value = values[steps[j + 1]] if j + 1 < len(steps) else 0.0
        deltas.append(rewards[t] + gamma * next_value - values[t])
    found = [0.0] * len(rewards)
    for j, t in enumerate(steps):
        found[t] = sum(decay ** (later - j) * deltas[later] for later in range(j, len(steps)))
    return found


def slow(call: Call, use_gamma: bool = True, use_lambda: bool = True) -> list[list[float]]:
    gamma, gae_lambda, mask = (call.arguments[name] for name in ("gamma", "gae_lambda", "mask"))
    steps = [t for t, is_action in enumerate(mask[0].tolist()) if is_action]
    decay = (gamma if use_gamma else 1.0) * (gae_lambda if use_lambda else 1.0)
    return [over_steps(call, steps, decay, gamma)]


def expected(call: Call) -> list[list[float]]:
    return slow(call)


def all_positions(call: Call, masked: bool = True) -> list[list[float]]:
    gamma, gae_lambda, mask = (call.arguments[name] for name in ("gamma", "gae_lambda", "mask"))
    found = over_steps(call, list(range(mask.shape[1])), gamma * gae_lambda, gamma)
    return [[x * m if masked else x for x, m in zip(found, mask[0].tolist(), strict=True)]]


def broken(call: Call) -> list[list[float]]:
    """Each run of action tokens for itself."""
    gamma, gae_lambda, mask = (call.arguments[name] for name in ("gamma", "gae_lambda", "mask"))
    found, run = [0.0] * mask.shape[1], []
    for t, is_action in enumerate([*mask[0].tolist(), 0]):
        if is_action:
            run.append(t)
        else:
            part = over_steps(call, run, gamma * gae_lambda, gamma)
            found = [x + y for x, y in zip(found, part, strict=True)]
            run = []
    return [found]


def target(call: Call) -> list[list[float]]:
    """A + V at action tokens."""
    values, mask = call.arguments["values"][0].tolist(), call.arguments["mask"][0].tolist()
    return [[a + v * m for a, v, m in zip(slow(call)[0], values, mask, strict=True)]]


MISTAKES = {
    "The tool's tokens are counted as steps: delta and lambda must pass over them.": all_positions,
    "The tool's tokens and padding have advantages of their own: they must be 0, and are no steps.": lambda call: (
        all_positions(call, masked=False)
    ),
    "The chain breaks at the hole: the token before a tool's answer is followed by the first one after it.": broken,
    "A_t+1 is discounted by lambda only: the factor is gamma lambda.": lambda call: slow(call, use_gamma=False),
    "A_t+1 is discounted by gamma only: the factor is gamma lambda.": lambda call: slow(call, use_lambda=False),
    "This is A + V, the target of the critic, and not the advantage.": target,
}
