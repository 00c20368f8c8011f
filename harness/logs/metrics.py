"""A run's numbers: metrics.jsonl, TensorBoard, W&B if it is requested, and the progress line."""

import json
import math
import textwrap
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from itertools import groupby
from pathlib import Path

from harness.base.terminal import visible

SAMPLE_COLUMNS = ("question", "text", "return", "advantage", "finish_reason")  # of samples.jsonl, in W&B's table


class MetricsLog:
    """Writes metrics.jsonl, TensorBoard and W&B (with `wandb_settings`); `history` holds a resumed run's lines."""

    def __init__(self, directory: Path, history: list[dict], wandb_settings: dict | None, tell: Callable[[str], None]):
        self._directory = directory
        self._tell = tell
        self._not_shown = history  # until there is a new line, so that a run that fails earlier changes nothing
        self._samples = _first_groups(directory / "samples.jsonl") if history else {}  # not shown either, by step
        self._events = self._begun = None
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
        if not self._begun:
            self._begun = True
            self._events = _start_tensorboard(self._directory, self._tell)
        for name, value in metrics.items() if self._events is not None else ():
            self._events.add_scalar(name, value, step)
        self._send(metrics, step)
        if step in self._samples:
            self._show_group(step, self._samples.pop(step))

    def show_samples(self, step: int, lines: list[str]) -> None:
        """Send the first group of a step's lines of samples.jsonl: as text to TensorBoard, as a table to W&B."""
        self._show_group(step, _first_group(map(json.loads, lines)))

    def _show_group(self, step: int, group: list[dict]) -> None:
        rows = [[entry[name] if name != "text" else _text_of(entry) for name in SAMPLE_COLUMNS] for entry in group]
        if self._events is not None:
            texts = [f"return {row[2]}, {row[4]}\n\n" + textwrap.indent(visible(row[1]), "    ") for row in rows]
            question = textwrap.indent(visible(group[0]["question"]), "    ")  # as code: it is no markup
            self._events.add_text("samples", "\n\n".join([question, *texts]), step)
        if self._wandb is not None:
            import wandb

            self._send({"samples": wandb.Table(columns=list(SAMPLE_COLUMNS), data=rows)}, step)

    def _send(self, values: dict, step: int) -> None:
        """Log to W&B, if it is in use."""
        if self._wandb is not None:
            try:
                self._wandb.log(values, step=step)
            except Exception as error:  # no error here may end the run
                self._tell(f"--wandb: {error}; logging continues without it")
                self._wandb = None

    def close(self) -> None:
        if self._events is not None:
            with suppress(OSError):  # it must not hide the error that ended the run
                self._events.close()
        if self._wandb is not None:
            self._wandb.finish()


def progress_line(step: int, num_steps: int, metrics: dict[str, float], more: tuple[str, ...] = ()) -> str:
    """The progress line, with the additional keys `more` of `metrics`.

    >>> metrics = {"reward/total": 0.5, "reward/correct": 0.5, "loss/kl": 0.0123, "time/tokens_per_second": 1234.5}
    >>> progress_line(3, 80, metrics)
    'step 3/80  reward 0.50  KL 0.012  1,234 tokens/s'
    >>> progress_line(3, 80, {"loss/total": 0.5, "policy/clipped": 0.0123}, more=("policy/clipped",))
    'step 3/80  loss 0.5000  clipped 0.0123'
    """
    from harness.logs.headings import METRICS  # not at the top: `--help` shows no progress

    hidden = {"loss/total"} if "reward/total" in metrics else set()  # near 0, however much is learned (docs/metrics.md)
    if math.isclose(metrics.get("reward/correct", 0), metrics.get("reward/total", math.nan), rel_tol=1e-6):
        hidden.add("reward/correct")  # the only component
    shown = {key: metric for key, metric in METRICS.items() if metric.form and key in metrics and key not in hidden}
    parts = [f"{metric.short} {metric.form.format(metrics[key])}".strip() for key, metric in shown.items()]
    parts += [f"{key.rpartition('/')[2]} {metrics[key]:.4g}" for key in more if key in metrics]
    return "  ".join([f"step {step}/{num_steps}", *parts])


def shows_samples(step: int) -> bool:
    """Whether completions of a step are printed, and sent to TensorBoard and W&B."""
    return step == 1 or step % 10 == 0


def _first_groups(path: Path) -> dict[int, list[dict]]:
    """The completions of a stopped run that were sent to TensorBoard and W&B, by step."""
    groups: dict[int, list[dict]] = {}
    with path.open(encoding="utf-8") if path.exists() else nullcontext(()) as lines:  # it can be large
        for step, of_step in groupby(map(json.loads, lines), key=lambda entry: entry["step"]):
            if shows_samples(step):
                groups[step] = _first_group(of_step)
    return groups


def _first_group(entries: Iterable[dict]) -> list[dict]:
    group = next(groupby(entries, key=lambda entry: entry["prompt_index"]))[1]
    return [{name: entry.get(name) for name in ("turns", *SAMPLE_COLUMNS)} for entry in group]


def _text_of(entry: dict) -> str:
    return "\n".join(f"{role}: {text}" for role, text in entry["turns"]) if entry["turns"] else entry["text"]


def _start_tensorboard(directory: Path, tell: Callable[[str], None]):
    """Write TensorBoard's events anew; None, and a sentence, without its package."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        tell("the package tensorboard is not installed: the run goes on without its events; metrics.jsonl has them all")
        return None
    for path in directory.glob("events.out.tfevents.*"):
        path.unlink()
    return SummaryWriter(str(directory))


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
