"""The evaluation of a run: the held-out questions of its task, with its settings."""

import json
from collections.abc import Callable
from pathlib import Path

from common.evaluate import Answer, Evaluation, evaluate
from common.policy import Policy
from common.sampling import sample

from harness.base.config import RunConfig
from harness.data.context import check_context
from harness.data.task import Task


def evaluate_held_out(
    config: RunConfig,
    task: Task,
    policy: Policy,
    num_samples: int = 0,
    converse: Callable | None = None,
    sampler: Callable = sample,
) -> Evaluation:
    """Ask the held-out questions, greedily and `num_samples` times each, in one turn or as `converse` does."""
    if not task.fits_context:
        check_context(config, task, policy)
        task.fits_context = True
    return evaluate(
        policy,
        task.eval_rows,
        task,
        max_new_tokens=config.max_new_tokens,
        system_prompt=config.system_prompt,
        num_samples=num_samples,
        seed=config.seed,
        generation_batch_size=config.generation_batch_size,
        converse=converse,
        sampler=sampler,
    )


def read_before(path: Path) -> Evaluation | None:
    """The evaluation before training as a run has kept it; None if it has not."""
    if not path.exists():
        return None
    metrics, texts, answers = json.loads(path.read_text(encoding="utf-8"))
    return Evaluation(metrics, texts, [Answer(*answer) for answer in answers])
