"""A judge: a reward model that scores answers, in this process or on a server. It never sees a completion's thought."""

import asyncio
import math
from collections.abc import Callable

import torch

from common.chat import encode_conversation
from common.errors import UserError
from common.reward_model import RewardModel, score_rows

from harness.base.config import DTYPES, RunConfig
from harness.data.thoughts import ThoughtFormat, answer_of, read_format
from harness.models.context import context_of
from harness.models.reward_loading import load_reward_model

Messages = list[dict]


class Judge:
    """Scores answers; `score_conversations` is the reward model.

    With `tags` it sees only the text after the thought, in its own template. A completion without an answer gets
    `floor`; with `strict` so does every completion that is not one thought followed by one answer.
    """

    def __init__(
        self,
        score_conversations: Callable[[list[Messages]], list[float]],
        tags: ThoughtFormat | None = None,
        strict: bool = False,
        floor: float = -10.0,
    ):
        self._score_conversations = score_conversations
        self._tags, self._strict, self._floor = tags, strict, floor

    def score(self, prompts: list[Messages], texts: list[str]) -> list[float]:
        """The score of each completion, given the messages that it answers."""
        answers = [self._answer(text) for text in texts]
        conversations = {
            index: [*prompts[index], {"role": "assistant", "content": answer}]
            for index, answer in enumerate(answers)
            if answer is not None
        }
        scores = dict(zip(conversations, self._score_conversations(list(conversations.values())), strict=True))
        if not all(map(math.isfinite, scores.values())):
            raise UserError("the reward model has given an answer a score that is not a finite number")
        return [scores.get(index, self._floor) for index in range(len(texts))]

    def _answer(self, text: str) -> str | None:
        return (text if text.strip() else None) if self._tags is None else answer_of(text, self._tags, self._strict)


def load_judge(config: RunConfig) -> Judge | None:
    """The judge of `--reward-model` or `--reward-model-url`; None if neither is given."""
    given = [name for name in ("reward_model", "reward_model_url") if getattr(config, name, None)]
    if len(given) > 1:
        raise UserError("--reward-model and --reward-model-url are two judges: give one")
    if not given:
        for name in ("answer_begins", "strict", "stop_when"):
            value = getattr(config, name, None)
            if value and (name != "stop_when" or value == "over-optimised"):
                raise UserError(f"--{name.replace('_', '-')} is about a reward model: give --reward-model")
        return None
    if config.strict and config.answer_begins is None:
        raise UserError("--strict needs to tell a thought from an answer: give --answer-begins")
    tags = None if config.answer_begins is None else read_format(config.answer_begins)
    if getattr(config, "estimate", False):  # nothing will be scored
        return Judge(lambda _: [], tags, config.strict)
    score = _score_here(config) if config.reward_model else _score_by_server(config.reward_model_url)
    return Judge(score, tags, config.strict, -config.no_answer_penalty)


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
