"""The doctor's report, for people and for machines."""

import json
import math
import re
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from doctor.examine import Report
from doctor.findings import NOT_EXAMINED, NOTE, OK, TRAP, Finding, number
from doctor.guard import printable

STYLES = {OK: "green", TRAP: "bold red", NOTE: "yellow", NOT_EXAMINED: "dim"}
SHORT = {NOT_EXAMINED: "-"}


def print_report(report: Report, console: Console) -> None:
    """A line per check, by function; a trap has the two numbers, and where it is explained."""
    with console.capture() as captured:
        _print_findings(report, console)
    text = re.sub(r" +$", "", captured.get(), flags=re.MULTILINE)  # of columns that are padded
    console.file.write(text)
    console.file.flush()


def _print_findings(report: Report, console: Console) -> None:
    adapter = f" (adapter {report.adapter})" if report.adapter not in ("", "native") else ""
    console.print(Text(printable(str(report.path)) + adapter, style="bold"))
    for function in dict.fromkeys(finding.function for finding in report.findings):
        console.print(Text(f"\n{function}"))
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, min_width=6)
        table.add_column(no_wrap=True, min_width=max(len(finding.check) for finding in report.findings))
        table.add_column(overflow="fold")
        for finding in report.findings:
            if finding.function == function:
                status = Text("  " + SHORT.get(finding.status, finding.status), style=STYLES[finding.status])
                table.add_row(status, Text(finding.check), Text(_sentence(finding)))
        console.print(table)
    if report.missing:
        console.print(Text("\nnot examined, as the file does not define them"))
        for function, checks in report.missing.items():
            console.print(Text(f"  {function}: {checks}", style="dim"))
    traps, notes, ok, not_examined = (report.count(status) for status in (TRAP, NOTE, OK, NOT_EXAMINED))
    counts = f"{traps} trap{'s' * (traps != 1)}, {notes} note{'s' * (notes != 1)}, {ok} ok, {not_examined} not examined"
    console.print(Text("\n" + counts, style=STYLES[TRAP if traps else OK]))


def _sentence(finding: Finding) -> str:
    if finding.status != TRAP:
        return finding.sentence
    numbers = f"\nexpected {number(finding.expected)}, got {number(finding.got)}" if _has_numbers(finding) else ""
    return f"{finding.sentence}{numbers}\n{finding.link}"


def _has_numbers(finding: Finding) -> bool:
    return finding.expected is not None and finding.got is not None


def as_json(report: Report) -> str:
    """One JSON object; a number that is not finite is text."""

    def finite(value: float | None) -> float | str | None:
        return str(value) if value is not None and not math.isfinite(value) else value

    findings = [
        asdict(finding) | {"expected": finite(finding.expected), "got": finite(finding.got), "link": finding.link}
        for finding in report.findings
    ]
    entry = {
        "file": str(report.path),
        "adapter": report.adapter or None,
        "findings": findings,
        "not_defined": list(report.missing),
        "errors": report.errors,
        "counts": {status: report.count(status) for status in (OK, TRAP, NOTE, NOT_EXAMINED)},
    }
    return json.dumps(entry, indent=1)
