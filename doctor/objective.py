"""Checks of `policy_loss`: the terms of tokens, each by itself and all together."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from doctor.batches import ACTION, PROMPT, Batch, make_batch
from doctor.findings import NOT_EXAMINED, NOTE, OK, TRAP, Finding, agree, compare
from doctor.formulas import KL_SLOPES, surrogate_slope
from doctor.penalty import check_kl
from doctor.probe import Probe, Shape
from doctor.surrogate import check_clip

LOSS = "policy_loss"
# What can become of the gradient of k2 where the ratio is not 1; k3 times the ratio has that of k2 times the ratio
WITH_RATIO = ("", " The KL penalty is multiplied by the ratio.", " The KL penalty is a part of the advantages.")


def check_objective(probe: Probe, broken: set[str]) -> Iterator[Finding]:
    """All checks of what the terms of tokens are.

    Args:
        broken: checks of the tokens' weights that found a trap.
    """
    shape = Shape()
    known = set(broken)
    for check in (check_clip, check_kl):
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


def _whole_loss(probe: Probe, shape: Shape) -> Finding:
    """The gradient of every token with old policy, reference and advantages all different, beside a slow loop's."""
    probe.check = "whole_loss"
    batch = make_batch(seed=4)
    weights, _ = probe.weights(batch)
    _, gradient = probe(batch)
    best = None
    for more in WITH_RATIO if shape.kl == "k2" else WITH_RATIO[:1]:
        expected = _slow_gradient(probe, batch, weights, shape, WITH_RATIO.index(more))
        error = torch.where(batch.mask, (expected - gradient).abs(), 0.0)
        if best is None or error.max() < best[0].max():
            best = error, expected, more
    error, expected, more = best
    numbers = float(expected.flatten()[error.argmax()]), float(gradient.flatten()[error.argmax()])
    trap = "With ratio, clip and KL penalty together, a token's gradient differs from that of a slow loop."
    return compare("whole_loss", LOSS, *numbers, trap, f"Every token's gradient is that of a slow loop.{more}", 1e-3)


def _slow_gradient(probe: Probe, batch: Batch, weights: torch.Tensor, shape: Shape, with_ratio: int) -> torch.Tensor:
    """The gradient of the loss by every log-prob of the mask, one at a time: (B, W); `with_ratio` is of WITH_RATIO."""
    expected = torch.zeros_like(weights)
    for row, column in batch.mask.nonzero().tolist():
        tensors = (batch.log_probs, batch.old_log_probs, batch.log_probs_ref, weights)
        log_prob, old, ref, weight = (float(x[row, column]) for x in tensors)
        ratio = math.exp(log_prob - old) if "old_log_probs" in probe.loss.knows else 1.0
        advantage = float(batch.advantages[row])
        kl = shape.kl_weight * KL_SLOPES[shape.kl](ref - log_prob) if shape.kl else 0.0
        if with_ratio == 2:
            slope = surrogate_slope(ratio, advantage - kl, shape.low, shape.high)
        else:
            slope = surrogate_slope(ratio, advantage, shape.low, shape.high) + kl * (ratio if with_ratio else 1.0)
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
