"""What a step costs: time, also by phase and that spent waiting for other processes, and memory."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.parallel import gather

from common.plumbing.machine import peak_memory_bytes


class StepClock:
    """Runs from the beginning of a step."""

    def __init__(self, device: str):
        self._device = device
        self.start()

    def start(self) -> None:
        self._began = self._lap_began = time.perf_counter()
        self._waited = 0.0
        self._laps: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Count the time since the last lap, or the beginning of the step, as spent in this phase."""
        if not self._device.startswith("cpu"):
            torch.accelerator.synchronize()  # what has only been queued is of this phase, too
        now = time.perf_counter()
        self._laps[phase] = self._laps.get(phase, 0.0) + now - self._lap_began
        self._lap_began = now

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time within the block as spent waiting for other processes."""
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    def costs(self, num_tokens: int) -> dict[str, float]:
        """Seconds since the beginning of the step, tokens per second for so many tokens of all processes, and memory.

        The seconds of each phase are means over processes, `time/waiting` is the mean over processes of the share of
        the step's seconds that they waited, and `memory/peak_bytes` is that of the process that needs most.
        """
        seconds = time.perf_counter() - self._began
        own = (self._waited / seconds, self._laps, peak_memory_bytes(self._device))
        shares, laps, peaks = zip(*gather(own), strict=True)
        return {
            "time/step": seconds,
            **{f"time/{phase}": sum(times[phase] for times in laps) / len(laps) for phase in self._laps},
            "time/tokens_per_second": num_tokens / seconds,
            **({"time/waiting": sum(shares) / len(shares)} if any(shares) else {}),
            "memory/peak_bytes": max(peaks),
        }
