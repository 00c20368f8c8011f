"""The report of an audit: for people, and as JSON."""

import math

from common.tasks.audit.findings import Finding, Place, Report

from common.plumbing.terminal import printable, say

SHOWN = 3  # rows of a finding that people see
EXAMPLES = 10  # rows of a finding whose text is in the JSON; of all others only the place


def as_json(report: Report) -> dict:
    return {
        "task": report.task,
        "sources": report.sources,
        "rows": report.num_rows,
        "rows_after_filters": report.num_kept,
        "model": report.model,
        "context": None if report.context == math.inf else int(report.context),
        "max_new_tokens": report.max_new_tokens,
        "findings": [
            {
                "name": finding.name,
                "what": finding.title,
                "is_problem": finding.is_problem,
                "rows": len(finding.places),
                "of": finding.of,
                "examples": [place._asdict() for place in finding.places[:EXAMPLES]],
                "places": [place.place for place in finding.places],
            }
            for finding in report.findings
        ],
        "tokens": [
            {
                "name": lengths.name,
                "texts": len(lengths.tokens),
                "median": lengths.percentile(0.5),
                "90%": lengths.percentile(0.9),
                "99%": lengths.percentile(0.99),
                "longest": max(lengths.tokens),
                "limit": None if lengths.limit == math.inf else int(lengths.limit),
                "beyond_limit": lengths.num_beyond,
            }
            for lengths in report.lengths
        ],
    }


def print_report(report: Report) -> None:
    for of, source in report.sources.items():
        filtered = report.num_rows[of] - report.num_kept[of]
        say(f"{of}: {source}, {report.num_rows[of]:,} rows" + (f", {filtered:,} filtered out" if filtered else ""))
    if "evaluation" not in report.sources:
        say("evaluation: no file of its own; a run holds out rows of --data")
    for title, findings in (("problems", report.problems), ("notes", report.notes)):
        say(f"\n{title}: none" if not findings else f"\n{title}")
        for finding in findings:
            _print_finding(finding)
    _print_lengths(report)


def _print_finding(finding: Finding) -> None:
    share = len(finding.places) / max(1, finding.of)
    say(f"  {len(finding.places):>6,} ({share:.1%})  {finding.title}")
    for place in finding.places[:SHOWN]:
        say(f"            {_shown(place)}")
    if len(finding.places) > SHOWN:
        say("            ...")


def _shown(place: Place) -> str:
    return printable(f"{place.place.rpartition('/')[2]}: {place.text}", 120)


def _print_lengths(report: Report) -> None:
    context = "unlimited" if report.context == math.inf else f"{int(report.context):,}"
    say(
        f"\ntokens of {report.model} (context {context}; --max-new-tokens {report.max_new_tokens:,})\n"
        f"  {'':36}{'texts':>8}{'median':>8}{'90 %':>8}{'99 %':>8}{'longest':>9}{'limit':>8}   beyond it"
    )
    for lengths in report.lengths:
        percentiles = "".join(f"{lengths.percentile(share):>8,}" for share in (0.5, 0.9, 0.99))
        limit = "none" if lengths.limit == math.inf else f"{int(lengths.limit):,}"
        beyond = f"{lengths.num_beyond:,} ({lengths.num_beyond / len(lengths.tokens):.1%})"
        say(f"  {lengths.title:36}{len(lengths.tokens):>8,}{percentiles}{max(lengths.tokens):>9,}{limit:>8}   {beyond}")
