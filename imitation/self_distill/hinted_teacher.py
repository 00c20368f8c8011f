"""The teacher of self-distillation: the policy itself, or an average of its earlier weights, that is shown a hint.

A hint says what is wrong with this completion (the task's `feedback`), or shows a right completion of the same question
(a demonstration), or both. The student samples without it; the teacher reads the same tokens under a longer prompt.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.chat import encode_prompt
from common.errors import UserError
from common.experience import Experience, collate
from common.logprobs import token_log_probs
from common.parallel import gather
from common.policy import Policy
from common.trajectory import Trajectory

from harness.base.config import RunConfig
from harness.base.terminal import say
from harness.models.context import context_length
from harness.processes.processes import requested_launch
from harness.task.task import Task


def hinted_question(question: str, demonstration: str | None, feedback: str) -> str:
    """What the teacher is asked instead of the question.

    >>> print(hinted_question("Use 5 to 9 words.", None, "It has 15 words, but must have 5 to 9."))
    Use 5 to 9 words.
    <BLANKLINE>
    Feedback on an earlier answer:
    It has 15 words, but must have 5 to 9.
    <BLANKLINE>
    Now write a correct answer.
    """
    shown = f"\n\nA correct answer:\n{demonstration}" if demonstration else ""
    said = f"\n\nFeedback on an earlier answer:\n{feedback}" if feedback else ""
    return f"{question}{shown}{said}\n\nNow write a correct answer."


class HintedTeacher:
    """Called with an experience and prompts with hints, it returns the log-probs of the same completions under these.

    Args:
        config: of the train.py beside this file.
        policy: the one that is trained; the teacher borrows it, and leaves it as it was.

    Raises:
        UserError: the run shards its weights, or the task has no `feedback` and `--hint feedback` asks for it.
    """

    def __init__(self, config: RunConfig, task: Task, policy: Policy):
        if requested_launch().sharding is not None:
            raise UserError("imitation/self_distill keeps whole weights: start it without FSDP and DeepSpeed")
        if config.hint != "demonstration" and not task.file.has("feedback"):
            problem = f"{task.file}: it defines no feedback(row, text), which says what is wrong with a completion"
            if config.hint == "feedback":
                raise UserError(f"{problem}: give --hint demonstration")
            say(f"{problem}: hints are demonstrations only")
        if config.hint == "demonstration" and config.group_size == 1:
            raise UserError("--hint demonstration shows another completion of the question: --group-size must exceed 1")
        self._config, self._task, self._policy = config, task, policy
        self._is_policy = config.teacher_update_rate == 1
        self._weights = [] if self._is_policy else [weight.detach().clone() for weight in self._trained()]
        self._has_told = False

    def hints(self, trajectories: list[Trajectory], returns: torch.Tensor) -> list[list[int] | None]:
        """The teacher's prompt for each completion, as ids; None where there is no hint.

        A demonstration is the first other text among the group's completions with at least `--success-threshold`.

        Args:
            trajectories: B rows, a group's rows adjacent.
            returns: (Q, G).
        """
        config, size, prompts = self._config, self._config.group_size, []
        is_right = (returns.flatten() >= config.success_threshold).tolist()
        for index, completion in enumerate(trajectories):
            group = range(index - index % size, index - index % size + size)
            right = (trajectories[other].text for other in group if is_right[other])
            demonstration = next((text for text in right if text != completion.text), None)
            feedback = self._task.feedback(self._task.train_rows[completion.prompt_index], completion.text)
            demonstration = None if config.hint == "feedback" else demonstration
            feedback = "" if config.hint == "demonstration" else feedback
            prompt = self._encode(completion, demonstration, feedback) if demonstration or feedback else None
            completion.description |= {"hinted": float(prompt is not None), "demonstrated": float(bool(demonstration))}
            prompts.append(prompt)
        return prompts

    def _encode(self, completion: Trajectory, demonstration: str | None, feedback: str) -> list[int] | None:
        """The ids of a prompt with a hint; None if the completion does not fit behind it, which is said once."""
        row = self._task.train_rows[completion.prompt_index]
        *before, last = self._task.messages(row, self._config.system_prompt)
        asked = [*before, last | {"content": hinted_question(last["content"], demonstration, feedback)}]
        ids, context = encode_prompt(self._policy.tokenizer, asked), context_length(self._policy)
        if len(ids) + len(completion.completion_ids) <= context:
            return ids
        if not self._has_told:
            self._has_told = True
            say(
                f"{row.place}: a prompt with its hint has {len(ids)} tokens and exceeds, with its completion, the "
                f"context of {context:.0f}: such completions get no hint (see completion/hinted)"
            )
        return None

    def __call__(self, experience: Experience, prompts: list[list[int] | None]) -> torch.Tensor:
        """Log-probs (B, T-1) of the action tokens, in nats: the teacher's, or the student's in rows without a hint."""
        log_probs, hinted = experience.old_log_probs.clone(), []
        has_hint = torch.tensor([prompt is not None for prompt in prompts], device=log_probs.device)  # (B,)
        for index in has_hint.nonzero()[:, 0].tolist():
            start, end = int(experience.prompt_lengths[index]), int(experience.attention_mask[index].sum())
            completion = experience.sequences[index, start:end].tolist()
            mask = [0] * len(prompts[index]) + [1] * len(completion)
            hinted.append(Trajectory(prompts[index] + completion, len(prompts[index]), mask, [0.0] * len(mask)))
        if hinted:
            longer = collate(hinted, self._policy.pad_id, self._policy.device)  # with another T
            with self._own_weights():
                scored = token_log_probs(self._policy, longer, self._config.micro_batch)
            is_hinted = experience.action_mask.bool() & has_hint[:, None]  # (B, T-1)
            log_probs[is_hinted] = scored[longer.action_mask.bool()]  # the same tokens, row by row
        return log_probs

    def metrics(self, log_w: torch.Tensor, returns: torch.Tensor) -> dict[str, float]:
        """Whether the teacher understands its hints, over the hinted completions of all processes.

        - `teacher/agreement`: over all pairs of a right and a wrong completion of one question, how often the teacher
          raises the right one more: a larger sum of log w (equal ones count half); absent without pairs;
        - `teacher/weight_max`: the largest w.

        Args:
            log_w: (B, T-1) of the action tokens, in nats; 0 in rows without a hint, which are left out.
            returns: (Q, G).
        """
        is_right = (returns >= self._config.success_threshold).to(log_w.device)  # (Q, G)
        sums, is_hinted = log_w.sum(dim=1).view_as(is_right), (log_w != 0).any(dim=1).view_as(is_right)
        wins = torch.cat(
            [
                (a[right & hinted][:, None] - a[~right & hinted][None]).sign().flatten()
                for a, right, hinted in zip(sums, is_right, is_hinted, strict=True)
            ]
        )
        parts = gather((wins.sum().item(), len(wins), log_w.max().item()))
        total, pairs, largest = (
            of(values) for of, values in zip((sum, sum, max), zip(*parts, strict=True), strict=True)
        )
        metrics = {"teacher/weight_max": math.exp(largest)}
        return metrics | ({"teacher/agreement": (1 + total / pairs) / 2} if pairs else {})

    @torch.no_grad()
    def follow(self) -> None:
        """After an update, move the teacher's weights towards the policy's: W' <- W' + rate (W - W')."""
        for own, weight in zip(self._weights, [] if self._is_policy else self._trained(), strict=True):
            own.lerp_(weight, self._config.teacher_update_rate)

    def state_dict(self) -> dict[str, list]:
        """What a checkpoint holds, so that a resumed run has the same teacher."""
        return {"teacher_weights": self._weights}

    def load_state_dict(self, state: dict[str, list]) -> None:
        self._weights = state["teacher_weights"]

    def _trained(self) -> list[torch.nn.Parameter]:
        return [weight for weight in self._policy.parameters() if weight.requires_grad]

    @contextmanager
    def _own_weights(self) -> Iterator[None]:
        """Inside this context the policy has the teacher's weights."""
        try:
            self._swap()
            yield
        finally:  # also if Ctrl-C ends the scoring
            self._swap()

    def _swap(self) -> None:
        for index, weight in zip(range(len(self._weights)), self._trained(), strict=not self._is_policy):
            weight.data, self._weights[index] = self._weights[index], weight.data
