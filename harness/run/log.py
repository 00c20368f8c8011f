"""What a run writes for people, apart from its policy: metrics, samples, the diagnosis, the summary and its figure."""

import json
from collections.abc import Callable, Iterator

from common.evaluate import Evaluation
from common.experience import Experience
from common.parallel import is_main
from common.policy import Policy
from common.trajectory import Trajectory

from harness.base.config import PolicyConfig
from harness.base.files import finite, read_lines, replace_file
from harness.base.ranks import on_main
from harness.base.terminal import printable, progress_bar, say
from harness.logs.diagnosis import Diagnosis
from harness.logs.metrics import MetricsLog, progress_line, shows_samples
from harness.logs.samples import TokenTexts, describe_best, write_samples
from harness.logs.statistics import UpdateStatistics
from harness.logs.summary import read_before, show_gain, summarise_gain, summarise_steps
from harness.models.pretrained import count_parameters
from harness.run.checkpoints import BEFORE, DIAGNOSIS, METRICS, SAMPLES, TOKENS
from harness.run.directory import RunDirectory
from harness.run.settings import experiment_of
from harness.task.task import Task


class RunLog:
    """Writes and prints the results of a run; `tell` prints above the progress bar."""

    def __init__(self, directory: RunDirectory, config: PolicyConfig, task: Task | None, tell: Callable[[str], None]):
        self._directory, self._config, self._task, self._tell = directory.path, config, task, tell
        self._about = directory.machine  # for the summary
        self._diagnosis = Diagnosis(config, [] if task is None else task.scorer.paid)
        for row in directory.history:
            self._diagnosis.check(row)  # already printed
        self.newest: dict[str, float] = dict(directory.history[-1]) if directory.history else {}  # of each metric
        self.of_step: dict[str, float] = {}  # logged by the newest step
        self._bar = None  # the progress bar, during the steps
        self._tokens: TokenTexts | None = None  # None: unknown before `know`
        if is_main():
            wandb = {"project": config.wandb_project or experiment_of(config), "group": config.wandb_group}
            wandb |= {"name": directory.path.name, "config": vars(config)}
            self._metrics = MetricsLog(directory.path, list(directory.history), wandb if config.wandb else None, tell)

    @property
    def findings(self) -> set[str]:
        """What looked wrong at the newest step, as docs/metrics.md names it."""
        return {*self._diagnosis.findings}

    def know(self, policy: Policy) -> None:
        """Describe the policy: its tokens for the samples, and its size for the summary."""
        self._tokens = TokenTexts(self._directory / TOKENS, policy.tokenizer, policy.end_of_turn_ids)
        self._about = count_parameters(policy.model) | self._about

    def count_steps(self, done: int, num_steps: int) -> Iterator[int]:
        """The remaining steps, with a progress bar."""
        self._bar = progress_bar(done, num_steps, is_shown=is_main())
        try:
            yield from self._bar
        finally:
            self._bar = None

    @property
    def is_counting(self) -> bool:
        return self._bar is not None

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write one step's metrics, show the progress, and report what looks wrong."""
        on_main(lambda: self._metrics.write(step, metrics))
        self.newest |= metrics
        self.of_step = metrics
        if self._bar is not None:
            more = getattr(self._config, "progress", ())
            for key in set(more) - metrics.keys() if step == self._bar.iterable.start else ():
                self._tell(f"--progress {printable(key, 60)}: the step has no such metric; metrics.jsonl has all names")
            self._bar.set_description_str(progress_line(step, self._bar.total, metrics, more), refresh=False)
        for sentence in self._diagnosis.check({"step": step} | metrics):
            self._tell(f"step {step}: {sentence}")
        on_main(lambda: self._diagnosis.write(self._directory / DIAGNOSIS, step))

    def write_samples(
        self, step: int, trajectories: list[Trajectory], experience: Experience, statistics: UpdateStatistics
    ) -> None:
        """Save the samples of a step, if they are due, and print one completion now and then."""
        if not self._config.samples_every or step % self._config.samples_every:
            return
        group_size = getattr(self._config, "group_size", 2)  # without one, pairs
        if shows_samples(step) and trajectories[0].question is None:
            self._tell(f"step {step}: {describe_best(self._task, trajectories[:group_size])}")
        of_step = (trajectories, experience, statistics)
        lines = write_samples(self._directory / SAMPLES, self._tokens, step, self._task, group_size, *of_step)
        if shows_samples(step):
            on_main(lambda: self._metrics.show_samples(step, lines))

    @property
    def has_before(self) -> bool:
        return on_main(lambda: read_before(self._directory / BEFORE) is not None)

    def keep_before(self, before: Evaluation) -> None:
        """Save the evaluation before training for when the run is resumed, and for `compare`."""
        on_main(lambda: replace_file(self._directory / BEFORE, json.dumps(before).encode()))

    def compare(self, after: Evaluation, best: dict | None) -> None:
        """Write the summary of a run that was evaluated before and after training, and print the gain."""
        before = read_before(self._directory / BEFORE)
        results = summarise_gain(self._task, before, after)
        self.write_summary(results, best)
        show_gain(self._directory, self._task, before, after, results["gain"])

    def write_summary(self, results: dict, best: dict | None) -> None:
        """Write summary.json, with `results` first, curve.png and report.html; only the main process calls it."""
        rows = read_lines(self._directory / METRICS)
        if best is not None:
            value, where = f"{best['metric']} {best['value']:.4g}", self._directory / "best"
            say(f"best: step {best['step']}, with {value}: {where}")
            results = results | {"best": best}
        summary = results | summarise_steps(rows, self._config.device) | self._about
        (self._directory / "summary.json").write_text(json.dumps(finite(summary), indent=2) + "\n", encoding="utf-8")
        if rows:  # without a step there is nothing to draw
            from viewer import draw_run  # not before a run ends

            draw_run(self._directory)

    def close(self) -> None:
        if is_main():
            self._metrics.close()
