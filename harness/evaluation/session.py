"""One evaluation in its directory: the questions, the ones that are left to ask, and the results.

The directory holds config.json, completions.jsonl, results.json, failures.txt and .lock. It is locked while a process
works in it, and it can only be continued with the settings that it began with.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from common.errors import UserError
from common.policy import Policy

from harness.base.checks import flag
from harness.base.config import ModelConfig
from harness.base.files import NO_SPACE, finite, replace_file
from harness.base.hub import find_test_split, is_hub_source
from harness.base.machine import describe_machine
from harness.base.terminal import completions_bar, printable, say
from harness.data.benchmarks import Read
from harness.data.rows import Row
from harness.evaluation.comparison import OLDER, compare, read_results
from harness.evaluation.completions import Completions, ask, make_batches
from harness.evaluation.failures import failures
from harness.evaluation.figures import Answers, figures, mean_of, read_answers, shares
from harness.run.directory import BEFORE_SETTINGS, lock_directory
from harness.run.settings import check_sources, describe_sources, write_settings
from harness.task.answer_judge import load_judges
from harness.task.named_task import task_of
from harness.task.questions import filter_rows, load_rows, read_published
from harness.task.scorer import Scorer
from harness.task.task import Task, check_context

# Settings that may change; the last changes rounding: `tell_changes` warns that it has changed
FREE = {"output", "compare", "judge_url", "threads"}


def evaluate(config: ModelConfig, directory: Path, load: Callable[[], Policy], read: Read | None = None) -> dict:
    """Ask all questions, or the remaining ones, and write results.json and failures.txt; returns the results.

    Args:
        load: returns the policy; not called if no questions remain.
        read: brings rows of a benchmark to the form of the task.
    """
    task = load_questions(config, read)
    other = None
    if config.compare is not None:
        other = read_results(config.compare, list(map(content_of, task.eval_rows)))
    batches = make_batches(len(task.eval_rows), config.num_samples, config.generation_batch_size)
    path = directory / "completions.jsonl"
    if Completions(path, batches).left:  # before there is a directory, which a mistake would leave behind
        task.scorer.judges = load_judges(config)
    with locked(directory):
        try:
            settings = begin(directory, config, task)
            completions = Completions(path, batches)
            if completions.left:
                for name, value in describe_machine().items():
                    if settings.get(name) != value:
                        before = f"{directory} began with {name} {settings.get(name)}"
                        say(f"{before}, and goes on with {value}: figures may differ")
                _ask_left(config, task, completions, load)
            answers = read_answers(completions, task.eval_rows, task.vote)
            results = settings | results_of(task, answers, config.seed)
            if other is not None:
                results["comparison"] = compare(other, results, config.seed)
            if "correct" in task.file.weights:
                replace_file(directory / "failures.txt", failures(task, answers).encode(errors="replace"))
            replace_file(directory / "results.json", (json.dumps(finite(results), indent=1) + "\n").encode())
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            problem = f"{directory} could not be written ({os.strerror(error.errno)})"
            raise UserError(f"{problem}; when there is space, the same command with this --output continues") from error
    return results


def _ask_left(config: ModelConfig, task: Task, completions: Completions, load: Callable[[], Policy]) -> None:
    for judge in task.scorer.judges:
        for line in completions:
            judge.remember(task.messages(task.eval_rows[line["question"]]), line["text"], line["rewards"])
    policy = load()
    check_context(config, task, policy)
    total = len(task.eval_rows) * (1 + config.num_samples)
    done = total - sum(map(len, completions.left))
    if done:
        say(f"{done} of {total} completions are there already")
    with completions_bar(done, total) as progress:
        for batch in completions.left:
            completions.add(ask(policy, task, batch, config))
            progress.update(len(batch))


def results_of(task: Task, answers: Answers, seed: int) -> dict:
    """All figures and, for each question, the values that two evaluations are compared by."""
    questions, judged = [], [name for judge in task.scorer.judges for name in judge.weights]
    for row, greedy, samples in zip(task.eval_rows, answers.greedy, answers.sampled, strict=True):
        entry = {"row": content_of(row), "question": printable(row.question, 100)}
        if greedy.correct is not None:
            entry["greedy"], values = greedy.correct, [sample.correct for sample in samples]
            if values:
                entry |= {"mean": sum(values) / len(values), "right": sum(value == 1 for value in values)}
        if judged:
            groups = {"greedy": [greedy], "sampled": samples}
            entry["judged"] = {
                f"{section} {name}": mean_of(name, group)
                for name in judged
                for section, group in groups.items()
                if group
            }
        questions.append(entry)
    found = figures(answers, seed, judged)
    found["greedy"]["shares"] = shares(list(map(task.file.tally, task.eval_rows, answers.greedy_texts)))
    asked = task.sources["data"] or task.file.name  # which made its rows itself
    return {"num_questions": len(questions), "asked": asked, **found, "questions": questions}


# The questions -------------------------------------------------------------------------------------------------------


def load_questions(config: ModelConfig, read: Read | None = None) -> Task:
    """The task of an evaluation, with its questions as `eval_rows`, which `read` brings to the task's form."""
    file, judges = task_of(config.task), load_judges(config, is_asked=False)
    if "correct" not in file.weights and not judges:
        problem = f"has no reward component 'correct' (it has {', '.join(file.weights)})"
        remedy = "add it to its REWARD_WEIGHTS, with weight 0 if you like, or give a --judge"
        raise UserError(f"{file} {problem}, and so no accuracy: {remedy}")
    source = config.data if config.data is not None else file.eval_data
    if source is None and not file.has("rows"):
        raise UserError(f"{file} names no evaluation data: give --data")
    if source is not None and is_hub_source(source) and (test_split := find_test_split(source)) is not None:
        say(f"the questions are from {test_split} (--data names another split)")
        source = test_split
    filters = (config.at_most, config.max_question_length)
    if read is not None:
        rows = filter_rows(read_published(source, file, read), source, file, *filters)
    else:
        rows = load_rows(source, file, *filters, split="eval")
    sources = {"data": source, "eval_data": None, "task": file.path}
    task = Task(Scorer(file, judges=judges), eval_rows=rows[: config.limit], sources=sources)
    task.scorer.try_out(task.eval_rows[0])
    text = file.solution(task.eval_rows[0]) or ""
    file.vote(task.eval_rows[0], text)  # so that a failing `vote` or `tally` fails now
    file.tally(task.eval_rows[0], text)
    return task


def content_of(row: Row) -> str:
    """A checksum of a row's content, which identifies the row in any file."""
    text = json.dumps(row, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# The directory -------------------------------------------------------------------------------------------------------


def default_directory(seed: int) -> Path:
    """A new directory, named by date, time and seed like a run's."""
    parent, name = Path("runs") / "evaluate", f"{datetime.now():%Y%m%d-%H%M%S}-seed{seed}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(parent / name for name in names if not (parent / name).exists())


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make the directory, and keep other processes out of it within the block."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {directory} cannot be made ({error.strerror})") from error
    lock = lock_directory(directory, "writing an evaluation there")
    try:
        yield
    finally:
        lock.release()


def begin(directory: Path, config: ModelConfig, task: Task) -> dict:
    """Write the settings of a new evaluation, or check them against the one that is being continued; returns them."""
    sources = describe_sources(config, task)
    settings = dataclasses.asdict(config) | describe_machine() | {"sources": sources, "command": sys.argv}
    settings = json.loads(json.dumps(settings))  # tuples become lists, as in the file
    path = directory / "config.json"
    if not path.exists():
        if others := sorted({entry.name for entry in directory.iterdir()} - BEFORE_SETTINGS):
            names = printable(", ".join(others), 60)
            raise UserError(f"--output {directory} holds other files ({names}) and no evaluation: choose another")
        write_settings(directory, settings)
        return settings
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): choose another --output") from error
    if "num_samples" not in stored:
        raise UserError(f"--output {directory} is not an evaluation's (see its config.json): choose another")
    stored = OLDER | stored
    for name in (field.name for field in dataclasses.fields(config) if field.name not in FREE):
        if stored.get(name) != settings[name]:
            values = [printable(json.dumps(entry), 80) for entry in (settings[name], stored.get(name))]
            known = f"{values[1]} in {directory}: repeat that setting, or choose another --output"
            raise UserError(f"{flag(name)} {values[0]} differs from {known}")
    check_sources(directory, stored.get("sources", {}), sources, has_failed=False)
    return stored
