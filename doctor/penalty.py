"""Checks of `policy_loss`: the KL penalty."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from doctor.batches import ACTION, PROMPT_COLUMNS, Batch, make_batch
from doctor.findings import NOT_EXAMINED, NOTE, OK, TRAP, Finding, agree, compare, number
from doctor.formulas import KL_SLOPES
from doctor.probe import Probe, Shape

LOSS = "policy_loss"


def check_kl(probe: Probe, shape: Shape) -> Iterator[Finding]:
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
    told = probe.loss.settings.get("kl_weight", batch.kl_weight) if "kl_weight" in probe.loss.knows else None
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
