"""Checks before training that the context has room for every prompt of a run plus the completion budget."""

import itertools
import math
from collections.abc import Callable
from functools import partial

from common.policy import Policy

from harness.base.config import ModelConfig
from harness.data.rows import Row
from harness.models.context import check_prompts, context_length, longest_prompt
from harness.task.task import Task


def check_context(config: ModelConfig, task: Task, policy: Policy, engine: object | None = None) -> None:
    """Refuse a row whose prompt and completion exceed the context of the model, or of an `Engine`."""
    remedy = "leave out long questions with --max-question-length, or lower --max-new-tokens"
    remedy += ", or describe the functions of --tools in fewer words" if getattr(config, "tools", None) else ""
    engine_length = math.inf if engine is None else engine.max_length
    if engine_length < context_length(policy):
        remedy += f", or start the engine with a longer {engine.length_flag}"
    rows, messages = _asked(task, config.system_prompt)
    check_prompts(policy, rows, messages, config.max_new_tokens, remedy, task.tools, engine_length)


def fitting_length(task: Task, policy: Policy, system_prompt: str, max_new_tokens: int) -> int:
    """A power of 2 that every prompt with its completion fits into, or the model's context if that is smaller."""
    length = longest_of_run(task, policy.tokenizer, system_prompt) + max_new_tokens
    return int(min(max(256, 2 ** math.ceil(math.log2(length))), context_length(policy)))


def longest_of_run(task: Task, tokenizer, system_prompt: str) -> int:
    """The number of tokens of the longest prompt in training and evaluation."""
    return longest_prompt(tokenizer, *_asked(task, system_prompt), task.tools)[0]


def _asked(task: Task, system_prompt: str) -> tuple[list[Row], Callable[[Row], list[dict]]]:
    """All rows of a run, and the function that writes their prompts."""
    rows = [*task.eval_rows, *task.train_rows, *itertools.chain(*task.eval_sets.values())]
    return rows, partial(task.messages, system_prompt=system_prompt)
