"""The machine: its description for a figure, the threads of a run, its memory, and what helps where that runs out."""

import dataclasses
import errno
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import psutil
import torch

from common.errors import UserError

from harness.base.checks import flag
from harness.base.config import ROOT, ConfigT, ModelConfig
from harness.base.ranks import num_launched
from harness.run.settings import BATCH_SIZES

CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of a container: "max 100000", or microseconds of every 100000
PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
# What PyTorch calls an allocation that has failed, where it raises a RuntimeError and no OutOfMemoryError: its own
# allocators, C++'s, and cuBLAS; and oneDNN, of which it is the whole message
NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "std::bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED")
NO_KERNEL = "could not create a primitive"


def describe_machine() -> dict:
    """Versions, machine and commit, which every figure needs."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    commit = None  # not a checkout, or no git
    with suppress(OSError, subprocess.CalledProcessError):
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "versions": {"python": platform.python_version()} | {package: version(package) for package in PACKAGES},
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} thread(s)",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": commit,
    }


def with_threads(config: ConfigT) -> ConfigT:
    """Resolve `--threads auto`: OMP_NUM_THREADS, else one, or the physical cores for a large model on the CPU alone."""
    if config.threads != "auto":
        return config
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # it may be a list
    if asked.isdecimal() and int(asked) > 0:
        return dataclasses.replace(config, threads=int(asked))
    is_small = config.kind != "full" or torch.device(config.device).type != "cpu" or num_launched() > 1
    return dataclasses.replace(config, threads=1 if is_small else usable_cores())


def usable_cores() -> int:
    """The physical cores, and no more than this process may use: by its affinity, and by its container's limit."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    cores = [psutil.cpu_count(logical=False) or 1, len(affinity(0)) if affinity is not None else os.cpu_count() or 1]
    if CPU_LIMIT.is_file():
        quota, period = CPU_LIMIT.read_text(encoding="utf-8").split()
        cores += [] if quota == "max" else [int(quota) // int(period)]
    return max(1, min(cores))


def peak_memory_bytes(device: str) -> int:
    """The most memory that the run held: on CUDA of the GPU, else of the process; 0 where nothing tells."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    # Linux has it here; getrusage would begin at the peak of the process that started this one
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s*(\d+)", status.read_text(encoding="utf-8"))[1]) * 1024
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, that of a device or that of the machine."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = str(error)
    return isinstance(error, RuntimeError) and (words == NO_KERNEL or any(known in words for known in NO_MEMORY))


def out_of_memory(config: ModelConfig, error: BaseException, resume_command: str | None) -> UserError:
    """One sentence on what helps a program that has run out of memory, and how to resume it if it can be resumed."""
    sizes = {name: getattr(config, name, None) for name in BATCH_SIZES}
    smaller = [f"{flag(name)} {size // 2}" for name, size in sizes.items() if size is not None and size > 1]
    others = [] if getattr(config, "gradient_checkpointing", True) else ["--gradient-checkpointing"]
    others += [] if getattr(config, "lora_rank", 1) else ["--lora-rank 16"]
    what = str(error).strip().partition("\n")[0][:200] or type(error).__name__
    sentence = f"memory ran out ({what}); what helps: {', '.join([*smaller, *others, 'a smaller model'])}"
    if resume_command is not None:  # other flags cannot change when it is resumed
        sentence += f"; resume with: {' '.join([resume_command, *smaller])}"
    return UserError(sentence)
