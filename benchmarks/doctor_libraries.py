"""What the loss doctor says of the losses of TRL and verl.

    python benchmarks/doctor_libraries.py          # 2 minutes; needs requirements-bench.txt

verl 0.9.1 is examined if it can be imported (`pip install --no-deps verl==0.9.1`, and what it then asks for). Writes
the entry doctor_libraries of benchmarks/results/measurements.json: all findings of every loss, with their numbers.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import tyro

from viewer.results import write_json

from common.plumbing.machine import describe_machine

RESULTS = Path(__file__).resolve().parent / "results" / "measurements.json"
TRL = "from trl import GRPOTrainer\n\npolicy_loss = GRPOTrainer\nSETTINGS = {{'loss_type': '{}'}}\n"
VERL = "from verl.trainer.ppo.core_algos import {} as {}\n"
FILES = {
    **{f"trl {loss}": TRL.format(loss) for loss in ("dapo", "grpo", "dr_grpo", "bnpo", "luspo")},
    **{
        f"verl vanilla, {mode}": VERL.format("compute_policy_loss_vanilla", "policy_loss")
        + f"\nSETTINGS = {{'loss_agg_mode': '{mode}'}}\n"
        for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    },
    "verl advantages": VERL.format("compute_grpo_outcome_advantage", "advantages"),
}


@dataclass(frozen=True)
class Config:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    tyro.cli(Config, args=arguments, description=__doc__)
    found = {name: examine(content) for name, content in FILES.items() if version_of(name.split()[0])}
    versions = {name: version_of(name) for name in ("trl", "verl")}
    figures = {"losses": found, "libraries": versions, "measured": describe_machine()}
    write_json(RESULTS, figures, entry="doctor_libraries")


def examine(content: str) -> list[dict]:
    """The doctor's findings about a file with this content, without those that are not about it."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "loss.py"
        path.write_text(content, encoding="utf-8")
        command = [sys.executable, "-m", "doctor", str(path), "--json"]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode not in (0, 1):
        sys.exit(f"error: the doctor cannot examine\n{content}\n{result.stderr[-2000:]}")
    findings = [finding for finding in json.loads(result.stdout)["findings"] if finding["status"] != "not examined"]
    traps = [finding for finding in findings if finding["status"].lower() == "trap"]
    numbers = "; ".join(f"{trap['check']}: {trap['expected']:.4g}, {trap['got']:.4g}" for trap in traps)
    print(f"{content.splitlines()[-1]}  {numbers or 'no trap'}", flush=True)
    return findings


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
