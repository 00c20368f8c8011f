"""A run is a directory: its settings, metrics, samples, TensorBoard events, the trained policy, a picture.

runs/<experiment>/<name>/config.json  metrics.jsonl  samples.jsonl  events.out...  checkpoints/  final/
                         summary.json  curve.png
"""

import dataclasses
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten

import torch

from common.config import ROOT, PolicyConfig, UserError
from common.evaluate import Evaluation
from common.experience import Experience
from common.logprobs import Policy
from common.trajectory import Trajectory

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


class Run:
    """Where a run writes. `start_run` makes it."""

    def __init__(self, directory: Path, config: PolicyConfig, machine: dict):
        from torch.utils.tensorboard import SummaryWriter

        self.directory = directory
        self.config = config
        self._machine = machine  # as described when the run started: the checkout may have moved on since
        self._metrics = (directory / "metrics.jsonl").open("a", encoding="utf-8")
        self._events = SummaryWriter(str(directory))
        self._bar = None

    def steps(self, num_steps: int) -> Iterator[int]:
        """Count 1..num_steps behind a progress bar, whose text `log` sets."""
        from tqdm import tqdm

        self._bar = tqdm(
            range(1, num_steps + 1),
            bar_format="{desc} [{elapsed}<{remaining}]",
            dynamic_ncols=True,
            mininterval=0.1 if sys.stderr.isatty() else 10,  # a log file needs no line a step
        )
        yield from self._bar
        self._bar = None

    def log(self, step: int, metrics: dict[str, float], line: str = "") -> None:
        """Write one step's metrics, and show `line` as the progress."""
        self._metrics.write(json.dumps({"step": step, **metrics}) + "\n")
        self._metrics.flush()
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)
        if self._bar is not None and line:
            self._bar.set_description_str(line, refresh=False)

    def log_samples(self, step: int, trajectories: list[Trajectory], texts: list[str], experience: Experience) -> None:
        """Keep two groups of most steps and every tenth step whole, one line a completion."""
        every = self.config.samples_every
        if every == 0 or step % every:
            return
        group_size = sum(row.prompt_index == trajectories[0].prompt_index for row in trajectories)
        kept = trajectories if step % 10 == 0 else trajectories[: 2 * group_size]
        with (self.directory / "samples.jsonl").open("a", encoding="utf-8") as samples:
            for index, row in enumerate(kept):
                entry = dataclasses.asdict(row) | {
                    "step": step,
                    "text": texts[index],
                    "advantage": experience.advantages[index, 0].item(),
                }
                samples.write(json.dumps(entry) + "\n")

    def save_policy(self, policy: Policy, name: str) -> Path:
        """Write the policy as a Hugging Face directory, which `from_pretrained` loads."""
        path = self.directory / name
        policy.model.save_pretrained(path)
        policy.tokenizer.save_pretrained(path)
        return path

    def finish(self, results: dict, steps: int, seconds: float, num_tokens: int) -> None:
        """Write summary.json, with `results` first, and curve.png."""
        summary = {
            **results,
            "steps": steps,
            "seconds": round(seconds, 1),
            "tokens_per_second": round(num_tokens / seconds, 1),
            "peak_memory_bytes": peak_memory_bytes(self.config.device),
            **self._machine,
        }
        (self.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        self._metrics.close()
        self._events.close()
        from viewer.curve import draw_curve

        draw_curve(self.directory)


def start_run(experiment: str, config: PolicyConfig) -> Run:
    """Make the run's directory and write its settings, before anything slow happens.

    Raises:
        UserError: a run of that name exists, or the directory cannot be made.
    """
    torch.set_num_threads(config.threads)
    name = config.name or f"{datetime.now():%Y%m%d-%H%M%S}-seed{config.seed}"
    directory = Path(config.runs_dir).expanduser() / experiment / name
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"the run {directory} exists already; choose another --name") from None
    except OSError as error:
        raise UserError(f"--runs-dir: {directory} cannot be made ({error.strerror})") from error
    options = dataclasses.asdict(config)
    print("settings: " + "  ".join(f"{name}={value}" for name, value in options.items() if value not in (None, "")))
    machine = describe_machine()
    settings = options | machine | {"command": sys.argv}
    (directory / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return Run(directory, config, machine)


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


class TokenMeans:
    """Means over action tokens, gathered from micro-batches of different sizes."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._count = 0

    def add(self, action_mask: torch.Tensor, **values: torch.Tensor) -> None:
        """Add the values, each (B, T-1), at the tokens where the mask is 1."""
        mask = action_mask.bool()
        self._count += int(mask.sum())
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value.detach()[mask].double().sum())

    def means(self) -> dict[str, float]:
        return {name: total / max(self._count, 1) for name, total in self._sums.items()}


def show_before_and_after(
    run: Run, rows: list[dict], before: Evaluation, after: Evaluation, gain: dict[str, float]
) -> None:
    """Print what was gained: held-out figures, three questions answered before and after, and where to look on."""
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
    print(f"run:          {run.directory}")
    print(f"curve:        {run.directory / 'curve.png'}")
    print(f"TensorBoard:  tensorboard --logdir {run.directory.parent}")
