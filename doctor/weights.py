"""Checks of `policy_loss`: which tokens count, and how much."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from doctor.batches import ACTION, MAX_NEW_TOKENS, OTHER_ROWS, PADDING, PROMPT, PROMPT_COLUMNS, TOOL, Batch, make_batch
from doctor.examined_loss import OF_THE_MINIBATCH, Loss, meaning
from doctor.findings import NOTE, OK, TRAP, Finding, agree, compare, either, farthest, number

FIRST = (3, PROMPT_COLUMNS)  # row and column of the token that is sampled first in the longest row
LEAKS = {  # kind of token: the check, and the name of one such token
    PROMPT: ("prompt_trained", "a token of the prompt"),
    TOOL: ("tool_output_in_loss", "a token of tool output"),
    PADDING: ("padding_trained", "padding"),
}


def check_weights(loss: Loss, declared: str) -> Iterator[Finding]:
    """All checks of the weights of tokens; `declared` is the file's LOSS, or ""."""
    batch = make_batch()
    loss.check = "zero_gradient"
    weights, _ = loss.weights(batch)
    if weights.abs().max() < 1e-9:
        yield _zero_gradient(loss, batch.on_policy())
        return
    ok = "The log-probs have a gradient when the ratio is 1."
    old = [each for name, each in loss.parameters.items() if meaning(name) == "old_log_probs"]
    if old and (old[0].default is None or "None" in str(old[0].annotation)):  # the function accepts None
        gradients = [loss(replace(batch.on_policy(), old_log_probs=old))[1] for old in (batch.log_probs, None)]
        trap = "With old_log_probs=None the gradient is not the same as with old log-probs equal to the policy's."
        yield compare("zero_gradient", *gradients, trap, ok)
    else:
        yield Finding("zero_gradient", OK, ok)
    yield from _terms(loss, batch)
    findings = list(_which_tokens(batch, weights))
    yield from findings
    traps = {finding.check for finding in findings if finding.status == TRAP}
    loss.leaks = bool(traps & {"off_by_one", *(check for check, _ in LEAKS.values())})
    loss.check = "advantages_rescaled"
    double, _ = loss.weights(replace(batch, advantages=2 * batch.advantages))
    trap = "The loss rescales the advantages: twice the advantages are not twice the gradient."
    ok = "Twice the advantages are twice the gradient."
    rescaled = compare("advantages_rescaled", 2 * weights * batch.mask, 2 * double * batch.mask, trap, ok)
    yield rescaled
    if rescaled.status == TRAP:  # no weights hold for all advantages
        return
    middle = float(weights[batch.mask].median())
    trap = "The sign is wrong: a positive advantage makes a token less probable."
    yield compare("sign", abs(middle), middle, trap, "A positive advantage makes a token more probable.")
    yield from _normalisation(loss, batch, weights, declared, traps)
    yield _micro_batches(loss, batch, weights)
    loss.check = "padded_width"
    expected, got = (float(each[0, PROMPT_COLUMNS]) for each in (weights, loss.weights(batch.padded(6))[0]))
    trap = f"a token's weight is {number(expected)}, and {number(got)} after 6 more columns of padding."
    trap = f"The loss depends on how far a batch is padded: {trap}"
    yield compare("padded_width", expected, got, trap, "More padding does not change a token's weight.")
    yield _empty_row(loss)


def check_without_advantages(loss: Loss) -> Iterator[Finding]:
    """The checks of tokens that hold for every loss, such as one of pairs: by its gradient instead of by weights."""
    batch = make_batch()
    loss.check = "zero_gradient"
    _, gradient = loss(batch)
    trap = "The gradient by every log-prob is 0, so that nothing is learned."
    learns = bool(gradient.abs().max() > 1e-9)
    yield either("zero_gradient", learns, trap, "The log-probs have a gradient.", 1.0, float(learns))
    if not learns:
        return
    yield from _terms(loss, batch)
    yield from _which_tokens(batch, gradient)
    loss.check = "padded_width"
    expected, got = (float(each[FIRST]) for each in (gradient, loss(batch.padded(6))[1]))
    trap = "The loss depends on how far a batch is padded: 6 more columns of padding change a token's gradient."
    yield compare("padded_width", expected, got, trap, "More padding does not change a token's gradient.")
    yield check_ignored_values(loss)


def check_ignored_values(loss: Loss) -> Finding:
    """Extreme values outside the mask, which no model returns."""
    loss.check = "ignored_values"
    batch = make_batch()
    expected, _ = loss(batch)
    outside = (batch.kinds != ACTION) & (batch.kinds != PROMPT)
    values = {"log_probs": -math.inf, "old_log_probs": -math.inf, "log_probs_ref": 1e4}
    changed = {name: torch.where(outside, value, getattr(batch, name)) for name, value in values.items()}
    got, gradient = loss(replace(batch, **changed), may_be_nan=True)
    if agree(expected, got) and gradient.isfinite().all():
        return Finding("ignored_values", OK, "What is outside the mask is never read, not even an infinity.")
    infinite = "Infinite log-probs outside the mask make the loss NaN"
    return Finding("ignored_values", NOTE, f"{infinite}: times 0 does not leave them out, torch.where does.")


def _zero_gradient(loss: Loss, batch: Batch) -> Finding:
    """Compare the derivative by finite differences with autograd's."""
    step = torch.zeros_like(batch.log_probs)
    step[FIRST] = 0.01
    up, down = (loss(replace(batch, log_probs=batch.log_probs + sign * step))[0] for sign in (1, -1))
    slope = (up - down) / 0.02
    why = "something is detached; the loss itself changes with one of them by"
    if abs(slope) <= 1e-7:
        slope = -float(batch.advantages[FIRST[0]] / batch.mask[FIRST[0]].sum() / len(batch.kinds))
        why = "its value does not depend on them either; GRPO has, by one of them"
    sentence = f"The gradient by every log-prob is 0 when the ratio is 1, so that nothing is learned: {why}"
    return Finding("zero_gradient", TRAP, f"{sentence} {number(slope)}.", slope, 0.0)


def _terms(loss: Loss, batch: Batch) -> Iterator[Finding]:
    """Whether the terms that a function returns are 0 outside the mask and add up to its loss."""
    loss.check = "terms"
    value, _ = loss(batch)
    if loss.terms is None:
        return
    terms = loss.terms.detach()
    outside = float(terms[~batch.mask].abs().sum())
    trap, numbers = "The terms of the tokens do not add up to the loss.", (value, float(terms.sum()))
    if outside > 1e-6:
        trap, numbers = "A token where the mask is 0 has a term in the loss.", (0.0, outside)
    yield compare("terms", *numbers, trap, "The terms of the tokens add up to the loss.")


def _which_tokens(batch: Batch, weights: torch.Tensor) -> Iterator[Finding]:
    """Whether exactly the tokens in the mask count."""
    mask = batch.mask
    counts = weights.abs() > 1e-5 * weights.abs().max()
    typical = float(weights[counts].abs().median())
    for step, where in ((-1, "before"), (1, "after")):
        if torch.equal(counts, shifted(mask, step)):
            sentence = f"The mask is applied one entry off: what counts is the token {where} each token of the mask."
            yield Finding("off_by_one", TRAP, sentence, *(float(x[0].nonzero()[0]) for x in (mask, counts)))
            return
    yield Finding("off_by_one", OK, "The tokens that count are not shifted against the mask.")
    missing = mask & ~counts
    ends = mask & ~shifted(mask, -1)  # the next token is outside the mask
    if not missing.any():
        yield Finding("end_of_turn_masked", OK, "Every token of the mask counts, the last of a turn too.")
    elif not (missing & ~ends).any():
        sentence = "The last token of a turn, which ends it, does not count although the mask has it:"
        sentence += f" its weight is 0, where others have {number(typical)}."
        yield Finding("end_of_turn_masked", TRAP, sentence, typical, 0.0)
    else:
        sentence = f"{int(missing.sum())} of {int(mask.sum())} tokens of the mask do not count."
        yield Finding("tokens_left_out", TRAP, sentence, int(mask.sum()), int((mask & counts).sum()))
    for kind, (check, name) in LEAKS.items():
        leak = float(weights[batch.kinds == kind].abs().max())
        trap = f"The mask is 0 there, but {name} has a gradient: its weight is {number(leak)}, not 0."
        ok = f"Where the mask is 0, {name} has no gradient."
        yield compare(check, 0.0, leak if leak > 1e-5 * typical else 0.0, trap, ok)


def shifted(mask: torch.Tensor, step: int) -> torch.Tensor:
    """The mask moved by one column, to the right if `step` is 1, to the left if it is -1."""
    moved = mask.roll(step, dims=1)
    moved[:, 0 if step > 0 else -1] = False
    return moved


def _denominators(loss: Loss, batch: Batch) -> list[tuple[str, str, torch.Tensor]]:
    """The known losses: name, its name in LOSS or else the check that it fails, the denominators of tokens (B,)."""
    rows, ones = len(batch.kinds), torch.ones(len(batch.kinds))
    lengths, tool, prompt = ((batch.kinds == kind).sum(dim=1).float() for kind in (ACTION, TOOL, PROMPT))
    width = batch.kinds.shape[1] - (PROMPT_COLUMNS if "prompt_length" in loss.knows else 0)
    dr_grpo = "Dr. GRPO: the sum over a row's tokens, divided by max_new_tokens, then the mean over rows"
    known = [
        ("GRPO: the mean over a row's tokens, then over rows", "grpo", rows * lengths),
        ("DAPO: the mean over all tokens of the batch", "dapo", lengths.sum() * ones),
        (dr_grpo, "drgrpo", rows * MAX_NEW_TOKENS * ones),
        ("a mean over all entries, with padding", "", rows * width * ones),
        ("the sum over a row's tokens, then the mean over rows", "sequence-sum", rows * ones),
        ("the sum over all tokens", "sum", ones),
        ("the sum over rows of the mean over a row's tokens", "row-sum", lengths),
    ]
    for kind, what, more in ((TOOL, "tool output", tool), (PROMPT, "the prompt", prompt)):
        check, counted = LEAKS[kind][0], lengths + more
        known.append((f"GRPO, but {what} is counted in a row's length", check, rows * counted))
        known.append((f"DAPO, but {what} is counted", check, counted.sum() * ones))
    return known


def _normalisation(
    loss: Loss, batch: Batch, weights: torch.Tensor, declared: str, traps: set[str]
) -> Iterator[Finding]:
    """Find the denominator that agrees with the weights of two batches, up to a factor that both share."""
    loss.check = "normalisation"
    other = make_batch(OTHER_ROWS, seed=1, extra_padding=4)
    known, measured = _denominators(loss, batch), [(batch, weights), (other, loss.weights(other)[0])]
    fits = []  # (whether the factor differs from 1, place in known, factor)
    for index, pair in enumerate(zip(known, _denominators(loss, other), strict=True)):
        factors = [(w * divisors[:, None])[b.mask] for (b, w), (*_, divisors) in zip(measured, pair, strict=True)]
        middle = float(torch.cat(factors).median())
        if middle and float((torch.cat(factors) - middle).abs().max()) <= 1e-3 * abs(middle):
            fits.append((abs(middle - 1) > 1e-3, index, middle))
    if not fits:
        yield Finding("normalisation", NOTE, "The weights of the tokens fit none of the known losses.")
        return
    _, index, scale = min(fits)
    name, kind, _ = known[index]
    if kind in ("drgrpo", "sequence-sum") and not agree(1.0, abs(scale)):
        constant = (MAX_NEW_TOKENS if kind == "drgrpo" else 1) / abs(scale)
        name = f"Dr. GRPO: the sum over a row's tokens, divided by {number(constant)}, then the mean over rows"
    elif not agree(1.0, abs(scale)):
        name = f"{number(abs(scale))} times {name}"
    yield Finding("normalisation", NOTE, f"The loss is {name}.")
    divisors = {kind: divisors for _, kind, divisors in known[:7]}
    if index >= len(divisors):
        row = 1  # this row has tool output
        right = divisors["grpo" if known[index][0].startswith("GRPO") else "dapo"][row]
        sentence = f"A denominator counts tokens that are not trained: the loss is {name}."
        if kind not in traps:
            yield Finding(kind, TRAP, sentence, scale / float(right), float(weights[row, PROMPT_COLUMNS]))
    elif declared and kind == declared:
        yield Finding("declared", OK, f"The loss is {declared}, as the file says.")
    elif declared and kind:
        numbers = 1 / float(divisors[declared][0]), abs(float(weights[0, PROMPT_COLUMNS]))
        yield Finding("declared", TRAP, f"The file says {declared}, but the loss is {name}.", *numbers)


def _micro_batches(loss: Loss, batch: Batch, weights: torch.Tensor) -> Finding:
    """Whether the micro-batches of a minibatch have the gradient of the minibatch."""
    loss.check = "micro_batch_mean"
    rows = len(batch.kinds)
    splits = [[slice(start, start + 2) for start in range(0, rows, 2)]]  # equal parts, and unequal ones
    if {"num_rows", "num_tokens"} & loss.knows and "num_parts" not in map(meaning, loss.parameters):
        splits.append([slice(0, 1), slice(1, rows)])
    # without numbers of the minibatch, a trainer has to divide a mean by the number of parts, and leave a sum undivided
    findings = []
    for split in splits:
        parts = torch.cat([loss.weights(batch.rows(part, len(split)))[0] for part in split])
        shares = [1.0] if loss.knows & {*OF_THE_MINIBATCH} else [1.0, 1 / len(split)]
        share = min(shares, key=lambda share: float(((share * parts - weights) * batch.mask).abs().max()))
        whole, part = farthest(weights * batch.mask, share * parts * batch.mask)
        how = "in micro-batches that are added up" if share == 1 else "in the mean over equal micro-batches"
        trap = f"How a batch is split changes a token's weight: {number(whole)} in one batch, {number(part)} {how}."
        findings.append(compare("micro_batch_mean", whole, part, trap, f"A token's weight is the same {how}."))
    return max(findings, key=lambda finding: abs(finding.expected - finding.got))


def _empty_row(loss: Loss) -> Finding:
    """A row without any token that was sampled or counts, among other rows."""
    loss.check = "empty_row"
    batch, other = (make_batch(((5, 0, 0), (length, 0, 0), (3, 2, 3)), seed=2) for length in (0, 1))
    value, gradient = loss(batch, may_be_nan=True)
    rest, _ = loss(replace(batch, kinds=other.kinds))
    value = value if gradient.isfinite().all() else float("nan")
    row = "A row without a token of the mask"
    trap = f"{row} makes the loss or its gradient NaN; with one token in it the loss is finite."
    return either("empty_row", abs(value) < float("inf"), trap, f"{row} leaves the loss finite.", rest, value)
