"""A task for a run: the user's file, its rewards, and the rows to train and to evaluate on."""

import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from common.errors import UserError
from common.policy import Policy
from common.trajectory import Trajectory

from harness.base.checks import parse_sources
from harness.base.config import AskedConfig, ModelConfig, RunConfig, shown
from harness.base.terminal import say
from harness.data.benchmarks import SUITES, Read
from harness.data.order import hold_out, num_steps
from harness.data.rows import Row
from harness.models.context import check_prompts, context_length, longest_prompt
from harness.processes.processes import agreed
from harness.task.named_task import seconds_of, task_of
from harness.task.scorer import Scorer
from harness.task.task_file import TaskFile


@dataclass(eq=False, repr=False)
class Task:
    """What `load_task` returns; the methods are those of its parts that a train.py calls."""

    scorer: Scorer
    train_rows: list[Row] = field(default_factory=list)
    eval_rows: list[Row] = field(default_factory=list)
    eval_sets: dict[str, list[Row]] = field(default_factory=dict)  # further held-out questions, by name
    sources: dict[str, object] = field(default_factory=dict)  # by flag: where the rows and the functions are from
    tools: list[dict] | None = None  # JSON schemas that every prompt presents
    fits_context: bool = False  # whether all rows are known to fit

    @property
    def file(self) -> TaskFile:
        return self.scorer.file

    def messages(self, row: dict, system_prompt: str = "") -> list[dict]:
        return self.file.messages(row, system_prompt)

    def describe(self, row: dict, text: str) -> dict[str, float]:
        return self.file.describe(row, text)

    def reward(self, row: dict, text: str) -> dict[str, float]:
        return self.scorer.reward(row, text)

    def reward_all(self, rows: list[Row], texts: list[str], completions: list[Trajectory]) -> list[dict[str, float]]:
        return self.scorer.reward_all(rows, texts, completions)

    def reward_together(
        self, rows: list[Row], texts: list[str], completions: list[Trajectory]
    ) -> list[dict[str, float]]:
        return self.scorer.reward_together(rows, texts, completions)

    def vote(self, row: dict, text: str) -> str | None:
        return self.file.vote(row, text)

    def feedback(self, row: dict, text: str) -> str:
        return self.file.feedback(row, text)

    def total_reward(self, rewards: dict[str, float]) -> float:
        return self.scorer.total_reward(rewards)


@agreed
def load_task(
    config: RunConfig,
    more_weights: dict[str, float] | None = None,
    tools: list[dict] | None = None,
    needs_votes: bool = False,
) -> Task:
    """The task that `--task` names, with its training and evaluation rows; both are filtered in the same way.

    `more_weights` are weights of reward components that the experiment adds, or of `correct`; `tools` are JSON schemas;
    `needs_votes` refuses a task whose answers cannot be read. Without `--eval-data`, a task's own data have a held-out
    file, and a user's `--data` may have a test file (`find_test_data`). Without either, `--eval-prompts` rows of
    `--data`, chosen by `--seed`, are held out. A task that defines `rows(split)` makes both without `--data`.
    """
    # here as below, not at the top: `--help` need not wait for them
    from harness.task.questions import find_sources, load_rows, read_published, source_name
    from harness.task.row_checks import check_votes, shared_questions, try_solutions

    scorer = load_scorer(config, more_weights)
    file, functions, filters = scorer.file, scorer.functions, (config.at_most, config.max_question_length)
    source, eval_source = find_sources(file, config.data, config.eval_data)
    train_rows = load_rows(source, file, *filters)
    if eval_source is not None or source is None:
        eval_rows = load_rows(eval_source, file, *filters, split="eval")[: config.eval_prompts]
    elif len(train_rows) <= config.eval_prompts:
        raise UserError(
            f"{shown(source)} has {len(train_rows)} rows, and --eval-prompts takes {config.eval_prompts} of them: "
            "lower it, or give --eval-data"
        )
    else:
        train_rows, eval_rows = hold_out(train_rows, config.eval_prompts, config.seed)
    if len(train_rows) > (config.max_prompts or len(train_rows)):
        say(f"{source_name(source, file)}: the first {config.max_prompts} of {len(train_rows)} training rows are used")
        train_rows = train_rows[: config.max_prompts]
    prompts_per_step = getattr(config, "prompts_per_step", 1)
    if len(train_rows) < prompts_per_step:
        raise UserError(f"--prompts-per-step {prompts_per_step} exceeds the {len(train_rows)} training rows")
    known = sum(map(len, shared_questions(train_rows, eval_rows)))
    if known and not file.is_environment:  # whose rows can begin alike
        say(f"{known} of the {len(eval_rows)} held-out questions are training questions as well: they test no learning")
    try_solutions(scorer, [*train_rows, *eval_rows])  # before a model is loaded
    scorer.try_out(train_rows[0])
    if needs_votes:
        check_votes(file, train_rows)
    if note := file.note():
        say(f"{file}: {note}", sys.stderr)
    task = Task(scorer, train_rows, eval_rows, tools=tools)
    task.sources = {"data": source, "eval_data": eval_source, "task": file.path}
    for name, (set_source, read) in _find_sets(config).items():
        rows = read_published(set_source, file, read)[: config.eval_prompts]
        if known := sum(map(len, shared_questions(train_rows, rows))):
            say(f"{known} of the {len(rows)} questions of {name} are training questions as well")
        try_solutions(scorer, rows)
        task.eval_sets[name], task.sources[f"eval_sets {name}"] = rows, set_source
    if functions is not None:  # before a model is loaded
        rows = [row for some in (train_rows, eval_rows, *task.eval_sets.values()) for row in some]
        functions.columns = list(dict.fromkeys(key for row in rows for key in row))
        functions.state.max_steps = num_steps(config, len(train_rows))
        rows, texts = functions.trial(train_rows, getattr(config, "group_size", 1), file.right_answer)
        functions.check(scorer.asked(rows), rows, texts)
    return task


def load_scorer(config: RunConfig, more_weights: dict[str, float] | None = None) -> Scorer:
    """The rewards of a run, with the judges and the functions that the settings name."""
    from harness.task.answer_judge import load_judges

    judges, functions = load_judges(config), None
    if config.reward_functions is not None:
        from harness.task.reward_functions import RewardFunctions

        functions = RewardFunctions(config.reward_functions)
    file, prompt = task_of(config.task, seconds_of(config)), config.system_prompt or ""
    scorer = Scorer(file, config.reward_weight, more_weights, judges, functions, prompt)
    if not any(scorer.weights.values()):
        remedy = "give a --reward-model or a --judge, or raise one with --reward-weight"
        raise UserError(f"{file}: the weights of all components are 0, so that nothing would be learned: {remedy}")
    return scorer


def load_held_out_task(config: AskedConfig) -> Task:
    """The task that `--task` names, with its own questions; `--data` holds something else, which is trained on."""
    task = load_task(
        RunConfig(task=config.task, seed=config.seed, eval_prompts=config.eval_prompts, device=config.device)
    )
    task.sources |= {"data": config.data, "eval_data": config.eval_data}  # of the run
    return task


def _find_sets(config: RunConfig) -> dict[str, tuple[str, Read | None]]:
    """The sources of the further held-out questions by their names, with what brings rows to the task's form."""
    sets = {name: (source, None) for name, source in parse_sources("--eval-sets", config.eval_sets).items()}
    if config.eval_suite is None:
        return sets
    task, benchmarks = SUITES[config.eval_suite]
    if config.task != task:
        raise UserError(f"--eval-suite {config.eval_suite} is asked by --task {task}, not by {config.task}")
    return {name: (found.hub, found.read) for name, found in benchmarks.items()} | sets


# Whether the context has room -----------------------------------------------------------------------------------------


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
