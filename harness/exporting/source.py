"""What is exported: the weights of a run, with the settings, figures and questions that belong to them."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError

from harness.base.checks import check_model, local_path
from harness.base.config import ADAPTER_SETTINGS, ModelConfig, RunConfig, is_hub_id, resolve, shown
from harness.base.terminal import printable
from harness.data.data import load_task
from harness.data.held_out import read_before
from harness.data.task import Task, import_named
from harness.logs.metrics import read_lines
from harness.run.checkpoints import BEFORE, METRICS
from harness.run.settings import read_settings

FINAL = ("final", "final_merged")


@dataclass(frozen=True, kw_only=True)
class Source:
    run: Path  # the run's directory
    weights: Path  # a Hugging Face directory in it: of the model, or of its adapter
    step: int | None  # of the checkpoint; None: the final policy
    settings: dict  # config.json of the run

    @property
    def policy(self) -> ModelConfig:
        """The settings that load the policy as it was trained."""
        dtype = self.settings.get("dtype") if self.is_adapter else "float32"
        return resolve(ModelConfig(model=str(self.weights), device="cpu", dtype=dtype, load_in=self.load_in), {})

    @property
    def load_in(self) -> str | None:
        """How the base was held in training: "4bit", "8bit" or, not quantised, None."""
        value = self.settings.get("load_in")
        return value if self.is_adapter and value in ("4bit", "8bit") else None

    @property
    def is_adapter(self) -> bool:
        return (self.weights / ADAPTER_SETTINGS).is_file() and not (self.weights / "config.json").exists()

    @property
    def base_id(self) -> str | None:
        """The hub id of the model that was trained; None if it is bundled or a directory."""
        name = self.policy.base if self.is_adapter else self.settings.get("model")
        return name if isinstance(name, str) and is_hub_id(name) and not local_path(name, "--model").exists() else None

    def load_task(self, limit: int) -> tuple[Task, RunConfig]:
        """The run's task with its first `limit` held-out questions; for a run without a task the arithmetic one.

        Raises:
            UserError: the task or its data can no longer be read.
        """
        names = [field.name for field in dataclasses.fields(RunConfig)]
        values = {name: self.settings[name] for name in names if name in self.settings}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        if "task" not in self.settings:  # of experiment_sft
            arithmetic = import_named("arithmetic")
            values |= {"task": "arithmetic", "data": str(arithmetic.TRAIN_DATA), "eval_data": str(arithmetic.EVAL_DATA)}
        # Components of an experiment are unknown to its task, and no reward is needed
        config = dataclasses.replace(RunConfig(**values), reward_weight=())
        task = load_task(config)
        task.eval_rows = task.eval_rows[:limit]
        return task, dataclasses.replace(config, system_prompt=config.system_prompt or "")

    def figures(self) -> tuple[dict, dict, int]:
        """Metrics of the evaluations before and after training, and the number of questions; empty: not evaluated."""
        before = read_before(self.run / BEFORE)
        rows = read_lines(self.run / METRICS) if (self.run / METRICS).is_file() else []
        after = _read_summary(self.run).get("after") if self.step is None else None
        if not isinstance(after, dict):
            steps = [row for row in rows if row["step"] > 0 and (self.step is None or row["step"] <= self.step)]
            evaluated = [row for row in steps if any(name.startswith("eval/") for name in row)]
            last = evaluated[-1] if evaluated else {}
            after = {name.removeprefix("eval/"): value for name, value in last.items() if name.startswith("eval/")}
        if before is None:
            return {}, after, 0
        return before.metrics, after, len(before.greedy_texts)


def _read_summary(run: Path) -> dict:
    try:
        return dict(json.loads((run / "summary.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def find_source(text: str) -> Source:
    """What RUN names: a run's directory, its final/, or one of its checkpoints.

    Raises:
        UserError: it is none of them, the run has not ended, or the base of its adapter is not there.
    """
    path = local_path(text, "RUN").resolve()
    if not path.is_dir():
        raise UserError(f"RUN {printable(text, 80)}: there is no such directory")
    step = None
    if path.name in FINAL and _is_run(path.parent):
        run, weights = path.parent, path
    elif path.parent.name == "checkpoints" and _is_run(path.parent.parent):
        run, weights, step = path.parent.parent, path, _step(path)
        if step is None:
            raise UserError(f"RUN {shown(path)} is not a complete checkpoint (step_N)")
    else:
        run, weights = path, path / "final"
    settings = read_settings(run, what="RUN")
    if not any((weights / name).is_file() for name in ("config.json", ADAPTER_SETTINGS)):
        steps = [found for found in (run / "checkpoints").glob("step_*") if _step(found) is not None]
        newest = (
            f": its newest checkpoint is {shown(max(steps, key=_step))}, which can be given as RUN" if steps else ""
        )
        raise UserError(f"RUN {shown(run)} has no final/, because it has not ended{newest}")
    source = Source(run=run, weights=weights, step=step, settings=settings)
    try:
        check_model(source.policy)
    except UserError as error:
        raise UserError(str(error).replace("--model ", "RUN ", 1)) from None
    return source


def _is_run(directory: Path) -> bool:
    return (directory / "config.json").is_file()


def _step(checkpoint: Path) -> int | None:
    number = checkpoint.name.removeprefix("step_")
    return int(number) if number.isdecimal() and number.isascii() and len(number) < 19 else None
