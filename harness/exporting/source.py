"""The source of an export: the weights of a run, with its settings, figures and questions."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError

from harness.base.checks import check_model, local_path
from harness.base.config import ADAPTER_SETTINGS, ModelConfig, RunConfig, is_hub_id, resolve, shown
from harness.base.files import read_lines
from harness.base.terminal import printable
from harness.logs.summary import read_before
from harness.run.checkpoints import BEFORE, METRICS
from harness.run.settings import read_settings
from harness.task.task import Task, load_task
from harness.task.task_file import import_named


@dataclass(frozen=True, kw_only=True)
class Source:
    run: Path  # the run's directory
    weights: Path  # a Hugging Face directory in it, with the model or its adapter
    step: int | None  # the checkpoint's step; None: the final policy
    settings: dict  # the run's config.json

    @property
    def policy(self) -> ModelConfig:
        """The settings that load the policy as it was trained."""
        dtype = self.settings.get("dtype") if self.is_adapter else "float32"
        return resolve(ModelConfig(model=str(self.weights), device="cpu", dtype=dtype, load_in=self.load_in), {})

    @property
    def load_in(self) -> str | None:
        """How training held the base: "4bit", "8bit" or, not quantised, None."""
        return self.settings.get("load_in") if self.is_adapter else None

    @property
    def is_adapter(self) -> bool:
        return (self.weights / ADAPTER_SETTINGS).is_file() and not (self.weights / "config.json").exists()

    @property
    def base_id(self) -> str | None:
        """The hub id of the model that was trained; None if it is bundled or a directory."""
        name = self.policy.base if self.is_adapter else self.settings["model"]
        return name if is_hub_id(name) and not Path(name).exists() else None

    def load_task(self, limit: int) -> tuple[Task, str]:
        """The run's task with its first `limit` held-out questions, and the system prompt.

        A run without a task gets the arithmetic one.
        """
        names = [field.name for field in dataclasses.fields(RunConfig)]
        values = {name: self.settings[name] for name in names if name in self.settings}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        if "pairs_per_step" in self.settings:  # its --data were no questions, and these are the task's own
            values |= {"data": None, "eval_data": None}
        if "task" not in self.settings:  # a run of imitation/sft
            arithmetic = import_named("arithmetic")
            values |= {"task": "arithmetic", "data": str(arithmetic.TRAIN_DATA), "eval_data": str(arithmetic.EVAL_DATA)}
        # The task does not know an experiment's own components, and no reward is needed; so no judge is loaded or asked
        settings = RunConfig(**values | {"estimate": True})
        config = dataclasses.replace(settings, reward_weight=(), reward_functions=None, eval_sets=(), eval_suite=None)
        task = load_task(config)
        task.eval_rows = task.eval_rows[:limit]
        return task, config.system_prompt or ""

    def figures(self) -> tuple[dict, dict, int]:
        """Metrics before and after training, and the number of questions; empty if the run did not evaluate."""
        before, summary = read_before(self.run / BEFORE), self.run / "summary.json"
        after = None
        if self.step is None and summary.is_file():
            after = json.loads(summary.read_text(encoding="utf-8")).get("after")
        if after is None:
            rows = read_lines(self.run / METRICS) if (self.run / METRICS).is_file() else []
            rows = [row for row in rows if row["step"] > 0 and (self.step is None or row["step"] <= self.step)]
            evaluations = [{name: row[name] for name in row if name.startswith("eval/")} for row in rows]
            last = next(filter(None, reversed(evaluations)), {})
            after = {name.removeprefix("eval/"): value for name, value in last.items()}
        if before is None:
            return {}, after, 0
        return before.metrics, after, len(before.greedy)


def find_source(text: str) -> Source:
    """The source that RUN names: a run's directory, its final/, or one of its checkpoints."""
    path = local_path(text, "RUN").resolve()
    if not path.is_dir():
        raise UserError(f"RUN {printable(text, 80)}: there is no such directory")
    run, weights, step = path, path / "final", None
    if path.name in ("final", "final_merged") and (path.parent / "config.json").is_file():
        run, weights = path.parent, path
    elif path.parent.name == "checkpoints":
        run, weights, step = path.parent.parent, path, _step(path)
    settings = read_settings(run, what="RUN")
    if not any((weights / name).is_file() for name in ("config.json", ADAPTER_SETTINGS)):
        newest = max((run / "checkpoints").glob("step_*[0-9]"), key=_step, default=None)
        hint = f": its newest checkpoint is {shown(newest)}, which can be given as RUN" if newest else ""
        raise UserError(f"RUN {shown(run)} has no final/, because it has not ended{hint}")
    source = Source(run=run, weights=weights, step=step, settings=settings)
    try:
        check_model(source.policy)
    except UserError as error:
        raise UserError(str(error).replace("--model ", "RUN ", 1)) from None
    return source


def _step(checkpoint: Path) -> int:
    number = checkpoint.name.removeprefix("step_")
    if not number.isdecimal():
        raise UserError(f"RUN {shown(checkpoint)} is not a complete checkpoint (step_N)")
    return int(number)
