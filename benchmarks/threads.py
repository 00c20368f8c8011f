"""What more threads than one gain on idle cores and cost on busy ones, and what `--threads auto` chooses.

    python benchmarks/threads.py                   # about 14 minutes on two idle cores; Linux

Complete short runs of experiment_base, wall-clock seconds from start to end; the variants take turns. Three situations:

- idle: nothing is started beside the run. Whether the machine was idle, the figures say: `others` is how many cores
  other processes used during the run, `load` the load average before it.
- busy: a process spins on every core, from before the run until after it.
- busy later: the same, but they start in the middle of the run, which no measurement at its start can foresee.

In "all, spinning" threads that wait spin as long as GNU OpenMP lets them by default; in the others as long as
common/plumbing/interrupt.py says. Writes the entry threads of benchmarks/results/measurements.json, after every run,
and prints medians and their ratio to one thread.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tyro

from viewer.results import read_json, write_json

from common.plumbing.machine import describe_machine
from common.plumbing.threads import usable_cores

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "measurements.json"
ALL = str(usable_cores())
VARIANTS = {  # the flag, and the environment
    "1": ("1", {}),
    "auto": ("auto", {}),
    "all": (ALL, {}),
    "all, spinning": (ALL, {"GOMP_SPINCOUNT": "300000"}),
}
OF_OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@dataclass(frozen=True, kw_only=True)
class Config:
    idle: int = 3  # runs of each variant on idle cores
    busy: int = 1  # on busy cores
    later: int = 1  # on cores that become busy in the middle of the run
    steps: int = 6  # of each run
    flags: str = "--eval-every 0 --eval-prompts 16 --checkpoint-every 0"  # of train.py, for all runs
    entry: str = "three runs"  # in threads of the results, for what is measured


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    for name in OF_OPENMP:
        os.environ.pop(name, None)
    figures: dict = {"steps": config.steps, "flags": config.flags, "cores": usable_cores(), "runs": []}
    figures["measured"] = describe_machine()
    for situation, repetitions in (("idle", config.idle), ("busy", config.busy), ("busy later", config.later)):
        for _ in range(repetitions):
            for variant in VARIANTS:
                figures["runs"].append(
                    {"situation": situation, "variant": variant} | measure(config, situation, variant)
                )
                figures["medians"] = summarise(figures["runs"])
                write_json(RESULTS, read_json(RESULTS, "threads") | {config.entry: figures}, entry="threads")
                print(figures["runs"][-1], flush=True)
    for row in figures["medians"]:
        print(row)


def measure(config: Config, situation: str, variant: str) -> dict:
    """One run: its seconds in all and in its steps, how many threads it had, and how busy the machine was."""
    threads, environment = VARIANTS[variant]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "experiment_base" / "train.py"), "--threads", threads, "--device", "cpu"]
        command += ["--steps", str(config.steps), "--runs-dir", folder, "--name", "x", *config.flags.split()]
        directory = Path(folder) / "experiment_base" / "x"
        load, before = os.getloadavg()[0], busy_seconds() - own_seconds()
        with spinning(usable_cores() if situation == "busy" else 0):
            began = time.perf_counter()
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            with subprocess.Popen(command, env=os.environ | environment, **quiet) as process:
                if situation == "busy later":
                    wait_for_step(process, directory, config.steps // 3)
                with spinning(usable_cores() if situation == "busy later" else 0):
                    status = process.wait()
                    seconds = time.perf_counter() - began
        if status:
            raise SystemExit(f"{' '.join(command)} ended with status {status}")
        settings = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        in_steps = sum(row.get("time/step", 0.0) for row in metrics(directory))
    others = (busy_seconds() - own_seconds() - before) / seconds
    return {
        "threads": settings["threads"],
        "seconds": round(seconds, 2),
        "seconds_in_steps": round(in_steps, 2),
        "load": load,
        "others": round(others, 2),
    }


def summarise(runs: list[dict]) -> list[dict]:
    """Medians of every situation and variant, and their ratios to one thread."""
    rows = []
    for situation, variant in dict.fromkeys((run["situation"], run["variant"]) for run in runs):
        of_both = [[r for r in runs if r["situation"] == situation and r["variant"] == name] for name in (variant, "1")]
        row = {"situation": situation, "variant": variant, "threads": [run["threads"] for run in of_both[0]]}
        for name in ("seconds", "seconds_in_steps"):
            mine, ones = (median(run[name] for run in found) for found in of_both)
            row |= {name: round(mine, 2), f"{name}_to_one_thread": round(mine / ones, 3)}
        rows.append(row | {"others": median(run["others"] for run in of_both[0])})
    return rows


@contextmanager
def spinning(number: int) -> Iterator[None]:
    """Let so many processes use all the time that they get, within the block."""
    program = f"import os\nwhile os.getppid() == {os.getpid()}: pass"  # it ends with this process, however that ends
    started = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(number)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def wait_for_step(process: subprocess.Popen, directory: Path, step: int) -> None:
    while process.poll() is None and not any(row["step"] >= step for row in metrics(directory)):
        time.sleep(0.05)


def metrics(directory: Path) -> list[dict]:
    """The rows that are complete."""
    path, rows = directory / "metrics.jsonl", []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def busy_seconds() -> float:
    """Seconds of all cores that were not idle, since the machine started, and that the host took away."""
    times = [int(ticks) for ticks in Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]]
    return (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Of this process and of all that it has started and that have ended, those that spin included."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    main()
