"""The clipped loss, one token at a time; then two steps of training beside those of the solution."""

from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dojo.judge import Call, load, perform

FOLDER = Path(__file__).parent
CLIP_EPS = 0.2
CALLS = [
    Call(
        "policy_loss",
        {
            "ratio": torch.tensor([[1.0, 1.5, 0.5], [1.5, 0.5, 7.0]]),
            "advantages": torch.tensor([1.0, -2.0]),
            "mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        },
    ),
    Call("train", {"seed": 0, "steps": 2}),
]


def slow(call: Call) -> float:
    ratios, advantages, masks = (call.arguments[name].tolist() for name in ("ratio", "advantages", "mask"))
    total, number = 0.0, 0
    for row, advantage in enumerate(advantages):
        for ratio, counts in zip(ratios[row], masks[row], strict=True):
            if counts:
                clipped = min(max(ratio, 1 - CLIP_EPS), 1 + CLIP_EPS)
                total, number = total - min(ratio * advantage, clipped * advantage), number + 1
    return total / number


def expected(call: Call) -> Any:
    return perform(load(FOLDER / "solution.py"), call) if call.function == "train" else slow(call)


def near(wanted: list[float], result: Any, within: float) -> bool:
    is_list = isinstance(result, list) and len(result) == len(wanted)
    return is_list and all(abs(a - b) < within for a, b in zip(wanted, result, strict=True))


def accept(call: Call, result: Any) -> bool:
    """Rounding is amplified by sixteen updates."""
    if call.function != "train" or not isinstance(result, dict):
        return False
    wanted = expected(call)
    is_near = near(wanted["clipped"], result.get("clipped"), within=0.03)
    return is_near and near(wanted["moved"], result.get("moved"), within=0.15)


def changed(old: str, new: str) -> ModuleType:
    """The solution with another line."""
    module = ModuleType("changed")
    exec((FOLDER / "solution.py").read_text(encoding="utf-8").replace(old, new), module.__dict__)
    return module


BEFORE = "old_log_probs = log_probs_of(policy, tokens).detach()"
RATIO = "ratio = (log_probs_of(policy, tokens) - old_log_probs).exp()"

MISTAKES = {
    "Every ratio is still exactly 1: the old log-probs are computed anew before each update, from the policy that the "
    "update begins with.": lambda call: perform(load(FOLDER / "start.py"), call),
    "The policy moves less now, but still no ratio has left the range: the size of a step is the symptom. The cause is "
    "that the ratio is 1 in every update, so the clip never acts.": lambda call: {"clipped": [0.0, 0.0]},
    "The ratio compares with the policy of one update before, so it is no longer 1; but sixteen small moves are never "
    "added up. Compare with the policy that sampled the rollout.": lambda call: perform(
        changed(RATIO, f"log_probs = log_probs_of(policy, tokens); {RATIO}; old_log_probs = log_probs.detach()"), call
    ),
    "The first rollout is right; then the ratio still compares with the policy before training. The old policy is the "
    "one that sampled this rollout.": lambda call: perform(
        changed(BEFORE, "old_log_probs = log_probs_of(Policy(), tokens).detach()"), call
    ),
}
