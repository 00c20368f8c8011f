"""Which answer a row wants, and a thought with that answer in place of the policy's own.

A completion is a thought z, up to and including the text that begins the answer (`--before-answer`), and an answer. The
reference y* is the row's answer with the text that ends it (`--after-answer`): without an end, "5" would be rewarded as
the beginning of "57".
"""

import bisect
import dataclasses

import torch

from common.chat import decode
from common.chat_template import control_tokens_of, encode_rendered
from common.errors import UserError
from common.experience import collate
from common.logprobs import token_log_probs
from common.policy import Policy
from common.trajectory import Trajectory

from harness.base.checks import parse_numbers
from harness.base.config import RunConfig
from harness.data.rows import Row
from harness.task.task import Task, load_task


def load_answered_task(config: RunConfig) -> Task:
    """The task of a run that pays for the likelihood: the task's own components are logged, unless they get a weight.

    Raises:
        UserError: a training row has no reference answer, or --before-answer is empty.
    """
    if not config.before_answer:
        raise UserError("--before-answer is empty: it is the text that ends a thought and begins the answer")
    task = load_task(config, more_weights={"likelihood": 1.0})
    given = parse_numbers("--reward-weight", config.reward_weight)
    task.scorer.weights |= {name: given.get(name, 0.0) for name in task.file.weights}
    task.scorer.paid = [name for name in task.scorer.paid if task.scorer.weights[name]]
    for row in task.train_rows:
        reference_answer(config, task, row)
    return task


def reference_answer(config: RunConfig, task: Task, row: Row) -> str:
    """The answer between `--before-answer` and its end in the task's `solution(row)`, or else the row's field `answer`.

    Of a list of spellings it is the first.

    Raises:
        UserError: there is none, or it is neither text nor a number.
    """
    solution, marker = task.file.solution(row), config.before_answer
    if solution is not None and marker not in solution:
        raise UserError(f"{row.place}: the solution of {task.file} has no {marker!r}: give another --before-answer")
    answer = task.file.right_answer(row)
    answer = answer[0] if isinstance(answer, list) and answer else answer
    if not isinstance(answer, str | int | float) or not str(answer).strip():
        raise UserError(f'{row.place}: no reference answer: a row needs a field "answer", or its task a solution(row)')
    return str(answer)


def thought_of(tokenizer, ids: list[int], marker: str) -> tuple[int, str] | None:
    """Where the thought of a completion ends: its number of tokens, and the part of the marker that they leave open.

    A token may hold the end of the marker and more, such as `>5`. The thought ends before it, and what it leaves open,
    here `>`, becomes a part of the answer. Only the first marker counts. None: there is no marker.
    """
    text = decode(tokenizer, ids)
    if marker not in text:
        return None
    text = text[: text.index(marker) + len(marker)]
    # the shortest beginning that has the marker, by halving: decoding every beginning would take longer
    count = bisect.bisect_left(range(len(ids)), True, key=lambda n: marker in decode(tokenizer, ids[:n]))
    while count and not text.startswith(decode(tokenizer, ids[:count])):
        count -= 1
    return count, text[len(decode(tokenizer, ids[:count])) :]


def with_reference(
    tokenizer, completion: Trajectory, answer: str, before: str, after: str, max_new_tokens: int
) -> tuple[Trajectory, int]:
    """The same thought, followed by the reference answer, whose log-probs are left at 0; and the answer's tokens.

    The ids of the answer are those of its text; a control token that a row spells stays text. A completion without an
    answer, or whose budget has no room for the reference, is returned as it is, with 0 tokens: the policy cannot have
    given this answer.
    """
    ids = completion.completion_ids
    found = thought_of(tokenizer, ids, before)
    if found is None:
        return completion, 0
    length, rest = found
    thought = decode(tokenizer, ids[:length])
    spelled = control_tokens_of(tokenizer).mark(rest + answer) + after
    given = encode_rendered(tokenizer, spelled, before=thought)
    if length + len(given) > max_new_tokens:
        return completion, 0
    start = completion.prompt_length + length
    row = dataclasses.replace(
        completion,
        ids=completion.ids[:start] + given,
        action_mask=completion.action_mask[:start] + [1] * len(given),  # trained on, though not sampled
        sampler_log_probs=completion.sampler_log_probs[:start] + [0.0] * len(given),
        finish_reason="given",
        text=thought + rest + answer + after,
        logged=completion.logged | {"sampled": completion.text[len(thought + rest) :]},
    )
    return row, len(given)


def with_references(
    config: RunConfig, task: Task, policy: Policy, completions: list[Trajectory]
) -> tuple[list[Trajectory], torch.Tensor]:
    """Each thought with the reference answer to its question, whose tokens one forward pass scores.

    Returns:
        B trajectories, which share the rewards of `completions`. In `sampler_log_probs`, a token of the reference has
        its log-prob under the policy at the sampling temperature, in nats. And is_answer (B, T-1): these tokens.
    """
    ends, budget = (config.before_answer, config.after_answer), config.max_new_tokens
    rows, counts = [], []
    for completion in completions:
        answer = reference_answer(config, task, task.train_rows[completion.prompt_index])
        row, count = with_reference(policy.tokenizer, completion, answer, *ends, budget)
        rows.append(row)
        counts.append(count)
    experience = collate(rows, policy.pad_id, policy.device)
    log_probs = token_log_probs(policy, experience, config.micro_batch).tolist()
    for row, count, scores in zip(rows, counts, log_probs, strict=True):
        if count:  # entry t is about token t+1
            row.sampler_log_probs[-count:] = scores[len(row.ids) - 1 - count : len(row.ids) - 1]
    position = torch.arange(experience.action_mask.shape[1], device=policy.device)  # (T-1,)
    end = experience.attention_mask.sum(dim=1, keepdim=True) - 1  # (B, 1)
    return rows, (position < end) & (position >= end - torch.tensor(counts, device=policy.device)[:, None])
