"""All checks of one file."""

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from doctor.adapters import LossFunction
from doctor.findings import NOT_EXAMINED, NOTE, OK, TRAP, Finding, UnusableError
from doctor.group_checks import check_advantages
from doctor.model_checks import check_log_probs, check_reference
from doctor.objective import check_objective
from doctor.probe import Probe
from doctor.sequence_checks import check_action_mask, check_generate_inputs
from doctor.user_file import FUNCTIONS, load
from doctor.weights import check_weights

CHECKS = {
    "advantages": check_advantages,
    "log_probs": check_log_probs,
    "action_mask": check_action_mask,
    "generate_inputs": check_generate_inputs,
    "reference_log_probs": check_reference,
}
EXAMINES = {  # traps of the gallery that a function which is missing leaves unexamined
    "policy_loss": "micro_batch_mean, tool_output_in_loss, kl_over_padding and more",
    "advantages": "equal_rewards_noise, std_wrong_axis",
    "log_probs": "no_temperature, off_by_one",
    "action_mask": "end_of_turn_masked, mask_from_pad, prompt_trained, off_by_one",
    "generate_inputs": "right_padding_generation",
    "reference_log_probs": "reference_dropout",
}


# Traps after which the terms of tokens cannot be told from their weights, and those that do not matter for that
FIRST = {"zero_gradient", "off_by_one", "sign", "tokens_left_out", "end_of_turn_masked", "advantages_rescaled"}
HARMLESS = {"micro_batch_mean", "padded_width", "empty_row", "declared"}


@dataclass
class Report:
    """What the doctor found in a file."""

    path: Path
    adapter: str = ""  # of policy_loss
    findings: list[Finding] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # functions that the file does not define, and their checks
    errors: list[str] = field(default_factory=list)  # functions that could not be examined, a sentence each

    @property
    def status(self) -> int:
        """The exit status: 2 if something could not be examined, 1 for a trap."""
        return 2 if self.errors else int(self.count(TRAP) > 0)

    def count(self, status: str) -> int:
        return sum(finding.status == status for finding in self.findings)


def examine(path: Path, adapter: str | None = None) -> Report:
    """Run the file's functions through all checks that concern them.

    Raises:
        UnusableError: the file cannot be run, or defines no function that the doctor knows.
    """
    module = load(path)
    report = Report(path)
    for name in FUNCTIONS:
        if not hasattr(module, name):
            report.missing[name] = EXAMINES[name]
            continue
        try:
            if name == "policy_loss":
                _examine_loss(module, path.resolve(), adapter, report)
            else:
                report.findings += CHECKS[name](module, path.resolve())
        except UnusableError as error:
            report.errors.append(str(error))
    skipped = set(getattr(module, "SKIP", ()))
    report.findings = [_skip(finding) if finding.check in skipped else finding for finding in report.findings]
    return report


def _examine_loss(module: ModuleType, path: Path, adapter: str | None, report: Report) -> None:
    loss = LossFunction(module, adapter)
    report.adapter = loss.adapter
    probe = Probe(loss, path)
    probe.prepare()
    for finding in check_weights(probe, getattr(module, "LOSS", "")):  # one by one: the next check may raise
        report.findings.append(finding)
    traps = {finding.check for finding in report.findings if finding.status == TRAP}
    if traps & FIRST:
        sentence = f"Not examined before another trap is gone: {', '.join(sorted(traps & FIRST))}."
        checks = ("clip", "kl_over_padding", "kl_gradient", "whole_loss")
        report.findings += [Finding(check, "policy_loss", NOT_EXAMINED, sentence) for check in checks]
    else:
        for finding in check_objective(probe, traps - HARMLESS):
            report.findings.append(finding)
    changed = ", ".join(sorted(loss.changed))
    sentence = (
        f"The function writes to its inputs: {changed}." if changed else "The function leaves its inputs as they are."
    )
    status = OK if not changed else NOTE if changed == "log_probs" else TRAP
    report.findings.append(Finding("inputs_changed", "policy_loss", status, sentence))


def _skip(finding: Finding) -> Finding:
    return Finding(finding.check, finding.function, NOT_EXAMINED, "The file's SKIP names it.")
