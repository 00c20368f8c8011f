"""All checks of one file."""

from collections.abc import Callable, Iterator
from pathlib import Path

from doctor import functions
from doctor.examined_loss import Loss
from doctor.findings import CHECKS, NOT_EXAMINED, NOTE, TRAP, Finding, Report, UnusableError, either
from doctor.objective import check_objective
from doctor.user_file import UserFile
from doctor.weights import check_weights, check_without_advantages

# After the traps in FIRST, the terms of tokens cannot be told from their weights; HARMLESS traps do not affect them
FIRST = {"zero_gradient", "off_by_one", "sign", "tokens_left_out", "end_of_turn_masked", "advantages_rescaled"}
HARMLESS = {"micro_batch_mean", "padded_width", "empty_row", "declared"}
OF_ADVANTAGES = ("advantages_rescaled", "sign", "normalisation", "micro_batch_mean", "empty_row", "one_update", "clip")
OF_ADVANTAGES += ("kl_over_padding", "kl_gradient", "whole_loss")  # checks that need them


def examine(path: Path, announce: Callable[[str, Report], None] = lambda what, report: None) -> Report:
    """Run all applicable checks on the file's functions.

    `announce` is called before every call of the user's code, with the findings so far.
    """
    report = Report(path)
    try:
        file = UserFile(path, lambda what: announce(what, report))
    except UnusableError as error:
        report.errors.append(str(error))
        return report
    report.missing = [name for name in CHECKS if not hasattr(file.module, name)]
    report.unfinished = [name for name in CHECKS if hasattr(file.module, name)]
    for name in [*report.unfinished]:
        check = check_loss if name == "policy_loss" else getattr(functions, f"check_{name}")
        findings = report.functions[name] = []
        try:
            for finding in check(file):  # one by one: the next one may raise
                skipped = Finding(finding.check, NOT_EXAMINED, "The file's SKIP names it.")
                findings.append(skipped if finding.check in file.skipped else finding)
            report.unfinished.remove(name)
        except UnusableError as error:
            report.errors.append(str(error))
    return report


def check_loss(file: UserFile) -> Iterator[Finding]:
    """All checks of the user's `policy_loss`."""
    loss = Loss(file)
    traps = set()
    has_advantages = "advantages" in loss.knows
    for finding in check_weights(loss, file.declared) if has_advantages else check_without_advantages(loss):
        traps |= {finding.check} if finding.status == TRAP else set()
        yield finding
    if not has_advantages:
        sentence = "The loss takes no advantages (as one of pairs, DPO's): a token has no weight to compare."
        yield from (Finding(check, NOT_EXAMINED, sentence) for check in OF_ADVANTAGES)
    elif traps & FIRST:
        sentence = f"Not examined before another trap is gone: {', '.join(sorted(traps & FIRST))}."
        checks = ("one_update", "clip", "kl_over_padding", "kl_gradient", "whole_loss")
        yield from (Finding(check, NOT_EXAMINED, sentence) for check in checks)
    else:
        yield from check_objective(loss, traps - HARMLESS)
    sentence = f"The function writes to its inputs: {', '.join(sorted(loss.changed))}."
    if loss.changed == {"log_probs"}:
        yield Finding("inputs_changed", NOTE, sentence)
    else:
        yield either("inputs_changed", not loss.changed, sentence, "The function leaves its inputs as they are.")
