"""Checks of `policy_loss`: what a token's term is divided by."""

from dataclasses import dataclass

import torch

from doctor.batches import MAX_NEW_TOKENS, OTHER_ROWS, PROMPT, PROMPT_COLUMNS, TOOL, Batch, make_batch
from doctor.findings import NOTE, OK, TRAP, Finding, agree, number
from doctor.probe import Probe

LOSS = "policy_loss"


@dataclass(frozen=True)
class Denominator:
    name: str  # of the loss with this denominator, for people
    divisors: torch.Tensor  # (B,) what a token of each row is divided by
    kind: str | None = None  # how LOSS calls it
    counted: str = ""  # the check that is failed by counting what is not trained


def check_denominator(
    probe: Probe, batch: Batch, weights: torch.Tensor, declared: str, traps: set[str]
) -> list[Finding]:
    """Which denominator the weights of two batches agree with, up to a factor that is the same in both."""
    probe.check = "normalisation"
    batches = [batch, make_batch(OTHER_ROWS, seed=1, extra_padding=4)]
    measured = [weights, probe.weights(batches[1])[0]]
    scales = []
    for pair in zip(*(_denominators(probe, each) for each in batches), strict=True):
        products = [w[b.mask] * _per_token(d, b) for w, b, d in zip(measured, batches, pair, strict=True)]
        scale = torch.cat(products)
        middle = float(scale.median())
        spread = float((scale - middle).abs().max())
        scales.append(middle if spread <= 1e-3 * abs(middle) else None)
    known = _denominators(probe, batch)
    fits = [(abs(scale - 1) > 1e-3, index) for index, scale in enumerate(scales) if scale]
    if not fits:
        sentence = "The weights of the tokens are those of none of the known losses."
        return [Finding("normalisation", LOSS, NOTE, sentence)]
    found, scale = known[min(fits)[1]], scales[min(fits)[1]]
    name = found.name
    if found.kind in ("drgrpo", "sequence-sum") and not agree(1.0, abs(scale)):
        constant = (MAX_NEW_TOKENS if found.kind == "drgrpo" else 1) / abs(scale)
        name = f"Dr. GRPO: the sum over a row's tokens, divided by {number(constant)}, then the mean over rows"
    elif not agree(1.0, abs(scale)):
        name = f"{number(abs(scale))} times {name}"
    findings = [Finding("normalisation", LOSS, NOTE, f"The loss is {name}.")]
    if found.counted and found.counted not in traps:
        row = 1  # which has tool output
        without = known[0] if found.name.startswith("GRPO") else known[1]
        expected, got = scale / float(without.divisors[row]), float(weights[row, PROMPT_COLUMNS])
        sentence = f"A denominator counts what is not trained: the loss is {name}."
        findings.append(Finding(found.counted, LOSS, TRAP, sentence, expected, got))
    if declared and found.kind:
        findings.append(_as_declared(declared, found, known, weights, batch, name))
    return findings


def _denominators(probe: Probe, batch: Batch) -> list[Denominator]:
    """What the known losses divide a token's term by."""
    rows, ones = len(batch.kinds), torch.ones(len(batch.kinds))
    lengths, tool = batch.mask.sum(dim=1).float(), (batch.kinds == TOOL).sum(dim=1).float()
    width = batch.kinds.shape[1] - probe.loss.first_column
    prompt = (batch.kinds == PROMPT).sum(dim=1).float()
    return [
        Denominator("GRPO: the mean over a row's tokens, then over rows", rows * lengths, "grpo"),
        Denominator("DAPO: the mean over all tokens of the batch", lengths.sum() * ones, "dapo"),
        Denominator(
            "Dr. GRPO: the sum over a row's tokens, divided by max_new_tokens, then the mean over rows",
            rows * MAX_NEW_TOKENS * ones,
            "drgrpo",
        ),
        Denominator("a mean over all entries, with padding", rows * width * ones),
        Denominator("the sum over a row's tokens, then the mean over rows", rows * ones, "sequence-sum"),
        Denominator("the sum over all tokens", ones, "sum"),
        Denominator("the sum over rows of the mean over a row's tokens", lengths, "row-sum"),
        Denominator(
            "GRPO, but tool output is counted in a row's length", rows * (lengths + tool), counted="tool_output_in_loss"
        ),
        Denominator("DAPO, but tool output is counted", (lengths + tool).sum() * ones, counted="tool_output_in_loss"),
        Denominator(
            "GRPO, but the prompt is counted in a row's length", rows * (lengths + prompt), counted="prompt_trained"
        ),
        Denominator("DAPO, but the prompt is counted", (lengths + prompt).sum() * ones, counted="prompt_trained"),
    ]


def _as_declared(declared: str, found: Denominator, known: list[Denominator], weights, batch: Batch, name) -> Finding:
    """Whether the loss is what the file says in LOSS."""
    said = next(each for each in known if each.kind == declared)
    expected, got = 1 / float(said.divisors[0]), abs(float(weights[0, PROMPT_COLUMNS]))
    if found.kind == declared:
        return Finding("declared", LOSS, OK, f"The loss is {declared}, as the file says.", got, got)
    sentence = f"The file says {declared}, but the loss is {name}."
    return Finding("declared", LOSS, TRAP, sentence, expected, got)


def _per_token(denominator: Denominator, batch: Batch) -> torch.Tensor:
    return denominator.divisors[:, None].expand(batch.kinds.shape)[batch.mask]
