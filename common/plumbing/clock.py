"""What a step costs: time, also that spent waiting for other processes, and memory."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from common.parallel import gather

from common.plumbing.machine import peak_memory_bytes


class StepClock:
    """Runs from the beginning of a step."""

    def __init__(self, device: str):
        self._device = device
        self.start()

    def start(self) -> None:
        self._began, self._waited = time.perf_counter(), 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time within the block as spent waiting for other processes."""
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    def costs(self, num_tokens: int) -> dict[str, float]:
        """Seconds since the beginning of the step, tokens per second for so many tokens of all processes, and memory.

        `time/waiting` is the mean over processes of the share of these seconds that they waited, and
        `memory/peak_bytes` that of the process that needs most.
        """
        seconds = time.perf_counter() - self._began
        shares, peaks = zip(*gather((self._waited / seconds, peak_memory_bytes(self._device))), strict=True)
        return {
            "time/step": seconds,
            "time/tokens_per_second": num_tokens / seconds,
            **({"time/waiting": sum(shares) / len(shares)} if any(shares) else {}),
            "memory/peak_bytes": max(peaks),
        }
