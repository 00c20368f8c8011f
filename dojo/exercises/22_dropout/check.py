"""First what the log shows, then what causes it, then whether the loss is still the loss."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dojo.judge import Call, perform

CALLS = [
    Call("train", {"seed": 0, "steps": 1}, about="all have the same weights, before the first update"),
    Call(
        "before_the_first_update",
        {"seed": 1},
        about="the symptom is gone from the log and the cause is not: with the same weights, sampling, training and "
        "the reference must give the same tokens the same log-probs, those of the network without random masks",
    ),
    Call(
        "loss_of",
        {
            "new": torch.tensor([[-1.0, -2.0], [-0.5, -1.0]]),
            "old": torch.tensor([[-1.5, -1.5], [-0.6, -1.0]]),
            "reference": torch.tensor([[-1.2, -2.0], [-0.5, -3.0]]),
            "advantages": torch.tensor([[1.0], [-1.0]]),
        },
        about="later in a step the ratios are not 1, and the loss must use them as before",
    ),
]


def expected(call: Call) -> Any:
    if call.function == "train":
        return {"kl": [0.0], "ratio": [0.0]}
    if call.function == "before_the_first_update":
        solution = ModuleType("solution_22")
        exec(Path(__file__).with_name("solution.py").read_text(encoding="utf-8"), solution.__dict__)
        return perform(solution, call)
    new, old, reference = (call.arguments[name].tolist() for name in ("new", "old", "reference"))
    terms = []
    for i, (advantage,) in enumerate(call.arguments["advantages"].tolist()):
        for j in range(len(new[i])):
            ratio, distance = math.exp(new[i][j] - old[i][j]), reference[i][j] - new[i][j]
            clipped = min(max(ratio, 0.8), 1.2)
            terms.append(0.02 * (math.exp(distance) - distance - 1) - min(ratio * advantage, clipped * advantage))
    return sum(terms) / len(terms)


def accept(call: Call, result: Any) -> bool:
    """A ratio of 1 up to the rounding of float32."""
    if call.function != "train" or not isinstance(result, dict):
        return False
    return all(0 <= abs(result.get(name, [1.0])[0]) < 1e-4 for name in ("kl", "ratio"))


def variant(*changes: tuple[str, str]) -> Callable[[Call], Any]:
    """What start.py returns with other changes."""

    def mistaken(call: Call) -> Any:
        text = Path(__file__).with_name("start.py").read_text(encoding="utf-8")
        for old, new in changes:
            text = text.replace(old, new)
        module = ModuleType("variant_22")
        exec(text, module.__dict__)
        return perform(module, call)

    return mistaken


MISTAKES = {
    "As before: the KL is not 0 and the ratio is not 1 at the first step. Three passes of one network disagree.": (
        variant()
    ),
    "Half a cure: the reference is the whole network now, but sampling and training still differ from it.": variant(
        ("reference = copy.deepcopy(policy)", "reference = copy.deepcopy(policy).eval()")
    ),
    "Half a cure: sampling uses the whole network now, but training and the reference still do not.": variant(
        ("    recorded = []", "    policy.eval()\n    recorded = []"),
        ("    return ids, torch.cat(recorded", "    policy.train()\n    return ids, torch.cat(recorded"),
    ),
}
