"""The evaluation of a run: the held-out questions of its task, with its settings."""

from common.evaluate import Evaluation, evaluate
from common.policy import Policy

from common.plumbing.config import RunConfig
from common.plumbing.context import check_context
from common.plumbing.task import Task


def evaluate_held_out(config: RunConfig, task: Task, policy: Policy, num_samples: int = 0) -> Evaluation:
    """Ask the held-out questions, greedily and `num_samples` times each by sampling.

    Raises:
        UserError: before the first evaluation of a run, if a prompt is too long for the model.
    """
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
    )
