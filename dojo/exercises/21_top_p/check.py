"""The clip and the nucleus, one token at a time; then ten steps of training, whose first ratios must be 1."""

from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dojo.judge import Call, load, perform

FOLDER = Path(__file__).parent
CLIP_EPS, TOP_P = 0.2, 0.7
CALLS = [
    Call(
        "policy_loss",
        {
            "ratio": torch.tensor([[1.25, 0.75], [1.25, 0.75]]),
            "advantages": torch.tensor([1.0, -2.0]),
            "mask": torch.tensor([[1, 1], [1, 1]]),
        },
    ),
    Call("nucleus", {"log_probs": torch.tensor([[0.75, 0.15, 0.1], [0.1, 0.4, 0.5]]).log()}),
    Call("train", {"seed": 0, "steps": 10}),
]


def slow_loss(call: Call, eps: float = CLIP_EPS) -> float:
    ratios, advantages = call.arguments["ratio"].tolist(), call.arguments["advantages"].tolist()
    terms = []
    for row, advantage in zip(ratios, advantages, strict=True):
        for ratio in row:
            terms.append(-min(ratio * advantage, min(max(ratio, 1 - eps), 1 + eps) * advantage))
    return sum(terms) / len(terms)


def slow_nucleus(call: Call, top_p: float = TOP_P) -> list[list[bool]]:
    found = []
    for row in call.arguments["log_probs"].exp().tolist():
        before = [sum(other for other in row if other > p) for p in row]
        found.append([mass < top_p for mass in before])
    return found


def expected(call: Call) -> Any:
    if call.function == "train":
        return perform(load(FOLDER / "solution.py"), call)
    return slow_loss(call) if call.function == "policy_loss" else slow_nucleus(call)


def near(wanted: list[float], result: Any, within: float) -> bool:
    is_list = isinstance(result, list) and len(result) == len(wanted)
    return is_list and all(abs(a - b) < within for a, b in zip(wanted, result, strict=True))


def accept(call: Call, result: Any) -> bool:
    """Training within the nucleus, or another way to draw, gives other numbers."""
    if call.function != "train" or not isinstance(result, dict):
        return False
    wanted = expected(call)
    is_near = near(wanted["first_ratio"], result.get("first_ratio"), within=1e-3)
    is_near = is_near and near(wanted["first_outside"], result.get("first_outside"), within=0.01)
    return is_near and all(near(wanted[name], result.get(name), within=0.2) for name in ("reward", "last_outside"))


def normalised(call: Call) -> Any:
    """What a division of the faulty ratio by its mean gives."""
    line = "ratio = (log_probs_of(policy, tokens) - old_log_probs).exp()"
    module = ModuleType("normalised")
    text = (FOLDER / "start.py").read_text(encoding="utf-8")
    exec(text.replace(line, f"{line}; ratio = ratio / ratio[mask == 1].mean().detach()"), module.__dict__)
    return perform(module, call)


MISTAKES = {
    "A wider clip hides that numerator and denominator disagree, and the two still disagree: the first ratios are "
    "0.73. Leave the clip as it was.": lambda call: slow_loss(call, eps=1.0),
    "Now the two agree because sampling is no longer from the nucleus: every token is in it. The samples should still "
    "leave out the least probable tokens.": lambda call: slow_nucleus(call, top_p=1.0),
    "The first ratios are still below 1: the recorded log-prob is of the nucleus, and the one in training of the full "
    "distribution.": lambda call: perform(load(FOLDER / "start.py"), call),
    "Only the mean of the first ratios is 1 now: the mass of the nucleus differs from token to token, and some tokens "
    "are still clipped before any update. Repair the log-probs, not their quotient.": normalised,
    "The ratio is 1 in every update now, not only in the first: the clip never acts, and the log-probs still "
    "disagree.": lambda call: {"last_outside": [0.0] * call.arguments["steps"]},
}
