"""Checks of `policy_loss`: which tokens count, and how much."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from doctor.batches import ACTION, PADDING, PROMPT, PROMPT_COLUMNS, TOOL, Batch, make_batch
from doctor.denominators import check_denominator
from doctor.findings import NOT_EXAMINED, OK, TRAP, Finding, compare, number
from doctor.probe import Probe

LOSS = "policy_loss"
LEAKS = {  # kind of token: check, what one is called
    PROMPT: ("prompt_trained", "a token of the prompt"),
    TOOL: ("tool_output_in_loss", "a token of tool output"),
    PADDING: ("padding_trained", "padding"),
}


def check_weights(probe: Probe, declared: str) -> Iterator[Finding]:
    """All checks of the weights of tokens.

    Args:
        declared: the file's LOSS, or "".
    """
    batch = make_batch()
    probe.check = "zero_gradient"
    weights, _ = probe.weights(batch)
    if weights.abs().max() < 1e-9:
        yield _zero_gradient(probe, batch)
        return
    yield _zero_gradient_ok(probe, batch)
    yield from _terms(probe, batch)
    findings = _which_tokens(probe, batch, weights)
    yield from findings
    traps = {finding.check for finding in findings if finding.status == TRAP}
    probe.leaks = bool(traps & {check for check, *_ in LEAKS.values()} | traps & {"off_by_one"})
    rescaled = _rescaled(probe, batch)
    yield rescaled
    if rescaled.status == TRAP:  # there are no weights that hold for any advantages
        return
    middle = float(weights[batch.mask].median())
    trap = "The sign is wrong: a positive advantage makes a token less probable."
    yield compare("sign", LOSS, abs(middle), middle, trap, "A positive advantage makes a token more probable.")
    yield from check_denominator(probe, batch, weights, declared, traps)
    yield _micro_batches(probe, batch, weights)
    yield _width(probe, batch, weights)
    yield _empty_row(probe)


def _zero_gradient(probe: Probe, batch: Batch) -> Finding:
    """The derivative by finite differences, beside that of autograd, of the token with the largest of them."""
    batch = batch.on_policy()
    row, column = 3, PROMPT_COLUMNS
    step = torch.zeros_like(batch.log_probs)
    step[row, column] = 0.01
    up, down = (probe(replace(batch, log_probs=batch.log_probs + sign * step))[0] for sign in (1, -1))
    slope = (up - down) / 0.02
    if abs(slope) > 1e-7:
        why = "something is detached; the loss itself changes with one of them by"
    else:
        slope = -float(batch.advantages[row] / batch.mask[row].sum() / len(batch.kinds))
        why = "its value does not depend on them either; GRPO has, by one of them"
    sentence = f"The gradient by every log-prob is 0 when the ratio is 1, so that nothing is learned: {why}"
    return Finding("zero_gradient", LOSS, TRAP, f"{sentence} {number(slope)}.", slope, 0.0)


def _zero_gradient_ok(probe: Probe, batch: Batch) -> Finding:
    """Whether old log-probs of None, where the function allows them, give the gradient of a ratio of 1."""
    ok = "The log-probs have a gradient when the ratio is 1."
    if not probe.loss.may_be_none("old_log_probs"):
        return Finding("zero_gradient", LOSS, OK, ok)
    batch = batch.on_policy()
    _, expected = probe(batch)
    _, got = probe(replace(batch, old_log_probs=None))
    at = (expected - got).abs().argmax()
    trap = "With old_log_probs=None the gradient differs from that of old log-probs equal to the policy's."
    return compare("zero_gradient", LOSS, float(expected.flatten()[at]), float(got.flatten()[at]), trap, ok)


def _terms(probe: Probe, batch: Batch) -> Iterator[Finding]:
    """Whether the terms that a function returns are 0 outside the mask and add up to its loss."""
    probe.check = "terms"
    value, _ = probe(batch)
    if probe.terms is None:
        return
    terms = probe.terms.detach()
    outside = float(terms[~batch.mask[:, probe.loss.first_column :]].abs().sum())
    if outside > 1e-6:
        sentence = "A token where the mask is 0 has a term in the loss."
        yield Finding("terms", LOSS, TRAP, sentence, 0.0, outside)
        return
    trap = "The terms of the tokens do not add up to the loss."
    yield compare("terms", LOSS, value, float(terms.sum()), trap, "The terms of the tokens add up to the loss.")


def _which_tokens(probe: Probe, batch: Batch, weights: torch.Tensor) -> list[Finding]:
    """Whether exactly the tokens of the mask count."""
    first = probe.loss.first_column
    mask, kinds, weights = (x[:, first:] for x in (batch.mask, batch.kinds, weights))
    counts = weights.abs() > 1e-5 * weights.abs().max()
    typical = float(weights[counts].abs().median())
    shift = next((step for step in (-1, 1) if torch.equal(counts, _shifted(mask, step))), 0)
    if shift:
        began = int(mask[0].nonzero()[0])
        counted = counts[0].nonzero()
        where = "before" if shift < 0 else "after"
        sentence = f"The mask is applied one entry off: what counts is the token {where} each token of the mask."
        return [Finding("off_by_one", LOSS, TRAP, sentence, began, float(counted[0]) if len(counted) else -1.0)]
    findings = [Finding("off_by_one", LOSS, OK, "The tokens that count are not shifted against the mask.")]
    findings.append(_left_out(mask, counts, weights, typical))
    for kind, (check, name) in LEAKS.items():
        leak = float(weights[kinds == kind].abs().max()) if (kinds == kind).any() else None
        if leak is None:
            sentence = "These shapes have no prompt."
            findings.append(Finding(check, LOSS, NOT_EXAMINED, sentence))
            continue
        trap = f"The mask is 0 there, but {name} has a gradient: its weight is {number(leak)}, not 0."
        ok = f"Where the mask is 0, {name} has no gradient."
        findings.append(compare(check, LOSS, 0.0, leak if leak > 1e-5 * typical else 0.0, trap, ok))
    return findings


def _left_out(mask: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor, typical: float) -> Finding:
    """Whether a token of the mask does not count; the last ones of turns are those that end them."""
    missing = mask & ~counts
    ends = mask & ~_shifted(mask, -1)  # the next token is none of the mask's
    if not missing.any():
        return Finding("end_of_turn_masked", LOSS, OK, "Every token of the mask counts, the last of a turn too.")
    if not (missing & ~ends).any():
        sentence = (
            "The last token of a turn, which ends it, does not count although the mask has it: "
            f"its weight is 0, where others have {number(typical)}."
        )
        return Finding("end_of_turn_masked", LOSS, TRAP, sentence, typical, 0.0)
    sentence = f"{int(missing.sum())} of {int(mask.sum())} tokens of the mask do not count."
    return Finding("tokens_left_out", LOSS, TRAP, sentence, int(mask.sum()), int((mask & counts).sum()))


def _shifted(mask: torch.Tensor, step: int) -> torch.Tensor:
    """The mask moved by `step` columns, to the right if it is positive."""
    moved = torch.zeros_like(mask)
    if step > 0:
        moved[:, step:] = mask[:, :-step]
    else:
        moved[:, :step] = mask[:, -step:]
    return moved


def _micro_batches(probe: Probe, batch: Batch, weights: torch.Tensor) -> Finding:
    """Whether the micro-batches of a minibatch have the gradient of the minibatch."""
    probe.check = "micro_batch_mean"
    rows = len(batch.kinds)
    splits = [[slice(start, start + 2) for start in range(0, rows, 2)]]
    if {"num_rows", "num_tokens"} & probe.loss.knows and not probe.loss.is_trainer:
        splits.append([slice(0, 1), slice(1, rows)])
    worst = (0.0, 0.0, 0.0)
    for split in splits:
        parts = torch.cat([probe.weights(batch.rows(part, len(split)))[0] for part in split])
        # without numbers of the minibatch, a trainer has to divide a mean by the number of parts, and a sum by nothing
        shares = [1.0] if probe.loss.parts_add_up else [1.0, 1 / len(split)]
        differences = [torch.where(batch.mask, (share * parts - weights).abs(), 0.0) for share in shares]
        share, difference = min(zip(shares, differences, strict=True), key=lambda pair: float(pair[1].max()))
        at = difference.argmax()
        worst = max(worst, (float(difference.max()), float(weights.flatten()[at]), share * float(parts.flatten()[at])))
    _, whole, part = worst
    how = "in micro-batches that are added up" if share == 1 else "in the mean over equal micro-batches"
    trap = f"How a batch is split changes a token's weight: {number(whole)} in one batch, {number(part)} {how}."
    return compare("micro_batch_mean", LOSS, whole, part, trap, f"A token's weight is the same {how}.")


def _width(probe: Probe, batch: Batch, weights: torch.Tensor) -> Finding:
    probe.check = "padded_width"
    wider, _ = probe.weights(batch.padded(6))
    expected, got = (float(x[batch.kinds == ACTION][0]) for x in (weights, wider[:, : weights.shape[1]]))
    trap = (
        f"The loss depends on how far a batch is padded: a token's weight is {number(expected)}, and {number(got)} "
        "after 6 more columns of padding."
    )
    return compare("padded_width", LOSS, expected, got, trap, "More padding does not change a token's weight.")


def _rescaled(probe: Probe, batch: Batch) -> Finding:
    """Whether the loss takes the advantages as they are."""
    probe.check = "advantages_rescaled"
    single, _ = probe.weights(batch)
    double, _ = probe.weights(replace(batch, advantages=2 * batch.advantages))
    at = torch.where(batch.mask, (double - single).abs(), 0.0).argmax()
    expected, got = (float(x.flatten()[at]) for x in (single, double))
    trap = "The loss rescales the advantages: twice the advantages are not twice the gradient."
    ok = "Twice the advantages are twice the gradient."
    return compare("advantages_rescaled", LOSS, 2 * expected, 2 * got, trap, ok)


def _empty_row(probe: Probe) -> Finding:
    """A row of which no token was sampled, or counts, beside others."""
    probe.check = "empty_row"
    rows = ((5, 0, 0), (0, 0, 0), (3, 2, 3))
    batch = make_batch(rows, seed=2)
    value, gradient = probe(batch, may_be_nan=True)
    rest, _ = probe(replace(batch, kinds=make_batch(((5, 0, 0), (1, 0, 0), (3, 2, 3)), seed=2).kinds))
    bad = float("nan") if not gradient.isfinite().all() else value
    if bad == bad and abs(bad) != float("inf"):
        return Finding("empty_row", LOSS, OK, "A row without a token of the mask leaves the loss finite.")
    sentence = (
        "A row without a token of the mask makes the loss or its gradient NaN; with one token in it the loss is finite."
    )
    return Finding("empty_row", LOSS, TRAP, sentence, rest, bad)
