"""A run is a directory: its settings, metrics, samples, TensorBoard events, checkpoints, the trained policy, a picture.

runs/<experiment>/<name>/config.json  metrics.jsonl  samples.jsonl  events.out...  checkpoints/step_N/  before.json
                         final/  summary.json  curve.png
"""

import dataclasses
import errno
import json
import math
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from textwrap import shorten

import torch

from common.checkpoints import flush_to_disk, newest_checkpoint, read_checkpoint, write_checkpoint
from common.config import PolicyConfig, UserError
from common.diagnosis import Diagnosis, UpdateStatistics
from common.evaluate import Evaluation, Outcome, divide_gain
from common.experience import Experience
from common.logprobs import Policy
from common.metrics import MetricsLog, keep_until, read_lines
from common.policy import save_merged, save_policy
from common.report import describe_machine, peak_memory_bytes, show_before_and_after
from common.trajectory import Trajectory

MAX_SKIPPED = 3  # steps in a row whose updates were not finite; then the run ends
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # on the disk, in the user's share of it, in a file of allowed size


class Run:
    """Where a run writes. `start_run` makes it."""

    def __init__(
        self,
        directory: Path,
        config: PolicyConfig,
        machine: dict,
        resumed_at: int,
        history: list[dict],
        wandb: dict | None,
    ):
        self.directory = directory
        self.config = config
        self.resumed_at = resumed_at  # the step of the checkpoint that it goes on from; 0: none
        self._machine = machine  # as described when the run started: the checkout may have moved on since
        self._diagnosis = Diagnosis(config)
        self._skipped_in_a_row = 0
        self._stop_requested = False
        self.is_interrupted = False  # stopped at once, not at the end of a step
        self._bar = None
        self._last_step = 0
        for row in history:
            self._diagnosis.check(row)  # what it has said already
        self._metrics = MetricsLog(directory, history, wandb, self.tell)

    @property
    def resume_command(self) -> str:
        return f"python {shlex.quote(sys.argv[0])} --resume {shlex.quote(str(self.directory))}"

    def tell(self, sentence: str) -> None:
        """Print above the progress bar."""
        from tqdm import tqdm

        tqdm.write(sentence)

    def before(self, evaluate: Callable[[], Evaluation]) -> Evaluation:
        """The evaluation of the policy before training, logged as step 0; a resumed run reads it back."""
        path = self.directory / "before.json"
        if self.resumed_at:
            metrics, texts, outcomes = json.loads(path.read_text(encoding="utf-8"))
            return Evaluation(metrics, texts, [Outcome(tuple(kind), *rest) for kind, *rest in outcomes])
        evaluation = evaluate()
        path.write_text(json.dumps(evaluation), encoding="utf-8")
        self.log(0, {f"eval/{name}": value for name, value in evaluation.metrics.items()})
        return evaluation

    def restore(self, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Give a resumed run's policy and optimizer the state of its last checkpoint; does nothing in a new run."""
        if self.resumed_at:
            read_checkpoint(self.directory / "checkpoints" / f"step_{self.resumed_at}", policy, optimizer)

    def steps(self, num_steps: int) -> Iterator[int]:
        """Count from where the run stands to `num_steps`, behind a progress bar, whose text `log` sets.

        Raises:
            KeyboardInterrupt: after a step during which the user has asked to stop.
        """
        from tqdm import tqdm

        self._last_step = num_steps
        self._bar = tqdm(
            range(self.resumed_at + 1, num_steps + 1),
            initial=self.resumed_at,
            total=num_steps,
            bar_format="{desc} [{elapsed}<{remaining}]",
            dynamic_ncols=True,
            mininterval=0.1 if sys.stderr.isatty() else 10,  # a log file needs no line a step
        )
        for step in self._bar:
            yield step
            if self._stop_requested:
                raise KeyboardInterrupt
        self._bar = None

    def log(self, step: int, metrics: dict[str, float], line: str = "") -> None:
        """Write one step's metrics, show `line` as the progress, and say what looks wrong.

        Raises:
            UserError: the third step in a row had an update that was not finite.
        """
        self._metrics.write(step, metrics)
        if self._bar is not None and line:
            self._bar.set_description_str(line, refresh=False)
        for sentence in self._diagnosis.check(metrics):
            self.tell(f"step {step}: {sentence}")
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if metrics.get("loss/skipped") else 0
        if self._skipped_in_a_row == MAX_SKIPPED:
            checkpoints = self.directory / "checkpoints"
            raise UserError(
                f"the gradients of steps {step - MAX_SKIPPED + 1} to {step} were not finite, and were skipped. Start "
                "again with a lower --lr"
                + (f", from a checkpoint if you like: --model {checkpoints}/step_<N>" if checkpoints.exists() else "")
            )

    def log_samples(
        self,
        step: int,
        rows: list[dict],
        trajectories: list[Trajectory],
        texts: list[str],
        experience: Experience,
        statistics: UpdateStatistics,
    ) -> None:
        """Keep two groups of most steps and every tenth step whole, one line a completion; print one now and then.

        Every list of a line has one entry for each of its `ids`, and 0 where nothing was sampled. A number that is not
        finite becomes null, as JSON has no name for it.

        Args:
            rows: the training rows, which the trajectories' `prompt_index` counts.
        """
        every = self.config.samples_every
        if every == 0 or step % every:
            return
        group_size = sum(row.prompt_index == trajectories[0].prompt_index for row in trajectories)
        kept = trajectories if step % 10 == 0 else trajectories[: 2 * group_size]
        if step % 10 == 0 or step == 1:
            best = int(experience.returns[:group_size, 0].argmax())
            question = shorten(rows[kept[best].prompt_index]["question"], 120)
            earned = f"{experience.returns[best, 0].item():g}"
            self.tell(f"step {step}: {question}\n  -> {shorten(texts[best], 240)} (reward {earned})")
        with (self.directory / "samples.jsonl").open("a", encoding="utf-8") as samples:
            for index, row in enumerate(kept):
                task_row = {name: rows[row.prompt_index][name] for name in ("question", "answer")}
                entry = {"step": step, **task_row, "text": texts[index]}
                entry |= _describe_row(row, index, experience, statistics)
                samples.write(json.dumps(_finite(entry)) + "\n")

    def checkpoint(self, step: int, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Write checkpoints/step_N where one is due: every --checkpoint-every steps, at the last one, on Ctrl-C.

        None is due while updates are being skipped: what led to that is nothing to go on from.
        """
        every = self.config.checkpoint_every
        is_due = self._stop_requested or (every and (step % every == 0 or step == self._last_step))
        if is_due and not self._skipped_in_a_row:
            for name in ("metrics.jsonl", "samples.jsonl"):  # a checkpoint must not be newer than they are
                if (self.directory / name).exists():
                    flush_to_disk(self.directory / name)
            write_checkpoint(self.directory / "checkpoints", step, policy, optimizer, self.config.keep_checkpoints)

    def save_final(self, policy: Policy) -> Path:
        """Write final/, which `from_pretrained` loads (with LoRA: the adapter), and what --save-merged asks for."""
        path = self.directory / "final"
        save_policy(policy, path)
        if self.config.save_merged:
            save_merged(self.config, path, self.directory / "final_merged")
        return path

    def finish(self, before: Evaluation, after: Evaluation, eval_rows: list[dict]) -> None:
        """Log the evaluation after training, write the summary and the picture, and print what was gained."""
        self.log(self.config.steps, {f"eval/{name}": value for name, value in after.metrics.items()})
        gain = divide_gain(before.outcomes, after.outcomes)
        results = {
            "accuracy_before": before.metrics["greedy/accuracy"],
            "accuracy_after": after.metrics["greedy/accuracy"],
            **{"before": before.metrics, "after": after.metrics, "gain": gain},
        }
        self.write_summary(results)
        show_before_and_after(self.directory, eval_rows, before, after, gain)

    def write_summary(self, results: dict) -> None:
        """Write summary.json, with `results` first, and curve.png."""
        steps = [row for row in read_lines(self.directory / "metrics.jsonl") if "time/step" in row]
        seconds = sum(row["time/step"] for row in steps)
        num_tokens = sum(row["time/tokens_per_second"] * row["time/step"] for row in steps)
        summary = {
            **results,
            "steps": len(steps),
            "seconds": round(seconds, 1),
            "tokens_per_second": round(num_tokens / seconds, 1) if steps else 0.0,
            "peak_memory_bytes": peak_memory_bytes(self.config.device),
            **self._machine,
        }
        (self.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        from viewer.curve import draw_curve

        draw_curve(self.directory)

    def close(self) -> None:
        self._metrics.close()

    def request_stop(self, *_) -> None:
        """On Ctrl-C or SIGTERM: in a step, let it end and write a checkpoint; elsewhere, or a second time, stop now."""
        if self._bar is None or self._stop_requested:
            self.is_interrupted = True
            raise KeyboardInterrupt
        self._stop_requested = True
        self.tell("stopping: this step is finished first, and a checkpoint written (once more: at once)")


@contextmanager
def start_run(experiment: str, config: PolicyConfig) -> Iterator[Run]:
    """Make the run's directory and write its settings, before anything slow happens; or go on with a run.

    Within the block Ctrl-C and SIGTERM end the step that is running and write a checkpoint. A run that ends with an
    error of the user's before anything was logged leaves no directory.

    Raises:
        UserError: a run of that name exists, the directory cannot be made, or the disk is full.
    """
    from safetensors import SafetensorError

    torch.set_num_threads(config.threads)
    machine = describe_machine()
    run = _resume_run(experiment, config, machine) if config.resume else _make_run(experiment, config, machine)
    with _signals_to(run.request_stop):
        try:
            try:
                yield run
            except Exception:
                if run.is_interrupted:  # in the midst of an import, say, which can turn this into an error of its own
                    raise KeyboardInterrupt from None
                raise
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted; go on with: {run.resume_command}") from None
        except UserError:
            if not config.resume and not (run.directory / "metrics.jsonl").exists():
                shutil.rmtree(run.directory)
            raise
        except (OSError, SafetensorError) as error:  # what safetensors raises has no errno; it comes from save_final
            if isinstance(error, OSError) and error.errno not in NO_ROOM:
                raise
            raise UserError(
                f"{run.directory} could not be written ({error}); when there is room, go on with: {run.resume_command}"
            ) from error
        finally:
            run.close()


def _make_run(experiment: str, config: PolicyConfig, machine: dict) -> Run:
    name = config.name or f"{datetime.now():%Y%m%d-%H%M%S}-seed{config.seed}"
    directory = Path(config.runs_dir).expanduser() / experiment / name
    try:
        directory.mkdir(parents=True)
        settings = dataclasses.asdict(config) | machine | {"experiment": experiment, "command": sys.argv}
        try:
            _write_settings(directory, settings)
        except OSError:
            shutil.rmtree(directory)
            raise
    except FileExistsError:
        if not directory.is_dir():
            raise UserError(f"--runs-dir: {directory} cannot be made (a file is in the way)") from None
        raise UserError(
            f"the run {directory} exists already; choose another --name, or go on with it: --resume {directory}"
        ) from None
    except OSError as error:
        raise UserError(f"--runs-dir: {directory} cannot be written ({error.strerror})") from error
    options = dataclasses.asdict(config).items()
    print("settings: " + "  ".join(f"{name}={value}" for name, value in options if value not in (None, "", False)))
    return Run(directory, config, machine, 0, [], _wandb_settings(experiment, directory, config))


def _resume_run(experiment: str, config: PolicyConfig, machine: dict) -> Run:
    directory = Path(config.resume).expanduser()
    settings = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if settings["experiment"] != experiment:
        raise UserError(f"--resume {directory} is a run of {settings['experiment']}, not of {experiment}")
    found = newest_checkpoint(directory / "checkpoints")
    step = 0 if found is None else found[0]
    if step > getattr(config, "steps", step):
        raise UserError(f"--resume {directory} stands at step {step} already, beyond --steps {config.steps}")
    for name in ("versions", "machine", "commit"):
        if settings[name] != machine[name]:
            print(f"the run began with {name} {settings[name]} and goes on with {machine[name]}: figures may differ")
    try:
        history = keep_until(directory / "metrics.jsonl", step if step else -1)
        keep_until(directory / "samples.jsonl", step)
        if getattr(config, "steps", None) != settings.get("steps"):
            _write_settings(directory, settings | {"steps": config.steps})
    except OSError as error:
        raise UserError(f"--resume {directory}: cannot be written ({error.strerror})") from error
    print(f"going on with {directory} " + (f"after step {step}" if step else "from the start: it has no checkpoint"))
    return Run(directory, config, machine, step, history, _wandb_settings(experiment, directory, config))


def _write_settings(directory: Path, settings: dict) -> None:
    partial = directory / "config.json.partial"
    partial.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    partial.replace(directory / "config.json")


def _wandb_settings(experiment: str, directory: Path, config: PolicyConfig) -> dict | None:
    if not config.wandb:
        return None
    return {"project": experiment, "name": directory.name, "config": dataclasses.asdict(config)}


@contextmanager
def _signals_to(handler: Callable[..., None]) -> Iterator[None]:
    """Let `handler` have Ctrl-C and SIGTERM, where Python allows that: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _finite(value: object) -> object:
    """`value` with None in the place of every number in it that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _describe_row(row: Trajectory, index: int, experience: Experience, statistics: UpdateStatistics) -> dict:
    """What samples.jsonl holds of row `index` of a rollout."""

    def a_token(values: torch.Tensor) -> list[float]:
        return [0.0] + [round(value, 6) for value in values[: len(row.ids) - 1].tolist()]

    updates = statistics.rows.get((row.prompt_index, row.completion_index), [])  # none where it had no gradient
    if experience.action_log_probs is not None:
        old = experience.action_log_probs[index]
    else:
        old = updates[0].log_probs if updates else experience.sampler_log_probs[index]
    reference = experience.log_probs_ref
    return {
        "prompt_index": row.prompt_index,
        "completion_index": row.completion_index,
        "prompt_length": row.prompt_length,
        "ids": row.ids,
        "action_mask": row.action_mask,
        "sampler_log_probs": [round(value, 6) for value in row.sampler_log_probs],
        "action_log_probs": a_token(old),
        "log_probs_ref": None if reference is None else a_token(reference[index]),
        "entropy": a_token(updates[0].entropy) if updates else None,
        "rewards": row.rewards,
        "advantage": experience.advantages[index, 0].item(),
        "finish_reason": row.finish_reason,
        "updates": [
            {"epoch": update.epoch, "minibatch": update.minibatch, "log_probs": a_token(update.log_probs)}
            for update in updates
        ],
    }
