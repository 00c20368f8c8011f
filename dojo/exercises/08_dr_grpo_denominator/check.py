"""Dr. GRPO's loss, one token at a time."""

from collections.abc import Callable

import torch

from dojo.judge import Call


def call(mask: list, advantages: list, about: str, gradient: str | None = None) -> Call:
    log_probs = [[-1.0, -2.0, -0.5], [-3.0, -1.5, -4.0]]
    numbers = {"log_probs": log_probs[: len(mask)], "advantages": advantages, "mask": mask}
    arguments = {name: torch.tensor(value) for name, value in numbers.items()}
    return Call("dr_grpo_loss", arguments | {"max_new_tokens": 5}, gradient, about)


CALLS = [
    call([[1, 1, 0], [1, 0, 0]], [[1.0], [-0.5]], "completions of two tokens and of one"),
    call([[1, 1, 0], [1, 0, 0]], [[1.0], [-0.5]], "completions of two tokens and of one", gradient="log_probs"),
    call([[1, 0, 1]], [[2.0]], "a tool's answer between two sampled tokens", gradient="log_probs"),
    call([[0, 0, 0], [1, 1, 1]], [[0.5], [1.0]], "the first completion is empty", gradient="log_probs"),
]


def slow(call: Call, divisor: Callable | None = None, sign: float = -1.0, masked: bool = True) -> float | dict:
    """`divisor` gets the mask and the number of the row; without it, rows times the budget."""
    log_probs, advantages, mask = (x.tolist() for x in list(call.arguments.values())[:3])
    loss, gradient = 0.0, []
    for b, row in enumerate(log_probs):
        by = divisor(mask, b) if divisor else len(mask) * call.arguments["max_new_tokens"]
        gradient.append([])
        for t, log_prob in enumerate(row):
            weight = sign * advantages[b][0] / by if mask[b][t] or not masked else 0.0
            loss += weight * log_prob
            gradient[b].append(weight)
    return {"value": loss, "gradient": gradient} if call.gradient else loss


def expected(call: Call) -> float | dict:
    return slow(call)


MISTAKES = {
    "Each row is divided by its own length. That is GRPO: a long completion counts less per token.": lambda call: slow(
        call, lambda mask, b: len(mask) * max(1, sum(mask[b]))
    ),
    "This is a mean over all tokens, as in DAPO: the divisor changes with the batch. Divide by rows times "
    "max_new_tokens.": lambda call: slow(call, lambda mask, b: sum(map(sum, mask))),
    "The divisor is the width of the padded batch, which changes with the longest row. Divide by "
    "max_new_tokens.": lambda call: slow(call, lambda mask, b: len(mask) * len(mask[b])),
    "The mean over the rows is missing: this is their sum.": lambda call: slow(
        call, lambda mask, b: call.arguments["max_new_tokens"]
    ),
    "The sign: a positive advantage must make its tokens more probable when the loss falls.": lambda call: slow(
        call, sign=1.0
    ),
    "Tokens outside the mask count.": lambda call: slow(call, masked=False),
}
