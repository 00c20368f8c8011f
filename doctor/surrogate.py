"""Checks of `policy_loss`: the ratio and its clip."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from doctor.batches import PROMPT_COLUMNS, make_batch
from doctor.findings import NOT_EXAMINED, NOTE, OK, TRAP, Finding, agree, number
from doctor.formulas import surrogate_slope
from doctor.probe import Probe, Shape

LOSS = "policy_loss"
RATIOS = [0.305 + 0.01 * index for index in range(370)]  # up to 4, none of them on the edge of a clip range


def check_clip(probe: Probe, shape: Shape) -> Iterator[Finding]:
    """The gradient of tokens by their ratio, for both signs of the advantage, beside PPO's."""
    probe.check = "clip"
    if "old_log_probs" not in probe.loss.knows:
        yield Finding("clip", LOSS, NOT_EXAMINED, "The function gets no old log-probs: it has no ratio to clip.")
        return
    if _is_of_sequence(probe):
        yield Finding("clip", LOSS, NOT_EXAMINED, "The ratio is that of a sequence (as in GSPO), not of a token.")
        return
    curves = _curves(probe)
    known = probe.loss.clip_range
    other = _other_surrogate(curves, known is not None)
    if other:
        yield Finding("clip", LOSS, NOTE, other)
        return
    shape.low, shape.high = known or _infer_range(curves)
    yield _compare_with_ppo(curves, shape)


def _is_of_sequence(probe: Probe) -> bool:
    """Whether the ratio of one token changes the gradient of others in its row, as in GSPO."""
    batch = make_batch().on_policy()
    _, before = probe(batch)
    old = batch.old_log_probs.clone()
    old[0, PROMPT_COLUMNS] -= 0.05
    _, after = probe(replace(batch, old_log_probs=old))
    return not agree(float(before[0, PROMPT_COLUMNS + 1]), float(after[0, PROMPT_COLUMNS + 1]))


def _compare_with_ppo(curves: dict[int, list[float]], shape: Shape) -> Finding:
    ppo = {sign: [-surrogate_slope(r, sign, shape.low, shape.high) * sign for r in RATIOS] for sign in (1, -1)}
    wrong = {sign: [not agree(e, g, 2e-3) for e, g in zip(ppo[sign], curves[sign], strict=True)] for sign in (1, -1)}
    dual = _dual_clip(curves[-1], wrong[-1])
    if dual:
        wrong[-1] = [differs and ratio < dual for differs, ratio in zip(wrong[-1], RATIOS, strict=True)]
    span = f"{number(1 - shape.low)} to {number(1 + shape.high)}"
    if not any(wrong[1] + wrong[-1]):
        more = f", and with dual clip at {number(dual)}" if dual else ""
        return Finding("clip", LOSS, OK, f"The ratio is clipped to {span} for both signs of the advantage{more}.")
    sign = 1 if any(wrong[1]) else -1
    places = [index for index, differs in enumerate(wrong[sign]) if differs]
    at = places[len(places) // 2]
    values = [(ratio, value) for curve in curves.values() for ratio, value in zip(RATIOS, curve, strict=True)]
    is_ppo_miswired = all(agree(0.0, value, 1e-4) or agree(ratio, value, 2e-3) for ratio, value in values)
    sentence = (
        f"At a ratio of {number(RATIOS[at])} and an advantage of {sign} a token's gradient is not PPO's, clipped to "
        f"{span}, in units of -A."
    )
    if not is_ppo_miswired:  # another surrogate, such as SAPO's
        shape.low = None
        sentence += f" It should be {number(ppo[sign][at])}, and is {number(curves[sign][at])}: another surrogate?"
    return Finding("clip", LOSS, TRAP if is_ppo_miswired else NOTE, sentence, ppo[sign][at], curves[sign][at])


def _curves(probe: Probe) -> dict[int, list[float]]:
    """By the sign of the advantage: the gradient of tokens, in units of minus their weight and A, for all RATIOS."""
    rows = ((len(RATIOS), 0, 0), (len(RATIOS), 0, 0))
    batch = replace(make_batch(rows, seed=3), advantages=torch.tensor([1.0, -1.0])).on_policy()
    weights, flat = probe.weights(batch)
    log_ratios = torch.zeros_like(batch.log_probs)
    log_ratios[batch.mask] = torch.tensor(RATIOS).log().repeat(2)
    # the ratio moves with the old log-probs, so that the KL to the reference stays 0
    _, gradient = probe(replace(batch, old_log_probs=batch.log_probs - log_ratios))
    relative = -(gradient - flat) / (weights * batch.advantages[:, None])
    return {sign: relative[row][batch.mask[row]].tolist() for row, sign in ((0, 1), (1, -1))}


def _infer_range(curves: dict[int, list[float]]) -> tuple[float, float]:
    """The clip range of a function that is not told one: where its gradient becomes 0; infinity: nowhere."""
    high = next((r for r, g in zip(RATIOS, curves[1], strict=True) if r > 1 and abs(g) < 1e-4), float("inf"))
    below = [r for r, g in zip(RATIOS, curves[-1], strict=True) if r < 1 and abs(g) < 1e-4]
    return (1 - (max(below) + 0.005) if below else float("inf")), high - 0.005 - 1


def _dual_clip(curve: list[float], wrong: list[bool]) -> float | None:
    """The ratio above which a token with a negative advantage has no gradient (arXiv 1912.09729, equation 5)."""
    if not wrong[-1] or RATIOS[at := wrong.index(True)] < 1.5:
        return None
    return RATIOS[at] - 0.005 if all(abs(value) < 1e-4 for value in curve[at:]) else None


def _other_surrogate(curves: dict[int, list[float]], is_told_range: bool) -> str:
    """A sentence on a surrogate that is not PPO's, but known; "" if it is none."""
    values = [(r, g) for curve in curves.values() for r, g in zip(RATIOS, curve, strict=True)]
    if all(agree(1.0, g, 2e-3) for _, g in values):
        return "The gradient does not depend on the ratio: a policy gradient, right for one update per rollout only."
    if not is_told_range and all(agree(r, g, 2e-3) for r, g in values):
        return "The ratio is not clipped: enough for one update per rollout, not for more."
    lowest, highest = min(g for _, g in values), max(g for _, g in values)
    is_saturated = lowest > 0.1 and highest < RATIOS[-1] - 0.1
    if is_saturated and all(agree(min(max(r, lowest), highest), g, 2e-3) for r, g in values):
        return f"The ratio is a factor without gradient, at most {number(highest)}, as in CISPO: not PPO's loss."
    return ""
