"""The costs of a step: its time by phase and its memory, and with --profile a trace of all its operations."""

import gzip
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from common.parallel import gather

from harness.base.machine import peak_memory_bytes


class StepClock:
    """Measures a step from its beginning: the time by phase, and the part spent waiting for other processes."""

    def __init__(self, device: str, trace: "StepTrace | None" = None):
        self._device, self._trace = device, trace
        self.start(0)

    def start(self, step: int) -> None:
        if self._trace is not None:
            self._trace.begin_step(step)
        self._began = self._lap_began = time.perf_counter()
        self._waited = 0.0
        self._laps: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Count the time since the last lap, or since the beginning of the step, towards this phase."""
        if not self._device.startswith("cpu"):
            torch.accelerator.synchronize()  # queued work belongs to this phase, too
        now = time.perf_counter()
        self._laps[phase] = self._laps.get(phase, 0.0) + now - self._lap_began
        self._lap_began = now
        if self._trace is not None:
            self._trace.lap(phase)

    def end(self, step: int, is_last: bool) -> None:
        if self._trace is not None:
            self._trace.end_step(step, is_last)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time within the block as spent waiting for other processes."""
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    def costs(self, num_tokens: int) -> dict[str, float]:
        """Seconds of the step and its phases (mean over processes), tokens per second, and the largest peak.

        `num_tokens` are those of this process.
        """
        seconds = time.perf_counter() - self._began
        own = (num_tokens, self._waited / seconds, self._laps, peak_memory_bytes(self._device))
        counts, shares, laps, peaks = zip(*gather(own), strict=True)
        return {
            "time/step": seconds,
            **{f"time/{phase}": sum(times[phase] for times in laps) / len(laps) for phase in self._laps},
            "time/tokens_per_second": sum(counts) / seconds,
            **({"time/waiting": sum(shares) / len(shares)} if any(shares) else {}),
            "memory/peak_bytes": max(peaks),
        }


class StepTrace:
    """Records every operation of some steps in trace.json.gz, which https://ui.perfetto.dev opens, with named phases.

    A phase is known only when it ends, so that the recorded ranges get their names when the file is written.
    """

    def __init__(self, path: Path, steps: range, tell: Callable[[str], None]):
        self._path, self._steps, self._tell = path, steps, tell
        self._profiler: torch.profiler.profile | None = None  # None: not recording
        self._ranges: list[torch.profiler.record_function] = []  # open ones: the step and its phase
        self._names: list[str] = []  # of the phases that have ended

    def begin_step(self, step: int) -> None:
        if step not in self._steps:
            return
        if self._profiler is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write its own stages into the progress line
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        self._enter(f"step {step}")
        self._enter(f"phase {len(self._names)}.")

    def lap(self, phase: str) -> None:
        """The end of a phase, and the beginning of the next one."""
        if self._ranges:
            self._exit(phase)
            self._enter(f"phase {len(self._names)}.")

    def end_step(self, step: int, is_last: bool) -> None:
        """The end of a step; after the last one of the run or of those recorded, write the file."""
        if step not in self._steps:
            return
        self._exit("log, evaluate, checkpoint")
        self._ranges.pop().__exit__(None, None, None)
        if is_last or step == self._steps[-1]:
            self.write()

    def write(self) -> None:
        """Stop recording, and write the file."""
        if self._profiler is None:
            return
        while self._ranges:  # of a step that did not end
            self._ranges.pop().__exit__(None, None, None)
        self._profiler.stop()
        partial = self._path.with_suffix(".partial")
        self._profiler.export_chrome_trace(str(partial))
        text = partial.read_text(encoding="utf-8")
        partial.unlink()
        text = re.sub(r'"phase (\d+)\."', lambda found: json.dumps([*self._names, "unfinished"][int(found[1])]), text)
        self._path.write_bytes(gzip.compress(text.encode(), compresslevel=6))
        self._profiler = None
        self._tell(f"profile: {self._path}, to be opened at https://ui.perfetto.dev")

    def _enter(self, name: str) -> None:
        self._ranges.append(torch.profiler.record_function(name))
        self._ranges[-1].__enter__()

    def _exit(self, phase: str) -> None:
        self._ranges.pop().__exit__(None, None, None)
        self._names.append(phase)
