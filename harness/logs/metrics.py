"""A run's numbers: the costs of a step, and the logs: metrics.jsonl, TensorBoard, and W&B if it is requested."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from common.parallel import gather

from harness.run.machine import peak_memory_bytes

PROGRESS = {  # shown in the progress line if logged
    "reward/total": "reward {:.2f}",
    "reward/correct": "correct {:.2f}",
    "completion/length": "length {:.1f}",
    "preference/accuracy": "accuracy {:.2f}",
    "loss/kl": "KL {:.3f}",
    "teacher/kl": "KL to the teacher {:.3f}",
    "loss/total": "loss {:.4f}",
    "time/tokens_per_second": "{:,.0f} tokens/s",
}


class StepClock:
    """Measures a step from its beginning: the time by phase, and the part spent waiting for other processes."""

    def __init__(self, device: str):
        self._device = device
        self.start()

    def start(self) -> None:
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

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time within the block as spent waiting for other processes."""
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    def costs(self, num_tokens: int) -> dict[str, float]:
        """Seconds of the step and its phases (mean over processes), tokens per second, and the largest peak."""
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


class MetricsLog:
    """Writes metrics.jsonl, TensorBoard and W&B (with `wandb_settings`); `history` holds a resumed run's lines."""

    def __init__(self, directory: Path, history: list[dict], wandb_settings: dict | None, tell: Callable[[str], None]):
        self._directory = directory
        self._tell = tell
        self._not_shown = history  # until there is a new line, so that a run that fails earlier changes nothing
        self._events = None
        self._wandb = None if wandb_settings is None else _start_wandb(directory, wandb_settings, tell)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write one line; numbers that are not finite are left out."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        with (self._directory / "metrics.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"step": step, **finite}) + "\n")
        for row in (*self._not_shown, {"step": step, **finite}):
            self._show(**row)
        self._not_shown = []

    def _show(self, step: int, **metrics: float) -> None:
        """Send one line to TensorBoard and W&B."""
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter

            for path in self._directory.glob("events.out.tfevents.*"):
                path.unlink()
            self._events = SummaryWriter(str(self._directory))
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)
        if self._wandb is not None:
            try:
                self._wandb.log(metrics, step=step)
            except Exception as error:  # no error here may end the run
                self._tell(f"--wandb: {error}; logging continues without it")
                self._wandb = None

    def close(self) -> None:
        if self._events is not None:
            with suppress(OSError):  # it must not hide the error that ended the run
                self._events.close()
        if self._wandb is not None:
            self._wandb.finish()


def finite(value: object) -> object:
    """Copy `value` with None in place of every number that is not finite."""
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def progress_line(step: int, num_steps: int, metrics: dict[str, float], more: tuple[str, ...] = ()) -> str:
    """The progress line, with the additional keys `more` of `metrics`.

    >>> metrics = {"reward/total": 0.5, "reward/correct": 0.5, "loss/kl": 0.0123, "time/tokens_per_second": 1234.5}
    >>> progress_line(3, 80, metrics)
    'step 3/80  reward 0.50  KL 0.012  1,234 tokens/s'
    >>> progress_line(3, 80, {"loss/total": 0.5, "policy/clipped": 0.0123}, more=("policy/clipped",))
    'step 3/80  loss 0.5000  clipped 0.0123'
    """
    hidden = {"loss/total"} if "reward/total" in metrics else set()  # near 0, however much is learned (docs/metrics.md)
    if math.isclose(metrics.get("reward/correct", 0), metrics.get("reward/total", math.nan), rel_tol=1e-6):
        hidden.add("reward/correct")  # the only component
    parts = [text.format(metrics[key]) for key, text in PROGRESS.items() if key in metrics and key not in hidden]
    parts += [f"{key.rpartition('/')[2]} {metrics[key]:.4g}" for key in more if key in metrics]
    return "  ".join([f"step {step}/{num_steps}", *parts])


def read_lines(path: Path) -> list[dict]:
    """The rows of a run's JSONL file, up to a line that a kill cut off; none if there is no file."""
    rows = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _start_wandb(directory: Path, settings: dict, tell: Callable[[str], None]):
    """Start a W&B run: online, otherwise offline, otherwise None; each fallback prints a sentence."""
    try:
        import wandb
    except ImportError:
        tell("--wandb: the package is not installed (pip install wandb); logging continues without it")
        return None
    settings = settings | {"dir": str(directory), "settings": wandb.Settings(init_timeout=20, silent=True)}
    try:
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise ValueError("no key is set (`wandb login`)")  # `init` would ask for it and wait
        return wandb.init(**settings)
    except Exception as error:  # a wrong key, no network: none of them may stop the run
        tell(f"--wandb: {' '.join(str(error).split())}; logging offline, to be sent later with `wandb sync`")
        return wandb.init(**settings, mode="offline")
