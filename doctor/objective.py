"""Checks of `policy_loss`: ratio, clip and KL penalty, each separately and all together.

The slow formulas come from the papers. PPO's clipped surrogate: arXiv 1707.06347, equation 7. The estimates k1, k2 and
k3 of a KL divergence: Schulman 2020, "Approximating KL divergence".
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch

from doctor.batches import ACTION, PROMPT_COLUMNS, Batch, make_batch
from doctor.examined_loss import Loss
from doctor.findings import NOT_EXAMINED, NOTE, OK, TRAP, Finding, agree, compare, number
from doctor.weights import check_ignored_values

INFINITY = float("inf")
RATIOS = 0.305 + 0.01 * torch.arange(370)  # up to 4, none of them on the edge of a clip range
# The derivative of an estimate of KL(policy || reference) by the token's log-prob, with d = log p_ref - log p
KL_SLOPES = {
    "k3": lambda d: 1 - d.exp(),
    "k2": lambda d: -d,
    "k1": torch.ones_like,
    "k3 with policy and reference exchanged": lambda d: (-d).exp() - 1,
    "the absolute difference": lambda d: -d.sign(),
}
# Variants of the gradient of k2 if the ratio is not 1; k3 times the ratio has the gradient of k2 times the ratio
WITH_RATIO = ("", " The KL penalty is multiplied by the ratio.", " The KL penalty is a part of the advantages.")


@dataclass
class Shape:
    """The surrogate and the KL penalty, as far as earlier checks found them, for the check of the whole loss."""

    range: tuple[float, float] | None = None  # how far below and above 1 the ratio may go
    kl: str = ""  # a key of KL_SLOPES
    kl_weight: float = 0.0
    why_not: str = "it is not PPO's surrogate with a KL penalty of equal weights"  # if it cannot be compared


def check_objective(loss: Loss, broken: set[str]) -> Iterator[Finding]:
    """All checks of the terms of tokens; `broken`: checks of the tokens' weights that found a trap."""
    shape = Shape()
    known = set(broken)
    for finding in chain(_clip(loss, shape), _kl(loss, shape)):
        known |= {finding.check} if finding.status == TRAP else set()
        yield finding
    if known or not shape.range:
        why = f": {shape.why_not}."
        why = f", because of: {', '.join(sorted(known))}." if known else why
        yield Finding("whole_loss", NOT_EXAMINED, f"Not compared with a slow loop as a whole{why}")
    else:
        yield _whole_loss(loss, shape)
    yield check_ignored_values(loss)


def _clip(loss: Loss, shape: Shape) -> Iterator[Finding]:
    """Compare the gradient of tokens, as a function of their ratio, with PPO's for both signs of the advantage."""
    loss.check = "clip"
    if "old_log_probs" not in loss.knows:
        sentence = "The function gets no old log-probs: it has no ratio to clip."
        yield from (Finding(check, NOT_EXAMINED, sentence) for check in ("one_update", "clip"))
        return
    batch = make_batch().on_policy()
    yield _one_update(loss, batch)
    old = batch.old_log_probs.clone()
    old[0, PROMPT_COLUMNS] -= 0.05  # the next token keeps its ratio, unless there is one ratio per row
    before, after = (float(loss(each)[1][0, PROMPT_COLUMNS + 1]) for each in (batch, replace(batch, old_log_probs=old)))
    if not agree(before, after):
        shape.why_not = "its ratio is of a sequence"
        sentence = "The ratio is of a sequence (as in GSPO), not of a token: no curve of a token shows its clip."
        yield Finding("clip", NOT_EXAMINED, sentence)
        return
    curves = _curves(loss)
    other = _other_surrogate(curves, loss.clip_range is not None)
    yield Finding("clip", NOTE, other) if other else _compare_with_ppo(curves, loss.clip_range, shape)


def _one_update(loss: Loss, batch: Batch) -> Finding:
    """Whether only advantages and weights make the gradient while the ratio is 1, as with one update per rollout."""
    loss.check = "one_update"
    _, rest = loss.weights(batch)  # what does not depend on the advantages
    _, gradient = loss(batch)
    if float(rest.abs().max()) > 1e-4 * float(gradient.abs().max()):
        sentence = "At a ratio of 1 a part of the gradient does not depend on the advantages, as of an entropy bonus."
        return Finding("one_update", NOTE, sentence)
    sentence = "With one update per rollout every ratio is 1: ratio and clip do nothing, and the gradient is that of a "
    return Finding("one_update", NOTE, f"{sentence}policy gradient.")


def _curves(loss: Loss) -> torch.Tensor:
    """The gradients of tokens at RATIOS, in units of minus their weight and A: (2, R), with A = 1 and A = -1."""
    rows = ((len(RATIOS), 0, 0), (len(RATIOS), 0, 0))
    batch = replace(make_batch(rows, seed=3), advantages=torch.tensor([1.0, -1.0])).on_policy()
    weights, flat = loss.weights(batch)
    log_ratios = torch.zeros_like(batch.log_probs)
    log_ratios[batch.mask] = RATIOS.log().repeat(2)
    # the ratio changes through the old log-probs, so that the KL to the reference stays 0
    _, gradient = loss(replace(batch, old_log_probs=batch.log_probs - log_ratios))
    relative = -(gradient - flat) / (weights * batch.advantages[:, None])
    return relative[batch.mask].view(2, -1)


def _are_equal(curves: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (curves - expected).abs() <= 2e-3 * torch.maximum(curves.abs(), expected.abs()) + 1e-7


def _other_surrogate(curves: torch.Tensor, is_told_range: bool) -> str:
    """A sentence on a known surrogate other than PPO's; "" if it is unknown."""
    if _are_equal(curves, torch.ones(1)).all():
        return "The gradient does not depend on the ratio: a policy gradient, right for one update per rollout only."
    if not is_told_range and _are_equal(curves, RATIOS).all():
        return "The ratio is not clipped: enough for one update per rollout, not for more."
    lowest, highest = float(curves.min()), float(curves.max())
    is_saturated = lowest > 0.1 and highest < RATIOS[-1] - 0.1
    if is_saturated and _are_equal(curves, RATIOS.clamp(lowest, highest)).all():
        return f"The ratio is a factor without gradient, at most {number(highest)}, as in CISPO: not PPO's loss."
    return ""


def _compare_with_ppo(curves: torch.Tensor, clip_range: tuple[float, float] | None, shape: Shape) -> Finding:
    """Compare the curves with PPO's; if the function does not receive the range, it ends when they become 0."""
    ratios, flat = RATIOS, curves.abs() < 1e-4
    above, below = ratios[flat[0] & (ratios > 1)].tolist(), ratios[flat[1] & (ratios < 1)].tolist()
    inferred = 1 - (below[-1] + 0.005) if below else INFINITY, above[0] - 0.005 - 1 if above else INFINITY
    low, high = shape.range = clip_range or inferred
    ppo = torch.stack([ratios * (ratios <= 1 + high), ratios * (ratios >= 1 - low)])
    wrong = ~_are_equal(curves, ppo)
    span, more = f"{number(1 - low)} to {number(1 + high)}", ""
    # the ratio above which a token with a negative advantage has no gradient (arXiv 1912.09729, equation 5)
    dual = float(ratios[wrong[1]][:1].sum())
    if dual >= 1.5 and flat[1, ratios >= dual].all():
        wrong[1, ratios >= dual] = False
        more = f", and with dual clip at {number(dual - 0.005)}"
    if not wrong.any():
        return Finding("clip", OK, f"The ratio is clipped to {span} for both signs of the advantage{more}.")
    row = 0 if wrong[0].any() else 1
    places = wrong[row].nonzero()[:, 0]
    at = places[len(places) // 2]
    ratio, expected, got = (float(each) for each in (ratios[at], ppo[row, at], curves[row, at]))
    sentence = f"At a ratio of {number(ratio)} and an advantage of {1 - 2 * row} a token's gradient is not PPO's,"
    sentence += f" clipped to {span}, in units of -A."
    if (flat | _are_equal(curves, ratios)).all():  # PPO's two branches, miswired
        return Finding("clip", TRAP, sentence, expected, got)
    shape.range = None
    sentence += f" It should be {number(expected)}, and is {number(got)}: another surrogate?"  # such as SAPO's
    return Finding("clip", NOTE, sentence)


def _kl(loss: Loss, shape: Shape) -> Iterator[Finding]:
    """The gradient of the KL penalty, and its denominator."""
    loss.check = "kl_gradient"
    if "log_probs_ref" not in loss.knows:
        sentence = "The function gets no log-probs of a reference: it has no KL penalty."
        yield from (Finding(check, NOT_EXAMINED, sentence) for check in ("kl_gradient", "kl_over_padding"))
        return
    batch = make_batch()
    weights, rest = loss.weights(batch)
    batch = replace(batch.on_policy(), log_probs_ref=batch.log_probs_ref, advantages=torch.zeros(len(batch.kinds)))
    value, gradient = loss(batch)
    d = (batch.log_probs_ref - batch.log_probs)[batch.mask]
    if float(gradient.abs().max()) >= 1e-9:
        yield _kl_over_padding(loss, batch, value, gradient, weights)
        measured = gradient[batch.mask] / weights[batch.mask]  # per token, in units of its weight
        told = loss.settings.get("kl_weight", batch.kl_weight) if "kl_weight" in loss.knows else None
        finding = _kl_gradient(d, measured, batch.mask.nonzero()[:, 0], told, shape)
        if not shape.kl and finding.status == TRAP and float(rest.abs().max()) > 1e-4 * float(gradient.abs().max()):
            sentence = "The KL penalty cannot be told from another part of the loss, such as an entropy bonus."
            finding = Finding("kl_gradient", NOTE, sentence)
        yield finding
    elif "kl_weight" in loss.knows:
        k3 = weights[batch.mask] * batch.kl_weight * KL_SLOPES["k3"](d)
        sentence = "The reference's log-probs change no gradient, although kl_weight is not 0."
        yield Finding("kl_gradient", TRAP, sentence, float(k3[k3.abs().argmax()]), 0.0)
    else:
        yield Finding("kl_gradient", NOTE, "The reference's log-probs change no gradient.")


def _kl_over_padding(loss: Loss, batch: Batch, value: float, gradient: torch.Tensor, weights: torch.Tensor) -> Finding:
    """Compare the KL part of the loss before and after adding padding, and check its gradient outside the mask."""
    loss.check = "kl_over_padding"
    wider = batch.padded(6)
    after, _ = loss(wider)
    surrogate, _ = loss.weights(replace(wider, advantages=make_batch().advantages))
    # if the whole loss depends on the width, another check reports it
    factor = float(surrogate[-1, PROMPT_COLUMNS] / weights[-1, PROMPT_COLUMNS])
    outside = float(gradient[batch.kinds != ACTION].abs().max())
    trap = "The KL penalty is averaged over padding too: 6 more columns of it change the penalty of the same tokens."
    if agree(value * factor, after) and outside > 1e-5 * float(gradient.abs().max()) and not loss.leaks:
        value, after, trap = 0.0, outside, "The KL penalty has a gradient at tokens where the mask is 0."
    return compare("kl_over_padding", value * factor, after, trap, "More padding does not change the KL penalty.")


def _kl_gradient(
    d: torch.Tensor, measured: torch.Tensor, row_of: torch.Tensor, told: float | None, shape: Shape
) -> Finding:
    """Which estimate of the KL divergence the penalty uses, judged by its gradient in the mask; `told`: weight."""
    tolerance = 2e-3 * float(measured.abs().max())
    for name, slope in KL_SLOPES.items():
        slopes = slope(d)
        scale = float((measured * slopes).sum() / (slopes**2).sum())
        if float((measured - scale * slopes).abs().max()) < tolerance:
            shape.kl, shape.kl_weight = name, scale
            return _known_kl(name, scale, d, measured, told)
        # its weights can differ from the surrogate's: one factor for each row
        rows = torch.nn.functional.one_hot(row_of).float()  # (tokens, B)
        factors = (measured * slopes) @ rows / (slopes**2 @ rows)
        if name != "k1" and float((measured - factors[row_of] * slopes).abs().max()) < tolerance:
            shape.range = None
            sentence = f"The KL penalty is {name}, and weighs the rows otherwise than the surrogate does."
            return Finding("kl_gradient", NOTE, sentence)
    at = int(measured.abs().argmax())
    expected = (1.0 if told is None else told) * float(KL_SLOPES["k3"](d[at]))
    where = f"where log p_ref - log p is {number(d[at])}"
    sentence = f"The gradient of the KL penalty, {where}, agrees with no known estimate."
    return Finding("kl_gradient", TRAP, sentence, expected, float(measured[at]))


def _known_kl(name: str, scale: float, d: torch.Tensor, measured: torch.Tensor, told: float | None) -> Finding:
    """The finding about a penalty that is `scale` times a known estimate."""
    slopes, weight = KL_SLOPES[name](d), scale if told is None else told
    at = int(slopes.abs().argmax())
    expected, got = abs(weight) * float(slopes[at]), float(measured[at])
    if name == "k1":
        sentence = "The KL penalty is log p - log p_ref with a gradient: it is the same wherever the reference is,"
        sentence += " and 0 in expectation, so that nothing holds the policy near the reference."
        expected, got = 0.0, scale
    elif scale < 0:
        sentence = "The KL penalty drives the policy away from the reference: its sign is wrong."
    elif name not in ("k2", "k3"):
        sentence = f"The KL penalty is {name}: it does not have the gradient of an estimate of KL(policy || reference)."
        expected = weight * float(KL_SLOPES["k3"](d[at]))
    elif told is not None and not agree(told, scale, 2e-3):
        times = f"{number(scale / told)} times as heavy as kl_weight"
        return Finding("kl_gradient", NOTE, f"The KL penalty is {name}, {times}, in units of the surrogate.")
    else:
        exact = ", the gradient of the KL divergence itself" if name == "k2" else ""
        sentence = f"The KL penalty has the gradient of {name}{exact}, weighed by {number(scale)}."
        return Finding("kl_gradient", OK, sentence)
    return Finding("kl_gradient", TRAP, sentence, expected, got)


def _whole_loss(loss: Loss, shape: Shape) -> Finding:
    """Compare the gradient of every token with a slow loop, with different old policy, reference and advantages."""
    loss.check = "whole_loss"
    batch = make_batch(seed=4)
    weights, _ = loss.weights(batch)
    _, gradient = loss(batch)
    forms = range(len(WITH_RATIO) if shape.kl == "k2" else 1)
    slow = [_slow_gradient(loss, batch, weights, shape, form) for form in forms]
    best = min(forms, key=lambda form: float((slow[form] - gradient * batch.mask).abs().max()))
    trap = "With ratio, clip and KL penalty together, a token's gradient differs from that of a slow loop."
    ok = f"Every token's gradient is that of a slow loop.{WITH_RATIO[best]}"
    return compare("whole_loss", slow[best], gradient * batch.mask, trap, ok, 1e-3)


def _slow_gradient(loss: Loss, batch: Batch, weights: torch.Tensor, shape: Shape, with_ratio: int) -> torch.Tensor:
    """The gradient of the loss by every log-prob in the mask, one by one: (B, W); `with_ratio` is of WITH_RATIO."""
    expected, (low, high) = torch.zeros_like(weights), shape.range
    for at in map(tuple, batch.mask.nonzero().tolist()):
        ratio = (batch.log_probs - batch.old_log_probs)[at].exp() if "old_log_probs" in loss.knows else 1.0
        kl = shape.kl_weight * KL_SLOPES[shape.kl]((batch.log_probs_ref - batch.log_probs)[at]) if shape.kl else 0.0
        advantage = batch.advantages[at[0]] - kl * (with_ratio == 2)
        is_clipped = ratio > 1 + high if advantage > 0 else ratio < 1 - low
        surrogate = 0.0 if is_clipped else -ratio * advantage  # the slope of -min(ratio A, clip(ratio) A)
        expected[at] = weights[at] * (surrogate + (kl, kl * ratio, 0.0)[with_ratio])
    return expected
