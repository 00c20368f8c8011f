"""The machine: its description for a figure, the threads of a run, its memory, and advice when memory runs out."""

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

from common import __version__
from common.errors import UserError

from harness.base.checks import flag
from harness.base.config import ROOT, ConfigT, ModelConfig
from harness.base.ranks import num_launched

# Settings that limit memory and change no update
BATCH_SIZES = ("micro_batch_size", "tokens_per_micro_batch", "generation_batch_size")
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # a container's limit: "max 100000", or microseconds of every 100000
PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
# PyTorch's messages for a failed allocation that raises a RuntimeError and no OutOfMemoryError: from its own
# allocators, from C++, from cuBLAS, and from oneDNN, where this is the whole message
NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "std::bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED")
NO_KERNEL = "could not create a primitive"


def describe_machine() -> dict:
    """Versions, machine and commit, which every figure needs."""
    # --git-dir: in an archive that was unpacked in a checkout of something else, git would find that one's commit
    command = ["git", "-C", str(ROOT), "--git-dir=.git"]
    command += ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    commit = None  # not a checkout, or no git
    with suppress(OSError, subprocess.CalledProcessError):
        commit = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    versions = {"rl-textbook": __version__, "python": platform.python_version()}
    return {
        "versions": versions | {package: version(package) for package in PACKAGES},
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} thread(s)",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": commit,
    }


def with_threads(config: ConfigT) -> ConfigT:
    """Resolve `--threads auto`: OMP_NUM_THREADS, else one, or the physical cores for a large model on the CPU alone."""
    if config.threads != "auto":
        return config
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # it can be a list
    if asked.isdecimal() and int(asked) > 0:
        return dataclasses.replace(config, threads=int(asked))
    is_small = config.kind != "full" or torch.device(config.device).type != "cpu" or num_launched() > 1
    return dataclasses.replace(config, threads=1 if is_small else usable_cores())


def usable_cores() -> int:
    """The number of physical cores that this process may use under its affinity and its container's limit."""
    cores = psutil.cpu_count(logical=False) or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        cores = min(cores, len(os.sched_getaffinity(0)))
    if CPU_LIMIT.is_file() and not (limit := CPU_LIMIT.read_text(encoding="utf-8")).startswith("max"):
        quota, period = map(int, limit.split())
        cores = min(cores, quota // period)
    return max(1, cores)


def peak_memory_bytes(device: str) -> int:
    """The run's peak memory: of the GPU on CUDA, else of the process; 0 if it is unknown."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    # Linux reports it here; getrusage would start at the peak of the parent process
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s*(\d+)", status.read_text(encoding="utf-8"))[1]) * 1024
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the machine is out of memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    is_known = str(error) == NO_KERNEL or any(words in str(error) for words in NO_MEMORY)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and is_known)


def out_of_memory(config: ModelConfig, error: BaseException, resume_command: str | None) -> UserError:
    """One sentence of advice for a program that ran out of memory and, if possible, how to resume it."""
    sizes = {name: getattr(config, name, None) for name in BATCH_SIZES}
    smaller = [f"{flag(name)} {size // 2}" for name, size in sizes.items() if size is not None and size > 1]
    others = [] if getattr(config, "gradient_checkpointing", True) else ["--gradient-checkpointing"]
    others += [] if getattr(config, "lora_rank", 1) else ["--lora-rank 16"]
    what = str(error).strip().partition("\n")[0][:200] or type(error).__name__
    # other flags cannot change when a run resumes
    resume = "" if resume_command is None else f"; resume with: {' '.join([resume_command, *smaller])}"
    return UserError(
        f"memory ran out ({what}); what helps: {', '.join([*smaller, *others, 'a smaller model'])}{resume}"
    )
