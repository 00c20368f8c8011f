"""Run a file's loss function, masks and advantages through numeric tests for known traps.

    python -m doctor my_loss.py                 # docs/loss_template.py shows what the file may define
    python -m doctor experiment_base/train.py

The file is executed, as `python my_loss.py` would do: use it only with code that you trust. Exit status: 0 without a
trap, 1 with one, 2 if the file or one of its functions cannot be examined.
"""

import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import tyro
from rich.console import Console
from rich.text import Text

from doctor.apart import examine_apart
from doctor.findings import NOT_EXAMINED, NOTE, OK, TRAP, Finding, Report, number

STYLES = {OK: "green", TRAP: "bold red", NOTE: "yellow", NOT_EXAMINED: "dim"}


@dataclass(frozen=True)
class Config:
    file: tyro.conf.Positional[Path]  # Python file that defines policy_loss, advantages, ...


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    sys.stdout.reconfigure(errors="backslashreplace")  # some encodings lack some characters
    config = tyro.cli(Config, args=arguments, description=__doc__, prog="python -m doctor")
    try:
        report = examine_apart(config.file)
        if report.functions:
            console = Console(highlight=False)
            print_report(report, console if console.is_terminal else Console(highlight=False, width=120))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader is gone, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    for error in report.errors:
        print(f"error: {error}", file=sys.stderr)
    return report.status


def print_report(report: Report, console: Console) -> None:
    """One line per check, by function; a trap shows the two numbers, and the section that explains it."""
    console.print(Text(str(report.path), style="bold"))
    longest = max((len(finding.check) for finding in report.findings), default=0)
    for function, findings in report.functions.items():
        if findings:
            console.print(f"\n{function}")
        for finding in _joined(findings):
            status = "-" if finding.status == NOT_EXAMINED else finding.status
            head, lines = f"  {status:<4}  {finding.check:<{longest}}  ", [finding.sentence]
            if finding.status == TRAP and finding.expected is not None and finding.got is not None:
                lines.append(f"expected {number(finding.expected)}, got {number(finding.got)}")
            lines += [finding.link] if finding.status == TRAP else []
            text = Text(_hanging(head, lines, console.width))
            text.stylize(STYLES[finding.status], 0, 6)
            console.print(text)
    num_not_examined = report.count(NOT_EXAMINED)
    reasons = {"as the file does not define them": report.missing, "because of an error": report.unfinished}
    for why, functions in reasons.items():
        if functions:
            console.print(f"\nnot examined, {why}")
        for function in functions:
            left_out = report.left_out(function)
            num_not_examined += len(left_out)
            console.print(Text(_hanging(f"  {function}: ", [", ".join(left_out)], console.width), style="dim"))
    traps, notes, ok = (report.count(status) for status in (TRAP, NOTE, OK))
    counts = f"{traps} trap{'s' * (traps != 1)}, {notes} note{'s' * (notes != 1)}, {ok} ok"
    console.print(f"\n{counts}, {num_not_examined} not examined", style=STYLES[TRAP if traps else OK])


def _joined(findings: list[Finding]) -> Iterator[Finding]:
    """One entry for successive checks that are not examined for the same reason."""
    for (status, sentence), same in groupby(findings, key=lambda finding: (finding.status, finding.sentence)):
        same = list(same)
        checks = [finding.check for finding in same]
        if status == NOT_EXAMINED and len(checks) > 1:
            yield Finding(f"{len(checks)} checks", status, f"{sentence} They are: {', '.join(checks)}.")
        else:
            yield from same


def _hanging(head: str, lines: list[str], width: int) -> str:
    """Wrap lines next to a label."""
    space = max(width - len(head), 20)
    wrapped = [part for line in lines for part in textwrap.wrap(line, space, break_on_hyphens=False)]
    return head + ("\n" + " " * len(head)).join(wrapped)


if __name__ == "__main__":
    sys.exit(main())
