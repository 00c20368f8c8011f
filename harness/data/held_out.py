"""The evaluation of a run: the held-out questions of its task, with its settings."""

import json
from collections.abc import Callable
from pathlib import Path

from common.evaluate import Answer, Evaluation, Greedy, evaluate
from common.parallel import is_main, part_of
from common.policy import Policy
from common.sampling import sample

from harness.base.config import AskedConfig
from harness.base.terminal import completions_bar, say_above_progress
from harness.data.context import check_context
from harness.data.task import Task


def evaluate_held_out(
    config: AskedConfig,
    task: Task,
    policy: Policy,
    num_samples: int = 0,
    converse: Callable | None = None,
    sampler: Callable = sample,
) -> Evaluation:
    """Ask the held-out questions, greedily and `num_samples` times each, in one turn or through `converse`."""
    if not task.fits_context:
        check_context(config, task, policy)
        task.fits_context = True
    count, each = len(task.eval_rows), 1 + num_samples
    if num_samples:  # before and after training
        say_above_progress(f"evaluating: {count} held-out questions, one greedy and {num_samples} sampled answers each")
    with completions_bar(0, len(part_of(count)) * each, is_shown=is_main()) as bar:
        return evaluate(
            policy,
            task.eval_rows,
            task,
            max_new_tokens=config.max_new_tokens,
            system_prompt=config.system_prompt,
            num_samples=num_samples,
            seed=config.seed,
            # an engine forms its own batches from all requests
            generation_batch_size=config.generation_batch_size if sampler is sample else count * each,
            converse=converse,
            sampler=sampler,
            progress=bar.update,
        )


def read_before(path: Path) -> Evaluation | None:
    """The evaluation before training, as the run saved it; None if it did not."""
    if not path.exists():
        return None
    metrics, greedy, answers = json.loads(path.read_text(encoding="utf-8"))
    # older runs saved only the texts
    greedy = [Greedy(answer, [], {}) if isinstance(answer, str) else Greedy(*answer) for answer in greedy]
    return Evaluation(metrics, greedy, [Answer(*answer) for answer in answers])
