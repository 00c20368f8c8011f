"""Evaluate a policy on held-out questions: greedily, when sampled, and with k attempts."""

from collections.abc import Callable, Sequence
from math import comb
from typing import NamedTuple

from common.chat import decode, encode_prompt
from common.parallel import data_size, gather_rows, part_of
from common.policy import Policy
from common.sampling import sample
from common.trajectory import Trajectory

# Separates the random numbers of evaluations from the random numbers of training. They are the same in every
# evaluation, so that two policies are compared under the same random numbers.
EVALUATION = 2**31


class Answer(NamedTuple):
    """One sampled answer to one question."""

    question: int  # its row
    correct: float
    description: dict[str, float]


class Greedy(NamedTuple):
    """The greedy answer to one question, of a trajectory."""

    text: str
    turns: list[tuple[str, str]]  # empty if there is only one
    rewards: dict[str, float]


class Evaluation(NamedTuple):
    metrics: dict[str, float]  # by name, see `evaluate`
    greedy: list[Greedy]  # one per question
    answers: list[Answer]  # all sampled answers; empty if the task has no component `correct`


def evaluate(
    policy: Policy,
    rows: list[dict],
    task,
    *,
    max_new_tokens: int,
    system_prompt: str = "",
    num_samples: int = 0,
    seed: int = 0,
    prefix: str = "",
    generation_batch_size: int = 128,
    converse: Callable[..., list[Trajectory]] | None = None,
    sampler: Callable[..., list[Trajectory]] = sample,
    progress: Callable[[int], object] = lambda count: None,
) -> Evaluation:
    """Ask every question greedily, and `num_samples` times by sampling at the policy's temperature.

    The questions are divided among the ranks, and every rank gets the whole evaluation.

    Args:
        task: has the functions of a task's file, `messages`, `reward` and `describe`; `reward_all`, if it has that,
            rewards all completions at once.
        num_samples: k of mean@k and pass@k; 0: greedy only.
        prefix: text that every completion is forced to begin with, e.g. "<think>".
        converse: answers in several turns instead of one, and rewards the answers. It is called with all rows, the
            indices of the rows to ask, the group size, and key and greedy as in `sample`; it returns trajectories.
        sampler: answers if there is no `converse`: `sample`, or the `sample` of an inference engine.
        progress: called with the number of new completions, whenever this rank has some.

    Returns:
        Metrics, mostly means over all completions, as `greedy/...` and `sampled/...`: accuracy (of the reward component
        `correct`; for "sampled" it is mean@k), reward_<name> of the other components, and the task's descriptions, with
        accuracy_<name> among the completions that are described as 1. docs/metrics.md lists all of them.
    """
    forced = policy.tokenizer.encode(prefix, add_special_tokens=False) if prefix else []
    own = part_of(len(rows))  # the questions that this rank asks
    settings = {"max_new_tokens": max_new_tokens, "generation_batch_size": generation_batch_size}
    settings |= {"system_prompt": system_prompt, "forced": forced, "sampler": sampler}

    def ask(group_size: int, greedy: bool) -> list[Trajectory]:
        key, completions = (seed, EVALUATION), []
        count = max(1, generation_batch_size // group_size)  # questions asked at the same time
        for start in range(0, -(-len(rows) // data_size()), count):  # as often on every rank: sampling gathers shards
            part = list(own[start : start + count])
            if converse is not None:
                completions += converse(rows, part, group_size, key=key, greedy=greedy)
            else:
                completions += ask_once(policy, rows, task, part, group_size, key=key, greedy=greedy, **settings)
            progress(len(part) * group_size)
        return gather_rows(completions)

    greedy = ask(1, greedy=True)
    metrics = {f"greedy/{name}": value for name, value in _means(greedy).items()}
    answers: list[Answer] = []
    if num_samples:
        sampled = ask(num_samples, greedy=False)
        metrics |= {f"sampled/{name}": value for name, value in _means(sampled).items()}
        if "correct" in sampled[0].rewards:
            answers = [Answer(x.prompt_index, x.rewards["correct"], x.description) for x in sampled]
            groups = [answers[start : start + num_samples] for start in range(0, len(answers), num_samples)]
            num_right = [sum(answer.correct == 1 for answer in group) for group in groups]
            pass_rates = [pass_at_k(num_samples, c, num_samples) for c in num_right]
            metrics[f"sampled/pass@{num_samples}"] = mean(pass_rates)
    return Evaluation(metrics, [Greedy(x.text, x.turns, x.rewards) for x in greedy], answers)


def ask_once(
    policy: Policy,
    rows: list[dict],
    task,
    own: list[int],
    group_size: int,
    /,
    *,
    system_prompt: str = "",
    forced: Sequence[int] = (),
    sampler: Callable[..., list[Trajectory]] = sample,
    **settings,
) -> list[Trajectory]:
    """Answers in one turn to the questions of the rows `own`, rewarded and described.

    Args:
        forced: ids that every completion is forced to begin with.
        settings: for `sampler`; its `rows` selects some of the answers.
    """
    prompts = [encode_prompt(policy.tokenizer, task.messages(rows[index], system_prompt)) for index in own]
    prompts = [prompt + list(forced) for prompt in prompts]
    completions = sampler(policy, prompts, group_size, prompt_index=own, **settings)
    asked = [rows[completion.prompt_index] for completion in completions]
    texts = [decode(policy.tokenizer, [*forced, *completion.completion_ids]) for completion in completions]
    if hasattr(task, "reward_all"):
        rewards = task.reward_all(asked, texts, completions)
    else:  # a task's file by itself
        rewards = [task.reward(row, text) for row, text in zip(asked, texts, strict=True)]
    for completion, row, text, earned in zip(completions, asked, texts, rewards, strict=True):
        completion.text = text
        completion.rewards = earned
        completion.description = task.describe(row, text)
    return completions


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of k samples is right, from n samples with c right.

        pass@k = 1 - C(n-c, k) / C(n, k)        (Chen et al. 2021, arXiv 2107.03374, equation 1)

    >>> pass_at_k(n=8, c=2, k=1), pass_at_k(n=8, c=2, k=8)
    (0.25, 1.0)

    Raises:
        ValueError: k is more than n.
    """
    if k > n:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {n}")
    return 1.0 - comb(n - c, k) / comb(n, k)


def _means(completions: list[Trajectory]) -> dict[str, float]:
    first = completions[0]
    means = {f"reward_{name}": mean(values) for name, values in rewards_by_name(completions).items()}
    for name in first.description:
        values = [x.description[name] for x in completions]
        means[name] = mean(values)
        among = [x.rewards["correct"] for x in completions if "correct" in x.rewards and x.description[name]]
        if among and all(isinstance(value, float) and value in (0, 1) for value in values):  # int: a count
            means[f"accuracy_{name}"] = mean(among)
    if "reward_correct" in means:
        means["accuracy"] = means.pop("reward_correct")
    turns = {"turns": mean([x.num_turns for x in completions])} if first.turns else {}
    return (
        means
        | turns
        | {
            "length": mean([x.num_action_tokens for x in completions]),
            "stopped": mean([x.finish_reason == "stop" for x in completions]),
        }
    )


def rewards_by_name(completions: list[Trajectory]) -> dict[str, list[float]]:
    """The values of each reward component, of the completions that have it: a reward need not apply to all of them."""
    names = dict.fromkeys(name for row in completions for name in row.rewards)
    return {name: [row.rewards[name] for row in completions if name in row.rewards] for name in names}


def mean(values: list) -> float:
    return sum(values) / len(values)
