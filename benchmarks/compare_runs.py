"""Whether two runs are the same training: their metrics and samples, key by key, over their first steps.

    python benchmarks/compare_runs.py runs/experiment_base/old runs/experiment_base/new --steps 3

For changes that must not change what is learned. Keys that have been renamed since the old run are looked up in
benchmarks/renamed_keys.json; keys that are new are ignored, as is what was measured (time/, memory/). Prints how many
values are equal bit for bit, and the largest relative difference of each key whose values are not; the exit status is 1
if one is larger than --tolerance, or if a key is missing.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

RENAMED = Path(__file__).resolve().parent / "renamed_keys.json"


@dataclass(frozen=True)
class Config:
    old: tyro.conf.Positional[Path]  # directory of the run to compare with
    new: tyro.conf.Positional[Path]  # directory of the run to compare
    steps: int = 3  # how many of the first steps are compared; 0 (before training) is compared too
    tolerance: float = 1e-6  # the largest difference, relative to the old value, or absolute below 1


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    is_same = True
    for name in ("metrics", "samples"):
        num_values, differences, missing = compare(config, name)
        print(f"{name}.jsonl, steps 0 to {config.steps}: {num_values} values, {num_values - len(differences)} equal")
        largest: dict[str, float] = {}
        for key, difference in differences:
            largest[key] = max(difference, largest.get(key, 0.0))
        for key, difference in largest.items():
            print(f"    {key}: differs by up to {difference:.1e}")
        for key in missing:
            print(f"    {key}: missing")
        is_same &= not missing and all(difference <= config.tolerance for difference in largest.values())
    sys.exit(0 if is_same else 1)


def compare(config: Config, name: str) -> tuple[int, list[tuple[str, float]], list[str]]:
    """How many values were compared, those that differ and by how much, and the keys that the new run lacks."""
    renamed = json.loads(RENAMED.read_text(encoding="utf-8"))[name]
    rows = [list(rows_of(run / f"{name}.jsonl", config.steps)) for run in (config.old, config.new)]
    num_values, differences, missing = 0, [], []
    if len(rows[0]) != len(rows[1]):
        missing.append(f"{len(rows[0])} rows against {len(rows[1])}: some")
    for old, new in zip(*rows, strict=False):
        for old_key, value in old.items():
            key = renamed.get(old_key, old_key)
            if key.startswith(("time/", "memory/")):
                continue
            num_values += 1
            if key not in new:
                missing.append(key)
            elif new[key] != value:
                differences.append((key, distance(value, new[key])))
    return num_values, differences, missing


def rows_of(path: Path, num_steps: int) -> Iterator[dict]:
    """The lines of a JSONL file up to a step; the evaluation after the last step is a second line, and left out."""
    seen = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        is_repeated = path.name == "metrics.jsonl" and row["step"] in seen
        seen.add(row["step"])
        if row["step"] <= num_steps and not is_repeated:
            yield row


def distance(old: object, new: object) -> float:
    """The largest difference between two values or lists of values; infinite if they are no numbers."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return max((distance(a, b) for a, b in zip(old, new, strict=True)), default=0.0)
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return max((distance(old[key], new[key]) for key in old), default=0.0)
    if isinstance(old, int | float) and isinstance(new, int | float):
        return abs(new - old) / max(1.0, abs(old))
    return 0.0 if old == new else math.inf


if __name__ == "__main__":
    main()
