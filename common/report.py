"""What is told of a run when it ends, and of the machine that it ran on."""

import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten

import torch

from common.config import ROOT
from common.evaluate import Evaluation

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
SHOWN_EVALUATION = {  # of evaluate(): what the closing table shows
    "greedy accuracy": "greedy/accuracy",
    "sampled accuracy (mean@8)": "sampled/accuracy",
    "at least one of 8 right (pass@8)": "sampled/pass@8",
    "share worked out": "sampled/worked",
    "accuracy where worked out": "sampled/accuracy_worked",
    "accuracy where answered at once": "sampled/accuracy_blurted",
    "completion length (tokens)": "sampled/length",
}


def describe_machine() -> dict:
    """Versions, machine and commit: what a figure needs beside it."""
    return {
        "versions": {"python": platform.python_version()} | {package: version(package) for package in PACKAGES},
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} thread(s)",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": _git_commit(),
    }


def peak_memory_bytes(device: str) -> int:
    """The most memory that the run held: of the GPU on CUDA, else of the process; 0 where nothing tells."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    # Linux has it here; getrusage would begin at the peak of the process that started this one
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _git_commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None  # not a checkout, or no git


def show_before_and_after(
    directory: Path, rows: list[dict], before: Evaluation, after: Evaluation, gain: dict[str, float]
) -> None:
    """Print what a run has gained: held-out figures, three questions answered before and after, where to look on."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(title=f"{len(rows)} held-out questions")
    for heading in ("", "before", "after"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    columns = (before.metrics, after.metrics)
    for label, name in SHOWN_EVALUATION.items():
        table.add_row(label, *(f"{values[name]:.3f}" if name in values else "-" for values in columns))
    console.print(table)
    print("the gain in sampled accuracy: " + ", ".join(f"{part} {value:+.3f}" for part, value in gain.items()) + "\n")

    table = Table(title="The greedy answer", show_lines=True)
    for heading in ("question", "right", "before", "after"):
        table.add_column(heading, overflow="fold")
    for row, *texts in list(zip(rows, before.greedy_texts, after.greedy_texts, strict=True))[:3]:
        table.add_row(*(escape(shorten(text, 160)) for text in (row["question"], str(row["answer"]), *texts)))
    console.print(table)
    print(f"run:          {directory}")
    print(f"curve:        {directory / 'curve.png'}")
    print(f"TensorBoard:  tensorboard --logdir {directory.parent}")
