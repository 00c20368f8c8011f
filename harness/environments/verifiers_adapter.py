"""Tasks of one turn from verifiers' tasksets: `--task verifiers:my-taskset`.

A taskset is an installed package, from the Environments Hub or your own. Its tasks are asked here, and scored by their
own reward functions. What only verifiers' own agents can play is refused: tools, containers, judges, several turns.

https://github.com/PrimeIntellect-ai/verifiers (version 0.4, `verifiers.v1`)
"""

import asyncio
import inspect
import itertools
from types import SimpleNamespace

import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, TraceTask
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import environment_class, load_taskset, taskset_class

from common.errors import UserError

from harness.environments.other_packages import EVAL_ROWS, one_line, pop_rows, split_settings

HELD_OUT = 5  # one task of so many is held out


def load(name: str) -> SimpleNamespace:
    """The tasks of the installed taskset with this name; settings after it are those of its config.

    A taskset has no splits: of its first `rows` tasks a fifth, at most 256, is held out, and no training row asks a
    question of those. With one reward function, it is the component `correct`; several keep their names and weights.
    Metrics have weight 0.

    Raises UserError for a taskset that is not installed, and for tasks that need more than one answer in text.
    """
    taskset_id, settings = split_settings(name)
    number = pop_rows(settings)["train"]
    try:
        kind = taskset_class(taskset_id)
        if environment_class(taskset_id) is not vf.SingleAgentEnv:
            raise UserError("it has an environment of its own, which plays several turns or agents")
        config = concrete_type(kind, vf.TasksetConfig) or vf.TasksetConfig
        taskset = load_taskset(config.model_validate({"id": taskset_id, **settings}))
        tasks = list(itertools.islice(taskset, number))
    except UserError:
        raise
    except Exception as error:  # of the import, of the settings' check, or of the taskset's own code
        raise UserError(f"it cannot be loaded: {one_line(error)}") from error
    if len(tasks) < 2:
        raise UserError(f"it has {len(tasks)} tasks, and one is needed for training and one for evaluation")
    if problem := next(filter(None, (_more_than_text(taskset, task) for task in tasks)), None):
        raise UserError(problem)
    rewards = {function.__name__: getattr(function, "_vf_weight", 1.0) for function in tasks[0].hooks("reward")}
    metrics = [function.__name__ for function in tasks[0].hooks("metric")]
    names = {next(iter(rewards)): "correct"} if len(rewards) == 1 else {reward: reward for reward in rewards}
    questions = [{"question": task.data.prompt_text, "task": index} for index, task in enumerate(tasks)]
    held_out = questions[: min(EVAL_ROWS, max(1, len(tasks) // HELD_OUT))]
    asked = {row["question"] for row in held_out}

    def rows(split: str) -> list[dict]:
        return held_out if split == "eval" else [row for row in questions if row["question"] not in asked]

    def messages(row: dict, system_prompt: str = "") -> list[dict]:
        """The task's prompt; a system prompt comes first, the run's or else the task's own."""
        data = tasks[row["task"]].data
        prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
        system = system_prompt or data.system_prompt
        first = [{"role": "system", "content": system}] if system else []
        return [*first, *({"role": turn.role, "content": turn.content} for turn in prompt)]

    def reward(row: dict, text: str) -> dict[str, float]:
        trace = score(tasks[row["task"]], text)
        found = {names[name]: trace.rewards[name].score for name in rewards}
        return found | {name: float(trace.metrics[name]) for name in metrics}

    weights = {names[name]: weight for name, weight in rewards.items()} | dict.fromkeys(metrics, 0.0)
    return SimpleNamespace(
        messages=messages, reward=reward, rows=rows, REWARD_WEIGHTS=weights, FIELDS={"question": str}
    )  # fmt: skip


def score(task: vf.Task, text: str) -> vf.Trace:
    """The trace of a conversation of one turn, with the task's rewards and metrics."""
    prompt = task.data.prompt
    turns = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)
    turns.append(vf.AssistantMessage(content=text))
    nodes = [
        MessageNode(parent=index - 1 if index else None, message=turn, sampled=index == len(turns) - 1)
        for index, turn in enumerate(turns)
    ]
    trace = vf.Trace(
        task=TraceTask(type=type(task).__name__, data=task.data), agent=AgentInfo(config=vf.AgentConfig()), nodes=nodes
    )
    asyncio.run(task.score(trace))
    return trace


def _more_than_text(taskset: vf.Taskset, task: vf.Task) -> str | None:
    """What a task needs besides one answer in text; None: nothing."""
    if task.NEEDS_CONTAINER or type(task).setup is not vf.Task.setup or type(task).finalize is not vf.Task.finalize:
        return "its tasks are prepared or scored in a container, which only verifiers' own agents start"
    if type(task).toolsets(task.config) or type(taskset).toolsets(taskset.config):
        return "its tasks have tools, which only verifiers' own agents can call"
    if task.config.judges:
        return "its tasks are scored by a judge, which is a model that verifiers asks"
    functions = [*task.hooks("reward"), *task.hooks("metric")]
    if any("runtime" in inspect.signature(function).parameters for function in functions):
        return "its rewards read the container in which verifiers' own agents work"
    if not task.hooks("reward"):
        return "its tasks have no reward function"
    prompt = task.data.prompt
    if not prompt or not (isinstance(prompt, str) or all(isinstance(turn.content, str) for turn in prompt)):
        return "its prompts are not text"
    return None
