"""The evaluation of a run: the held-out questions of its task, with its settings."""

from collections.abc import Callable

from common.evaluate import Evaluation, evaluate, mean
from common.parallel import is_main, part_of
from common.policy import Policy
from common.sampling import sample

from harness.base.config import AskedConfig
from harness.base.terminal import completions_bar, say_above_progress
from harness.task.task import Task, check_context


def evaluate_held_out(
    config: AskedConfig,
    task: Task,
    policy: Policy,
    num_samples: int = 0,
    converse: Callable | None = None,
    sampler: Callable = sample,
) -> Evaluation:
    """Ask the held-out questions, greedily and `num_samples` times each, in one turn or through `converse`.

    The metrics of further sets, see `--eval-sets`, have the name of the set in front.
    """
    if not task.fits_context:
        check_context(config, task, policy)
        task.fits_context = True
    sets = {"": task.eval_rows, **task.eval_sets}
    count, each = sum(map(len, sets.values())), 1 + num_samples
    if num_samples:  # before and after training
        say_above_progress(f"evaluating: {count} held-out questions, one greedy and {num_samples} sampled answers each")
    found = {}
    with completions_bar(0, sum(len(part_of(len(rows))) for rows in sets.values()) * each, is_shown=is_main()) as bar:
        for name, rows in sets.items():
            found[name] = evaluate(
                policy,
                rows,
                task,
                max_new_tokens=config.max_new_tokens,
                system_prompt=config.system_prompt,
                num_samples=num_samples,
                seed=config.seed,
                # an engine forms its own batches from all requests
                generation_batch_size=config.generation_batch_size if sampler is sample else len(rows) * each,
                converse=converse,
                sampler=sampler,
                progress=bar.update,
            )
    evaluation = found.pop("")
    for name, further in found.items():
        evaluation.metrics.update({f"{name}/{metric}": value for metric, value in further.metrics.items()})
    if getattr(config, "eval_suite", None):
        for metric in ("greedy/accuracy", "sampled/accuracy") if num_samples else ("greedy/accuracy",):
            of_sets = [further.metrics[metric] for further in found.values()]
            evaluation.metrics[f"{config.eval_suite}/{metric}"] = mean(of_sets)
    return evaluation
