"""A judge: a reward model, or a language model with a rubric, in this process or on a server.

With `--answer-begins` it never sees a completion's thought.
"""

import asyncio
import math
from collections.abc import Callable

import torch

from common.errors import UserError
from common.given_answers import encode_conversation
from common.reward_model import RewardModel, score_rows

from harness.base.config import DTYPES, JudgeConfig, RunConfig, shown
from harness.data.thoughts import ThoughtFormat, answer_of, read_format
from harness.models.context import context_of
from harness.models.reward_loading import load_reward_model

Messages = list[dict]

PREFERENCE = "preference"  # the component of a reward model


class Judge:
    """Scores answers; `score_conversations` is a reward model, or a language model with a rubric.

    Args:
        score_conversations: the reward components of the last turn of each conversation.
        weights: of the components.
        floor: the components of a completion without an answer; with `strict`, of every completion that is not one
            thought followed by one answer.
        tags: the judge sees only the text after the thought, in its own template; None: the whole completion.
        remember: keeps the components of a conversation that are known; None: the judge has no memory.
    """

    def __init__(
        self,
        score_conversations: Callable[[list[Messages]], list[dict[str, float]]],
        weights: dict[str, float],
        floor: dict[str, float],
        tags: ThoughtFormat | None = None,
        strict: bool = False,
        remember: Callable[[Messages, dict[str, float]], None] | None = None,
    ):
        self._score_conversations, self.weights, self._floor = score_conversations, weights, floor
        self._tags, self._strict, self._remember = tags, strict, remember

    def score(self, prompts: list[Messages], texts: list[str]) -> list[dict[str, float]]:
        """The components of each completion, given the messages that it answers."""
        answers = [self._answer(text) for text in texts]
        conversations = {
            index: [*prompts[index], {"role": "assistant", "content": answer}]
            for index, answer in enumerate(answers)
            if answer is not None
        }
        scores = dict(zip(conversations, self._score_conversations(list(conversations.values())), strict=True))
        if not all(math.isfinite(value) for components in scores.values() for value in components.values()):
            raise UserError("the judge has given an answer a score that is not a finite number")
        return [scores.get(index, self._floor) for index in range(len(texts))]

    def remember(self, prompt: Messages, text: str, components: dict[str, float]) -> None:
        """Keep what an earlier process has found, so that it is not asked again."""
        if self._remember is not None and (answer := self._answer(text)) is not None:
            self._remember([*prompt, {"role": "assistant", "content": answer}], components)

    def _answer(self, text: str) -> str | None:
        return (text if text.strip() else None) if self._tags is None else answer_of(text, self._tags, self._strict)


def load_judges(config: JudgeConfig, is_asked: bool = True) -> list[Judge]:
    """The judges of `--reward-model` or `--reward-model-url`, and of `--judge`, which only names its components
    without `is_asked`.
    """
    given = [name for name in ("reward_model", "reward_model_url") if getattr(config, name, None)]
    rubric = getattr(config, "judge", None)
    if len(given) > 1:
        raise UserError("--reward-model and --reward-model-url are the same judge in two places: give one")
    if rubric is None and (name := next((n for n in ("judge_model", "judge_url") if getattr(config, n, None)), None)):
        raise UserError(f"--{name.replace('_', '-')} answers a rubric: give --judge FILE")
    if not given and rubric is None:
        for name in ("answer_begins", "strict", "stop_when"):
            value = getattr(config, name, None)
            if value and (name != "stop_when" or value == "over-optimised"):
                flags = [f"--{n.replace('_', '-')}" for n in ("reward_model", "judge") if hasattr(config, n)]
                raise UserError(f"--{name.replace('_', '-')} is about a judge: give {', or '.join(flags)}")
        return []
    if config.strict and config.answer_begins is None:
        raise UserError("--strict needs to tell a thought from an answer: give --answer-begins")
    seen = (None if config.answer_begins is None else read_format(config.answer_begins), config.strict)
    if config.strict and seen[0] is None:
        raise UserError(
            f"--strict needs a thought: by --answer-begins {shown(config.answer_begins)} there is none (longcot)"
        )
    judges = []
    if given:
        floor = {PREFERENCE: -config.no_answer_penalty}
        judges.append(Judge(_load_reward_model(config), {PREFERENCE: 1.0}, floor, *seen))
    if rubric is not None:
        from harness.task.rubric import load_rubric  # not at the top: few runs have one

        asked = load_rubric(config, is_asked)
        judges.append(Judge(asked.score, asked.weights, asked.worst, *seen, asked.remember))
    return judges


def _load_reward_model(config: RunConfig) -> Callable[[list[Messages]], list[dict[str, float]]]:
    if getattr(config, "estimate", False):  # nothing will be scored
        return lambda _: []
    score = _score_here(config) if config.reward_model else _score_by_server(config.reward_model_url)
    return lambda conversations: [{PREFERENCE: value} for value in score(conversations)]


def _score_here(config: RunConfig) -> Callable[[list[Messages]], list[float]]:
    dtype = "bfloat16" if torch.device(config.device).type == "cuda" else "float32"
    model: RewardModel = load_reward_model(config.reward_model, config.device, DTYPES[dtype])
    longest = context_of(model.model.config)

    def score(conversations: list[Messages]) -> list[float]:
        rows = [encode_conversation(model.tokenizer, messages) for messages in conversations]
        if rows and (width := max(map(len, rows))) > longest:
            raise UserError(f"an answer has {width} tokens for the reward model, which reads {longest} at most")
        return score_rows(model, rows, config.generation_batch_size)

    return score


def _score_by_server(url: str) -> Callable[[list[Messages]], list[float]]:
    from harness.engines.reward_server import RewardServer  # not at the top: few runs have a server, which needs httpx2

    server = RewardServer(url)

    def score(conversations: list[Messages]) -> list[float]:
        async def score_all() -> list[float]:
            return await asyncio.gather(*map(server.score, conversations))

        return server.submit(score_all()).result()

    return score
