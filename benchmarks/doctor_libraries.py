"""What the loss doctor says of the losses of TRL and verl.

    python benchmarks/doctor_libraries.py          # 2 minutes; needs the extra bench

verl 0.9.1 is examined if it can be imported (`pip install --no-deps verl==0.9.1`, and what it then asks for). Writes
the entry doctor_libraries of benchmarks/results/measurements.json: all findings of every loss, with their numbers.
"""

import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import tyro

from doctor.apart import examine_apart
from doctor.findings import NOT_EXAMINED, TRAP
from viewer.results import write_json

from harness.run.machine import describe_machine

ROOT = Path(__file__).resolve().parents[1]
LOSSES = {  # of each library: the values of the constant in its docs/loss_*.py
    "trl": ("dapo", "grpo", "dr_grpo", "bnpo", "luspo"),
    "verl": ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
}


@dataclass(frozen=True)
class Config:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    tyro.cli(Config, args=arguments, description=__doc__)
    versions = {library: version_of(library) for library in LOSSES}
    found = {
        f"{library} {value}": examine(library, value)
        for library, values in LOSSES.items()
        for value in values
        if versions[library]
    }
    figures = {"losses": found, "libraries": versions, "measured": describe_machine()}
    write_json(ROOT / "benchmarks/results/measurements.json", figures, entry="doctor_libraries")


def examine(library: str, value: str) -> list[dict]:
    """The doctor's findings about a loss of the library's, without those that are not about it."""
    text = (ROOT / f"docs/loss_{library}.py").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "loss.py"
        path.write_text(re.sub(r'^(LOSS_\w+) = ".*?"', rf'\1 = "{value}"', text, flags=re.MULTILINE), encoding="utf-8")
        report = examine_apart(path)
    if report.errors:
        sys.exit(f"error: the doctor cannot examine {value} of {library}: {report.errors[0]}")
    traps = [finding for finding in report.findings if finding.status == TRAP]
    numbers = "; ".join(f"{trap.check}: {trap.expected:.4g}, {trap.got:.4g}" for trap in traps)
    print(f"{library} {value}: {numbers or 'no trap'}", flush=True)
    return [
        asdict(finding) | {"function": function, "link": finding.link}
        for function, findings in report.functions.items()
        for finding in findings
        if finding.status != NOT_EXAMINED
    ]


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
