"""What samples.jsonl and report.html cost a run: seconds, bytes, and how long a browser takes to open the page.

    python benchmarks/page.py                      # defaults of each experiment, about 8 minutes; needs Chromium

Times every call of a run that writes samples, and every one that draws its page, within complete runs of one thread.
Opening is measured from the navigation to the first group of tokens on the screen, in a new page of headless Chromium,
median of five. Writes the entry page of benchmarks/results/measurements.json. Needs the extra browser.
"""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import tyro

from viewer import report
from viewer.results import write_json

from harness.run import run as runs
from harness.run.machine import describe_machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "measurements.json"


@dataclass(frozen=True, kw_only=True)
class Config:
    experiments: tuple[str, ...] = ("experiment_base", "experiment_drgrpo", "experiment_multiturn_tool_calling")
    steps: int | None = None  # of each run; None: the default of its experiment
    runs_dir: Path = Path("runs/page")  # must not hold these runs yet
    chromium: str = "/usr/bin/chromium"  # the browser


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    figures = {name: measure(config, name) for name in config.experiments}
    machine = describe_machine() | {"cores": os.cpu_count()}
    write_json(RESULTS, figures | {"measured": machine}, entry="page")


def measure(config: Config, experiment: str) -> dict[str, float]:
    """Train with seed 0, and measure what the page and its data cost."""
    seconds = {"samples": 0.0, "page": 0.0}

    def timed(function: Callable, what: str) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            seconds[what] += time.perf_counter() - began
            return result

        return call

    write_samples, write_report = runs.write_samples, report.write_report
    runs.write_samples, report.write_report = timed(write_samples, "samples"), timed(write_report, "page")
    flags = ["--runs-dir", str(config.runs_dir), "--name", "seed0", "--seed", "0"]
    flags += ["--steps", str(config.steps)] if config.steps else []
    began = time.perf_counter()
    try:
        load(experiment).main(flags)
    finally:
        runs.write_samples, report.write_report = write_samples, write_report
    total = time.perf_counter() - began
    directory = config.runs_dir / experiment / "seed0"
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text("utf-8").splitlines()]
    trained = sum(row.get("time/step", 0.0) for row in steps)
    figures = {
        "seconds": total,  # with loading and evaluation
        "seconds_of_steps": trained,
        "seconds_writing_samples": seconds["samples"],
        "share_writing_samples": seconds["samples"] / (trained + seconds["samples"]),
        "seconds_writing_page": seconds["page"],
        "bytes_of_samples": (directory / "samples.jsonl").stat().st_size,
        "bytes_of_page": (directory / "report.html").stat().st_size,
        "seconds_opening_page": median(seconds_to_open(config.chromium, directory / "report.html") for _ in range(5)),
    }
    print(experiment, json.dumps(figures, indent=2), flush=True)
    return figures


def load(experiment: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(experiment, ROOT / experiment / "train.py")
    module = sys.modules[experiment] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seconds_to_open(chromium: str, page: Path) -> float:
    """From the navigation to the first group of tokens."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page()
        began = time.perf_counter()
        tab.goto(page.resolve().as_uri())
        tab.wait_for_selector(".completion .token", state="attached")
        seconds = time.perf_counter() - began
        browser.close()
    return seconds


if __name__ == "__main__":
    main()
