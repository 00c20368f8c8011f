"""The machine that a figure was measured on, and the memory that a run needs."""

import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from common.plumbing.config import ROOT

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


def describe_machine() -> dict:
    """Versions, machine and commit, which every figure needs."""
    return {
        "versions": {"python": platform.python_version()} | {package: version(package) for package in PACKAGES},
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} thread(s)",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": _git_commit(),
    }


def peak_memory_bytes(device: str) -> int:
    """The most memory that the run held: on CUDA of the GPU, else of the process; 0 where nothing tells."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    # Linux has it here; getrusage would begin at the peak of the process that started this one
    status = Path("/proc/self/status")
    for line in status.read_text(encoding="utf-8", errors="replace").splitlines() if status.exists() else ():
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
