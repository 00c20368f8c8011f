"""The evaluation of a run: the held-out questions of its task, with its settings."""

from common.evaluate import Evaluation, evaluate
from common.policy import Policy

from common.plumbing.config import RunConfig
from common.plumbing.task import Task


def evaluate_held_out(config: RunConfig, task: Task, policy: Policy, num_samples: int = 0) -> Evaluation:
    """Ask the held-out questions, greedily and `num_samples` times each by sampling."""
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
