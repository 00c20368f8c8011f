"""The doctor's results: one finding per check, with the two numbers that differ, and the report with all findings."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OK, TRAP, NOTE, NOT_EXAMINED = "ok", "TRAP", "note", "not examined"

# The checks of each function that a file may define, in the order of the report. Not every function has all of them:
# `terms` is for losses that return them, `declared` for files with a LOSS.
CHECKS = {
    "policy_loss": "zero_gradient terms off_by_one end_of_turn_masked tokens_left_out prompt_trained "
    "tool_output_in_loss padding_trained advantages_rescaled sign normalisation declared micro_batch_mean padded_width "
    "empty_row one_update clip kl_over_padding kl_gradient whole_loss ignored_values inputs_changed",
    "advantages": "std_wrong_axis baseline advantage_sign divisor equal_rewards_noise",
    "log_probs": "log_probs off_by_one no_temperature gradient_of_log_probs log_probs_in_bfloat16 log_of_softmax",
    "action_mask": "off_by_one end_of_turn_masked prompt_trained padding_trained tokens_left_out mask_from_pad "
    "tool_output_in_loss",
    "generate_inputs": "right_padding_generation prompt_attention",
    "reference_log_probs": "reference_dropout reference_gradient",
}
# The traps with a section of the same name in docs/traps.md
GALLERY = (
    "end_of_turn_masked mask_from_pad no_temperature equal_rewards_noise micro_batch_mean tool_output_in_loss "
    "reference_dropout kl_over_padding std_wrong_axis prompt_trained off_by_one right_padding_generation"
)


class UnusableError(Exception):
    """A file or a function that cannot be examined. The user sees a single sentence, without a traceback."""


@dataclass(frozen=True)
class Finding:
    """The result of one check: `expected` comes from the slow loop, `got` from the user's function."""

    check: str  # its name; for a trap of the gallery, the name of its section
    status: str
    sentence: str
    expected: float | None = None
    got: float | None = None

    @property
    def link(self) -> str:
        return f"docs/traps.md#{self.check}" if self.check in GALLERY.split() else "docs/doctor.md#what-it-tests"


@dataclass
class Report:
    """All findings about a file."""

    path: Path
    functions: dict[str, list[Finding]] = field(default_factory=dict)  # the functions that the file defines
    missing: list[str] = field(default_factory=list)  # functions that the file does not define
    unfinished: list[str] = field(default_factory=list)  # functions with an incomplete examination
    errors: list[str] = field(default_factory=list)  # one sentence for everything that could not be examined

    @property
    def findings(self) -> list[Finding]:
        return [finding for findings in self.functions.values() for finding in findings]

    @property
    def status(self) -> int:
        """The exit status: 2 if something could not be examined, 1 for a trap."""
        return 2 if self.errors else int(self.count(TRAP) > 0)

    def count(self, status: str) -> int:
        return sum(finding.status == status for finding in self.findings)

    def left_out(self, function: str) -> list[str]:
        """The checks without a finding, for a function that is missing or failed."""
        found = {finding.check for finding in self.functions.get(function, ())}
        return [check for check in CHECKS[function].split() if check not in found]


def compare(check: str, expected: Any, got: Any, trap: str, ok: str, tolerance: float = 1e-4) -> Finding:
    """The finding of a check that compares two numbers, or the entries where two tensors differ most."""
    expected, got = farthest(expected, got)
    return either(check, agree(expected, got, tolerance), trap, ok, expected, got)


def farthest(expected: Any, got: Any) -> tuple[float, float]:
    """Two numbers unchanged; from two tensors, the entries that differ most."""
    if isinstance(got, (int, float)):
        return expected, got
    at = (expected - got).abs().argmax()
    return float(expected.flatten()[at]), float(got.flatten()[at])


def either(check: str, is_ok: bool, trap: str, ok: str, expected: Any = None, got: Any = None) -> Finding:
    """The finding of a check with one of these two sentences."""
    return Finding(check, OK if is_ok else TRAP, ok if is_ok else trap, expected, got)


def agree(expected: float, got: float, tolerance: float = 1e-4) -> bool:
    """Whether two numbers are equal up to float32 rounding.

    >>> agree(100.0, 100.001), agree(1.0, 1.01), agree(0.0, float("nan"))
    (True, False, False)
    """
    return math.isfinite(got) and abs(expected - got) <= tolerance * max(abs(expected), abs(got)) + 1e-7


def number(value: float) -> str:
    """A number in the doctor's format.

    >>> number(0.0370370), number(29.0), number(0.0)
    ('0.03704', '29', '0')
    """
    return f"{value + 0.0:.4g}"  # no minus before 0
