"""What the doctor says: one finding per check, with the two numbers that differ."""

import math
from dataclasses import dataclass

OK, TRAP, NOTE, NOT_EXAMINED = "ok", "TRAP", "note", "not examined"

# The traps that have a section of docs/traps.md, which is named like them
GALLERY = (
    "end_of_turn_masked",
    "mask_from_pad",
    "no_temperature",
    "equal_rewards_noise",
    "micro_batch_mean",
    "tool_output_in_loss",
    "reference_dropout",
    "kl_over_padding",
    "std_wrong_axis",
    "prompt_trained",
    "off_by_one",
    "right_padding_generation",
)


class UnusableError(Exception):
    """A file or a function that cannot be examined: shown as one sentence, without a traceback."""


@dataclass(frozen=True)
class Finding:
    """What one check found: `expected` is what the slow loop gives, `got` what the user's function gave."""

    check: str  # its name, for a trap of the gallery that of its section
    function: str  # the user's function that was called
    status: str
    sentence: str
    expected: float | None = None
    got: float | None = None

    @property
    def link(self) -> str:
        return f"docs/traps.md#{self.check}" if self.check in GALLERY else "docs/doctor.md#what-it-tests"


def compare(
    check: str, function: str, expected: float, got: float, trap: str, ok: str, tolerance: float = 1e-4
) -> Finding:
    """The finding of a check that compares two numbers; `trap` and `ok` are its two sentences."""
    if agree(expected, got, tolerance):
        return Finding(check, function, OK, ok, expected, got)
    return Finding(check, function, TRAP, trap, expected, got)


def agree(expected: float, got: float, tolerance: float = 1e-4) -> bool:
    """Whether two numbers are equal but for rounding in float32.

    >>> agree(100.0, 100.001), agree(1.0, 1.01), agree(0.0, float("nan"))
    (True, False, False)
    """
    return math.isfinite(got) and abs(expected - got) <= tolerance * max(abs(expected), abs(got)) + 1e-7


def number(value: float) -> str:
    """A number as the doctor writes it.

    >>> number(0.0370370), number(29.0), number(0.0)
    ('0.03704', '29', '0')
    """
    return f"{value + 0.0:.4g}"  # no minus before 0
