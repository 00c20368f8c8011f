"""Checks of `policy_loss`: the ratio and its clip, the KL penalty, and all of it together."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from doctor.batches import ACTION, PROMPT, PROMPT_COLUMNS, Batch, make_batch
from doctor.findings import NOT_EXAMINED, NOTE, OK, TRAP, Finding, agree, compare, number
from doctor.formulas import KL_SLOPES, surrogate_slope
from doctor.probe import Probe

LOSS = "policy_loss"
RATIOS = [0.305 + 0.01 * index for index in range(370)]  # up to 4, none of them on the edge of a clip range


@dataclass
class Shape:
    """What is known of the surrogate and of the KL penalty, for the check of the whole loss."""

    low: float | None = None  # the clip range
    high: float | None = None
    kl: str = ""  # a key of KL_SLOPES
    kl_weight: float = 0.0


def check_objective(probe: Probe, broken: set[str]) -> Iterator[Finding]:
    """All checks of what the terms of tokens are.

    Args:
        broken: checks of the tokens' weights that found a trap.
    """
    shape = Shape()
    known = set(broken)
    for check in (_clip, _kl):
        for finding in check(probe, shape):
            known |= {finding.check} if finding.status == TRAP else set()
            yield finding
    if known:
        sentence = f"Not compared with a slow loop as a whole, because of: {', '.join(sorted(known))}."
        yield Finding("whole_loss", LOSS, NOT_EXAMINED, sentence)
    elif shape.low is None:
        sentence = (
            "Not compared with a slow loop as a whole: it is not PPO's surrogate with a KL penalty of equal weights."
        )
        yield Finding("whole_loss", LOSS, NOT_EXAMINED, sentence)
    else:
        yield _whole_loss(probe, shape)
    yield _ignored_values(probe)


def _is_of_sequence(probe: Probe) -> bool:
    """Whether the ratio of one token changes the gradient of others in its row, as in GSPO."""
    batch = make_batch().on_policy()
    _, before = probe(batch)
    old = batch.old_log_probs.clone()
    old[0, PROMPT_COLUMNS] -= 0.05
    _, after = probe(replace(batch, old_log_probs=old))
    return not agree(float(before[0, PROMPT_COLUMNS + 1]), float(after[0, PROMPT_COLUMNS + 1]))


def _clip(probe: Probe, shape: Shape) -> Iterator[Finding]:
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


def _kl(probe: Probe, shape: Shape) -> Iterator[Finding]:
    """The gradient of the KL penalty, and what it is averaged over."""
    probe.check = "kl_gradient"
    if "log_probs_ref" not in probe.loss.knows:
        sentence = "The function gets no log-probs of a reference: it has no KL penalty."
        yield from (Finding(check, LOSS, NOT_EXAMINED, sentence) for check in ("kl_gradient", "kl_over_padding"))
        return
    batch = make_batch()
    weights, _ = probe.weights(batch)
    batch = replace(batch.on_policy(), log_probs_ref=batch.log_probs_ref, advantages=torch.zeros(len(batch.kinds)))
    value, gradient = probe(batch)
    if float(gradient.abs().max()) < 1e-9:
        told = "kl_weight" in probe.loss.knows
        sentence = "The reference's log-probs change no gradient" + (", although kl_weight is not 0." if told else ".")
        numbers = (_largest_k3(batch, weights), 0.0) if told else (None, None)
        yield Finding("kl_gradient", LOSS, TRAP if told else NOTE, sentence, *numbers)
        return
    yield _kl_over_padding(probe, batch, value, gradient, weights)
    yield _kl_gradient(probe, batch, weights, gradient, shape)


def _largest_k3(batch: Batch, weights: torch.Tensor) -> float:
    d = (batch.log_probs_ref - batch.log_probs)[batch.mask]
    slopes = weights[batch.mask] * batch.kl_weight * (1 - d.exp())
    return float(slopes[slopes.abs().argmax()])


def _kl_gradient(probe: Probe, batch: Batch, weights: torch.Tensor, gradient: torch.Tensor, shape: Shape) -> Finding:
    """Which estimate of the KL divergence the penalty is, by its gradient at all tokens of the mask."""
    mask = batch.mask
    d = (batch.log_probs_ref - batch.log_probs)[mask].tolist()
    measured = gradient[mask] / weights[mask]  # of one token, in units of its weight
    row_of = torch.arange(len(mask))[:, None].expand(mask.shape)[mask]
    told = probe.loss.given.get("kl_weight", batch.kl_weight) if "kl_weight" in probe.loss.knows else None
    for name, slope in KL_SLOPES.items():
        slopes = torch.tensor([slope(value) for value in d])
        scale = float((measured * slopes).sum() / (slopes**2).sum())
        if float((measured - scale * slopes).abs().max()) < 2e-3 * float(measured.abs().max()):
            shape.kl, shape.kl_weight = name, scale
            return _kl_named(name, scale, told, slopes, measured)
        # its weights can be others than the surrogate's: one factor for each row
        factors = torch.stack([(measured * slopes)[row_of == row].sum() for row in range(len(mask))])
        factors /= torch.stack([(slopes**2)[row_of == row].sum() for row in range(len(mask))])
        rest = float((measured - factors[row_of] * slopes).abs().max())
        if name != "k1" and rest < 2e-3 * float(measured.abs().max()):
            shape.low = None
            sentence = f"The KL penalty is {name}, and weighs the rows otherwise than the surrogate does."
            return Finding("kl_gradient", LOSS, NOTE, sentence, float(factors.min()), float(factors.max()))
    at = int(measured.abs().argmax())
    expected = (1.0 if told is None else told) * (1 - torch.tensor(d[at]).exp())
    sentence = (
        f"The gradient of the KL penalty, where log p_ref - log p is {number(d[at])}, is that of no known estimate."
    )
    return Finding("kl_gradient", LOSS, TRAP, sentence, float(expected), float(measured[at]))


def _kl_named(name: str, scale: float, told: float | None, slopes: torch.Tensor, measured: torch.Tensor) -> Finding:
    """The finding on a penalty that is `scale` times a known estimate."""
    weight = scale if told is None else told
    at = int(slopes.abs().argmax())
    if name == "k1":
        sentence = (
            "The KL penalty is log p - log p_ref with a gradient: it is the same wherever the reference is, and 0 in "
            "expectation, so that nothing holds the policy near the reference."
        )
        return Finding("kl_gradient", LOSS, TRAP, sentence, 0.0, scale)
    if scale < 0:
        sentence = "The KL penalty drives the policy away from the reference: its sign is wrong."
        return Finding("kl_gradient", LOSS, TRAP, sentence, float(abs(weight) * slopes[at]), float(measured[at]))
    if name not in ("k2", "k3"):
        sentence = f"The KL penalty is {name}: its gradient is not that of an estimate of KL(policy || reference)."
        d = torch.log1p(slopes[at]).neg() if "exchanged" in name else None
        expected = float(weight * (1 - d.exp())) if d is not None else None
        return Finding("kl_gradient", LOSS, TRAP, sentence, expected, float(measured[at]))
    if told is not None and not agree(told, scale, 2e-3):
        sentence = (
            f"The KL penalty is {name}, {number(scale / told)} times as heavy as kl_weight, in units of the surrogate."
        )
        return Finding("kl_gradient", LOSS, NOTE, sentence, told, scale)
    exact = ", the gradient of the KL divergence itself" if name == "k2" else ""
    sentence = f"The KL penalty has the gradient of {name}{exact}, weighed by {number(scale)}."
    return Finding("kl_gradient", LOSS, OK, sentence)


def _kl_over_padding(
    probe: Probe, batch: Batch, value: float, gradient: torch.Tensor, weights: torch.Tensor
) -> Finding:
    """The KL part of the loss before and after more padding is added, and its gradient outside the mask."""
    probe.check = "kl_over_padding"
    wider = batch.padded(6)
    after, _ = probe(wider)
    surrogate, _ = probe.weights(replace(wider, advantages=make_batch().advantages))
    # where the whole loss depends on the width, that is the finding of another check
    factor = float(surrogate[batch.kinds.shape[0] - 1, PROMPT_COLUMNS] / weights[-1, PROMPT_COLUMNS])
    trap = "The KL penalty is averaged over padding too: 6 more columns of it change the penalty of the same tokens."
    ok = "More padding does not change the KL penalty."
    finding = compare("kl_over_padding", LOSS, value * factor, after, trap, ok)
    outside = gradient[:, probe.loss.first_column :][batch.kinds[:, probe.loss.first_column :] != ACTION].abs().max()
    if finding.status == OK and float(outside) > 1e-5 * float(gradient.abs().max()) and not probe.leaks:
        sentence = "The KL penalty has a gradient at tokens where the mask is 0."
        return Finding("kl_over_padding", LOSS, TRAP, sentence, 0.0, float(outside))
    return finding


def _whole_loss(probe: Probe, shape: Shape) -> Finding:
    """The gradient of every token with old policy, reference and advantages all different, beside a slow loop's."""
    probe.check = "whole_loss"
    batch = make_batch(seed=4)
    weights, _ = probe.weights(batch)
    _, gradient = probe(batch)
    # k3 times the ratio, which is exact off policy too, has the gradient of k2 times the ratio
    variants = {"": False, " The KL penalty is multiplied by the ratio.": True} if shape.kl == "k2" else {"": False}
    best = None
    for more, with_ratio in variants.items():
        expected = _slow_gradient(probe, batch, weights, shape, with_ratio)
        error = torch.where(batch.mask, (expected - gradient).abs(), 0.0)
        if best is None or error.max() < best[0].max():
            best = error, expected, more
    error, expected, more = best
    numbers = float(expected.flatten()[error.argmax()]), float(gradient.flatten()[error.argmax()])
    trap = "With ratio, clip and KL penalty together, a token's gradient differs from that of a slow loop."
    return compare("whole_loss", LOSS, *numbers, trap, f"Every token's gradient is that of a slow loop.{more}", 1e-3)


def _slow_gradient(
    probe: Probe, batch: Batch, weights: torch.Tensor, shape: Shape, kl_times_ratio: bool
) -> torch.Tensor:
    """The gradient of the loss by every log-prob of the mask, one at a time: (B, W)."""
    expected = torch.zeros_like(weights)
    for row, column in batch.mask.nonzero().tolist():
        tensors = (batch.log_probs, batch.old_log_probs, batch.log_probs_ref, weights)
        log_prob, old, ref, weight = (float(x[row, column]) for x in tensors)
        ratio = math.exp(log_prob - old) if "old_log_probs" in probe.loss.knows else 1.0
        slope = surrogate_slope(ratio, float(batch.advantages[row]), shape.low, shape.high)
        if shape.kl:
            factor = ratio if kl_times_ratio else 1.0
            slope += shape.kl_weight * factor * KL_SLOPES[shape.kl](ref - log_prob)
        expected[row, column] = weight * slope
    return expected


def _ignored_values(probe: Probe) -> Finding:
    """What is outside the mask, far from anything that a model gives."""
    probe.check = "ignored_values"
    batch = make_batch()
    expected, _ = probe(batch)
    outside = (batch.kinds != ACTION) & (batch.kinds != PROMPT)
    extreme = replace(
        batch,
        log_probs=torch.where(outside, float("-inf"), batch.log_probs),
        old_log_probs=torch.where(outside, float("-inf"), batch.old_log_probs),
        log_probs_ref=torch.where(outside, 1e4, batch.log_probs_ref),
    )
    got, gradient = probe(extreme, may_be_nan=True)
    got = got if gradient.isfinite().all() else float("nan")
    if agree(expected, got):
        return Finding("ignored_values", LOSS, OK, "What is outside the mask is never read, not even an infinity.")
    sentence = (
        "Infinite log-probs outside the mask make the loss NaN: times 0 does not leave them out, torch.where does."
    )
    return Finding("ignored_values", LOSS, NOTE, sentence, expected, got)
