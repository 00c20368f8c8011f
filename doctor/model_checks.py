"""Checks of `log_probs` and `reference_log_probs`: what is computed from a model's logits."""

from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import nn

from doctor.adapters import arguments
from doctor.findings import NOTE, OK, TRAP, Finding, UnusableError, compare
from doctor.formulas import log_softmax
from doctor.guard import call

TEMPERATURE = 0.7


def check_log_probs(module: ModuleType, path: Path) -> list[Finding]:
    """All checks of the user's `log_probs(logits, sequences, temperature)`."""
    name = "log_probs"
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(2, 6, 11, generator=generator)
    sequences = torch.randint(11, (2, 6), generator=generator)
    got = _log_probs(module, path, logits, sequences, TEMPERATURE)
    expected = _by_hand(logits, sequences, TEMPERATURE, 1)
    at = int((expected - got).abs().argmax())
    numbers = float(expected.flatten()[at]), float(got.flatten()[at])
    findings = []
    plain = _by_hand(logits, sequences, 1.0, 1)
    if torch.allclose(expected, got, atol=1e-3, rtol=1e-3):
        findings.append(Finding("off_by_one", name, OK, "Entry t is about token t+1, under the logits at t."))
        findings.append(Finding("no_temperature", name, OK, "The logits are divided by the temperature.", *numbers))
    elif torch.allclose(plain, got, atol=1e-3, rtol=1e-3):
        sentence = f"The logits are not divided by the temperature of {TEMPERATURE}, with which was sampled."
        findings = [Finding("off_by_one", name, OK, "Entry t is about token t+1, under the logits at t.")]
        findings.append(Finding("no_temperature", name, TRAP, sentence, *numbers))
    elif any(_equals_shifted(got, logits, sequences, temperature) for temperature in (TEMPERATURE, 1.0)):
        sentence = "The logits at a token are those for the next one, but here they score the token itself."
        findings.append(Finding("off_by_one", name, TRAP, sentence, *numbers))
        return findings
    else:
        sentence = "The log-probs are not those of a slow loop, at any temperature or shift."
        return [Finding("log_probs", name, TRAP, sentence, *numbers)]
    findings.append(_gradient(module, path, logits, sequences, findings))
    return [*findings, _bfloat16(module, path), _far_logits(module, path)]


def _log_probs(module: ModuleType, path: Path, logits, sequences, temperature: float) -> torch.Tensor:
    name = "log_probs"
    values = {"logits": logits.clone(), "sequences": sequences.clone(), "temperature": temperature}
    in_order, by_name = arguments(module.log_probs, name, values, 2)
    result = call(name, path, module.log_probs, *in_order, **by_name)
    result = result[0] if isinstance(result, tuple) else result
    shape = (sequences.shape[0], sequences.shape[1] - 1)
    if not isinstance(result, torch.Tensor) or tuple(result.shape) != shape:
        shown = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise UnusableError(f"log_probs must return a tensor of shape {shape}, (B, T-1), not {shown}")
    return result


def _by_hand(logits: torch.Tensor, sequences: torch.Tensor, temperature: float, shift: int) -> torch.Tensor:
    """Log-probs of token t under the logits at t - shift, one at a time, without the first token: (B, T-1)."""
    rows, length = sequences.shape
    return torch.tensor(
        [
            [log_softmax(logits[b, t - shift].tolist(), temperature)[sequences[b, t]] for t in range(1, length)]
            for b in range(rows)
        ]
    )


def _equals_shifted(got: torch.Tensor, logits: torch.Tensor, sequences: torch.Tensor, temperature: float) -> bool:
    """Whether tokens are scored by the logits at their own place, all but the first, or all but the last."""
    but_first = _by_hand(logits, sequences, temperature, 0)
    but_last = _by_hand(logits.roll(1, dims=1), sequences.roll(1, dims=1), temperature, 0)
    return any(torch.allclose(got.float(), part, atol=1e-3, rtol=1e-3) for part in (but_first, but_last))


def _bfloat16(module: ModuleType, path: Path) -> Finding:
    """Logits as a model in bfloat16 gives them, over a larger vocabulary."""
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(1, 4, 4096, generator=generator)).bfloat16()
    sequences = torch.randint(4096, (1, 4), generator=generator)
    got = _log_probs(module, path, logits, sequences, 1.0).float()
    expected = _by_hand(logits.float(), sequences, 1.0, 1)
    at = int((expected - got).abs().argmax())
    numbers = float(expected.flatten()[at]), float(got.flatten()[at])
    trap = "Logits in bfloat16 are not computed with in float32: log-probs are wrong in the third digit."
    ok = "Logits in bfloat16 give log-probs in float32."
    return compare("log_probs_in_bfloat16", "log_probs", *numbers, trap, ok, 1e-3)


def _far_logits(module: ModuleType, path: Path) -> Finding:
    logits = torch.tensor([[[0.0, 200.0, -100.0], [0.0, 0.0, 0.0]]])
    got = float(_log_probs(module, path, logits, torch.tensor([[1, 2]]), 1.0))
    trap = "The logarithm is taken after the softmax: a token far below the most probable one has minus infinity."
    return compare("log_of_softmax", "log_probs", -300.0, got, trap, "Logits far apart give finite log-probs.")


def _gradient(
    module: ModuleType, path: Path, logits: torch.Tensor, sequences: torch.Tensor, findings: list[Finding]
) -> Finding:
    """The derivative of a log-prob by its own logit is (1 - p) / temperature."""
    temperature = 1.0 if any(finding.status == TRAP for finding in findings) else TEMPERATURE  # the one that is used
    leaf = logits.clone().requires_grad_()
    result = _log_probs(module, path, leaf, sequences, TEMPERATURE)
    token = int(sequences[0, 1])
    p = float(torch.tensor(log_softmax(logits[0, 0].tolist(), temperature)[token]).exp())
    got = 0.0
    if result.requires_grad:
        got = float(torch.autograd.grad(result[0, 0], leaf)[0][0, 0, token])
    trap = "The gradient of a log-prob by the logit of its token is wrong."
    ok = "The gradient by the logits is that of a softmax."
    return compare("gradient_of_log_probs", "log_probs", (1 - p) / temperature, got, trap, ok, 1e-3)


class TinyModel(nn.Module):
    """A causal model with dropout, called as those of transformers are."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(13, 16), nn.Linear(16, 13)
        self.dropout = nn.Dropout(0.5)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_) -> SimpleNamespace:
        hidden = self.embedding(input_ids).cumsum(dim=1)
        return SimpleNamespace(logits=self.head(self.dropout(hidden)))


def check_reference(module: ModuleType, path: Path) -> list[Finding]:
    """The user's `reference_log_probs(model, sequences, attention_mask)`, twice, of a model in training mode."""
    name = "reference_log_probs"
    model = TinyModel().train()
    sequences = torch.tensor([[1, 5, 6, 7, 2], [1, 8, 2, 0, 0]])
    values = {"model": model, "sequences": sequences, "attention_mask": (sequences > 0).long()}
    in_order, by_name = arguments(module.reference_log_probs, name, values, 3)
    results = []
    for _ in range(2):
        model.train()
        result = call(name, path, module.reference_log_probs, *in_order, **by_name)
        shape = (2, 4)
        if not isinstance(result, torch.Tensor) or tuple(result.shape) != shape:
            raise UnusableError(f"{name} must return a tensor of shape {shape}, (B, T-1)")
        results.append(result)
    first, second = (result.detach().flatten() for result in results)
    at = int((first - second).abs().argmax())
    trap = "Two calls give different log-probs: dropout is on when the model is in training mode."
    ok = "Two calls give the same log-probs of a model that was in training mode, with dropout."
    findings = [compare("reference_dropout", name, float(first[at]), float(second[at]), trap, ok)]
    if results[0].requires_grad:
        sentence = "The reference's log-probs have a gradient, which costs memory and is needed for nothing."
        findings.append(Finding("reference_gradient", name, NOTE, sentence))
    return findings
