"""One evaluation: ask what is not asked yet, then write and return the results."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from common.errors import UserError
from common.policy import Policy

from harness.base.config import ModelConfig
from harness.base.files import replace_file
from harness.base.terminal import printable, say
from harness.data.context import check_context
from harness.data.task import Task
from harness.evaluation.answers import Completions, ask, make_batches
from harness.evaluation.comparison import check_shared, compare, read_results
from harness.evaluation.evaluation_directory import begin, locked, tell_changes
from harness.evaluation.failures import failures
from harness.evaluation.figures import Answers, figures, read_answers
from harness.evaluation.questions import answer_reader, content_of, load_questions
from harness.logs.metrics import finite
from harness.run.start import NO_SPACE


def evaluate(
    config: ModelConfig, directory: Path, load: Callable[[], Policy], renamed: dict[str, str] | None = None
) -> dict:
    """Ask all questions, or those that are left, and write results.json and failures.txt; returns the results.

    Args:
        load: the policy; it is not called if nothing is left to ask.
        renamed: fields of the data, and what the task calls them.
    """
    task = load_questions(config, renamed or {})
    other = None if config.compare is None else read_results(config.compare)
    if other is not None:
        check_shared(other, list(map(content_of, task.eval_rows)))
    with locked(directory):
        try:
            settings = begin(directory, config, task)
            batches = make_batches(len(task.eval_rows), config.num_samples, config.generation_batch_size)
            completions = Completions(directory / "completions.jsonl", batches, config.num_samples)
            if completions.left:
                tell_changes(directory, settings)
                _ask(config, task, completions, load)
            answers = read_answers(completions, len(task.eval_rows), answer_reader(task))
            results = settings | _results(task, answers, config.seed)
            if other is not None:
                results["comparison"] = compare(other, results, config.seed)
            page = failures(task, answers)
            replace_file(directory / "failures.txt", page.encode(errors="replace"))
            replace_file(directory / "results.json", (json.dumps(finite(results), indent=1) + "\n").encode())
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            problem = f"{directory} could not be written ({os.strerror(error.errno)})"
            raise UserError(f"{problem}; when there is space, the same command with this --output continues") from error
    return results


def _ask(config: ModelConfig, task: Task, completions: Completions, load: Callable[[], Policy]) -> None:
    policy = load()
    check_context(config, task, policy)
    total = len(task.eval_rows) * (1 + config.num_samples)
    done = total - sum(len(batch.rows) for batch in completions.left)
    if done:
        say(f"{done} of {total} completions are there already")
    settings = {name: getattr(config, name) for name in ("seed", "system_prompt", "max_new_tokens", "top_p")}
    style = {"bar_format": "completions: {n_fmt}/{total_fmt} |{bar}| [{elapsed}<{remaining}]", "dynamic_ncols": True}
    if sys.stderr.isatty():
        style["leave"] = False
    else:
        style |= {"mininterval": 60.0, "delay": 60.0}  # seconds between what a log file is told
    with tqdm(total=total, initial=done, **style) as progress:
        for batch in completions.left:
            completions.add(ask(policy, task.eval_rows, task, batch, config.num_samples, **settings))
            progress.update(len(batch.rows))


def _results(task: Task, answers: Answers, seed: int) -> dict:
    """All figures, and for each question what two evaluations are compared by."""
    questions = []
    for index, row in enumerate(task.eval_rows):
        values = [sample.correct for sample in answers.sampled[index]]
        greedy = answers.greedy[index].correct
        entry = {"row": content_of(row), "question": printable(row.question, 100), "greedy": greedy}
        if values:
            entry |= {"mean": sum(values) / len(values), "right": sum(value == 1 for value in values)}
        questions.append(entry)
    return {"num_questions": len(questions), "asked": task.data, **figures(answers, seed), "questions": questions}
