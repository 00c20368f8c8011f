"""How many CPU threads a run uses: `--threads auto` measures what more of them gain on this machine, now.

More threads than free cores can be much slower than one: PyTorch's threads wait for each other after every operation,
and for one whose core is busy they wait long. So they have to prove themselves, in products of the run's own sizes.
"""

import dataclasses
import json
import math
import os
import re
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from common.fast.matmul import use_fast_products

from common.plumbing.config import TINY_POLICY, ConfigT, ModelConfig
from common.plumbing.ranks import num_launched
from common.plumbing.terminal import say

SECONDS = 0.5  # for all measurements; three rounds of each are made even if they take longer
ROUND = 0.02  # seconds of one thread: several time slices of the operating system, so that a busy core shows in each
MOST_ROUNDS, FEWEST_ROUNDS = 12, 3
GAIN = 0.85  # more threads must take at most this share of the time in three rounds of four, and win altogether
FREE = 0.9  # one thread must have its core for this share of the time: on a busy one, two win only by a double share
HOPELESS = 1.5  # after two rounds that took so many times as long: on busy cores, each further one would be slow, too
# The products' sizes; larger ones gain as much, and would take too long
WIDEST, WIDEST_INNER = 512, 512
DECODED, TRAINED = 128, 512  # rows of a decoding step, and tokens of a batch of the update
CONTROL_GROUPS = Path("/sys/fs/cgroup")


def with_threads(config: ConfigT) -> ConfigT:
    """The settings with the number of threads, if that is "auto".

    It is OMP_NUM_THREADS where that is set, by a user or a launcher. One of several processes, and a run on an
    accelerator, have one thread. For all others it is measured.
    """
    if config.threads != "auto":
        return config
    number = _from_environment()
    if number is None:
        on_cpu = torch.device(config.device).type == "cpu"
        number = choose_threads(config, usable_cores()) if on_cpu and num_launched() == 1 else 1
    return dataclasses.replace(config, threads=number)


def choose_threads(config: ModelConfig, cores: int) -> int:
    """Measure 1, 2, 4, ... threads, up to `cores`, as long as each is clearly faster than the one before."""
    limit = min(cores, 256)
    if limit == 1:
        return 1
    candidates = [2**power for power in range(1, limit.bit_length()) if 2**power <= limit]
    if candidates[-1] < limit:
        candidates.append(limit)
    before = torch.get_num_threads()
    try:
        number, gain = _measure(_products(config), candidates)
    finally:
        torch.set_num_threads(before)
    what = "no faster with more" if number == 1 else f"{gain:.1f} times as fast as 1"
    say(f"threads: {number} of {cores} cores ({what}; --threads sets it)")
    return number


def usable_cores() -> int:
    """The cores that this process may use: those of its affinity, and no more than its control groups grant it."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, int(min(cores, _granted(Path("/proc/self/cgroup"), CONTROL_GROUPS))))


def _granted(memberships: Path, root: Path) -> float:
    """The processor time per time that the control groups of this process allow (Linux); infinite without a limit."""
    try:
        lines = memberships.read_text(encoding="utf-8").splitlines()
    except OSError:
        return math.inf
    quotas = [math.inf]
    for line in lines:
        _, controllers, path = (line + "::").split(":")[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / controllers
        group = top / path.lstrip("/")
        # in a container the path can be that of the host, and the files at the top are then those of the container
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            quotas.append(_quota(folder))
    return min(quotas)


def _quota(group: Path) -> float:
    """Of one control group: cpu.max has "max 100000" or "150000 100000" (v2); v1 has a file for each of the two."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = ((group / name).read_text(encoding="utf-8").strip() for name in names)
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # there is none, or "max"
        return math.inf


def _from_environment() -> int | None:
    """What OMP_NUM_THREADS asks for; it may be a list, for nested regions."""
    first = re.match(r"\s*(\d{1,6})\s*(?:,|$)", os.environ.get("OMP_NUM_THREADS", ""), re.ASCII)
    return int(first[1]) if first is not None and int(first[1]) > 0 else None


def _measure(work: Callable[[], None], candidates: list[int]) -> tuple[int, float]:
    """The number of threads that is worth it, and how many times as fast as one thread it is."""
    deadline = time.monotonic() + SECONDS
    _timed(work, 1, 1)  # oneDNN compiles its kernels, as it does for every number of threads
    repetitions = max(1, math.ceil(ROUND / _timed(work, 1, 1)))
    best, gain = 1, 1.0
    for number in candidates:
        if not _can_start(number):
            break
        more, fewer, held = [], [], 0.0
        _timed(work, number, 1)
        while len(more) < FEWEST_ROUNDS or (len(more) < MOST_ROUNDS and time.monotonic() < deadline):
            more.append(_timed(work, number, repetitions))
            before = time.thread_time()
            fewer.append(_timed(work, best, repetitions))
            held += time.thread_time() - before
            if len(more) > 1 and sum(more) > HOPELESS * sum(fewer):
                break
        if best == 1 and held < FREE * sum(fewer):
            break
        ratios = [mine / its for mine, its in zip(more, fewer, strict=True)]
        if statistics.quantiles(ratios, n=4, method="inclusive")[2] > GAIN or sum(more) > sum(fewer):
            break
        best, gain = number, gain / statistics.median(ratios)
    return best, gain


def _timed(work: Callable[[], None], number: int, repetitions: int) -> float:
    """Seconds of `repetitions` with so many threads."""
    torch.set_num_threads(number)
    start = time.perf_counter()
    for _ in range(repetitions):
        work()
    return time.perf_counter() - start


def _can_start(number: int) -> bool:
    """Whether so many threads can be started, beside this one: where OpenMP cannot, it ends the process."""
    is_over = threading.Event()
    started = [threading.Thread(target=is_over.wait, daemon=True) for _ in range(number)]
    try:
        for thread in started:
            thread.start()
    except RuntimeError:
        return False
    finally:
        is_over.set()
    for thread in started:
        thread.join()
    return True


def _products(config: ModelConfig) -> Callable[[], None]:
    """The work that is measured: a feed-forward layer of the model decodes four times, and is trained on one batch."""
    width, inner = _sizes(config)
    with torch.random.fork_rng(devices=[]):  # the run's own random numbers stay what they are
        layer = nn.Sequential(nn.Linear(width, inner, bias=False), nn.SiLU(), nn.Linear(inner, width, bias=False))
    use_fast_products(layer)
    decoded, trained = torch.full((DECODED, width), 0.1), torch.full((TRAINED, width), 0.1)

    def work() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=config.dtype == "bfloat16"):
            with torch.no_grad():
                for _ in range(4):
                    layer(decoded)
            layer(trained).sum().backward()

    return work


def _sizes(config: ModelConfig) -> tuple[int, int]:
    """The model's hidden and feed-forward sizes, or the largest that are measured, if they are larger or not known."""
    place = TINY_POLICY if config.model == "new" else config.base_path
    try:
        sizes = json.loads((place / "config.json").read_text(encoding="utf-8"))
        sizes = sizes.get("text_config", sizes)
        width, inner = int(sizes["hidden_size"]), int(sizes["intermediate_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return WIDEST, WIDEST_INNER
    return (min(width, WIDEST), min(inner, WIDEST_INNER)) if min(width, inner) > 0 else (WIDEST, WIDEST_INNER)
