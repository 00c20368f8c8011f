"""A language model behind a server that speaks OpenAI's protocol for chat completions, as `vllm serve MODEL` does."""

import asyncio
import math
from collections.abc import Sequence

import torch

from common.keyed import keyed_generator

from harness.engines.client import Client, RefusedError

SEEDS = 2**31  # of a request; every server takes these
BUSY = (429, 503)  # after these statuses a request is sent again
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds between the attempts


class ChatServer(Client):
    """Answers with texts. The server renders the conversation with its model's own template."""

    def __init__(self, url: str, model: str | None = None, seconds: float = 600.0):
        self._model, self._seconds = model, seconds
        super().__init__(url, torch.float32)

    def _check(self, dtype: torch.dtype) -> None:
        if self._model is None:
            self.find_model("the server")
        self.about = self.about.replace("the engine", "the server")

    def chat_all(
        self, asked: Sequence[tuple[list[dict], int]], count: int, key: tuple[int, ...], settings: dict
    ) -> list[list[tuple[str, str]]]:
        """`count` answers to each of some conversations: texts and reasons to finish.

        `asked` has messages and an index. The index and `key` give the seeds of its requests, which are sent at the
        same time.
        """

        async def ask_all() -> list[tuple[str, str]]:
            seeds = [int(keyed_generator("chat", *key, index).integers(SEEDS)) for _, index in asked]
            bodies = [
                settings | {"model": self._model, "messages": messages, "seed": (seed + number) % SEEDS}
                for (messages, _), seed in zip(asked, seeds, strict=True)
                for number in range(count)
            ]
            return await asyncio.gather(*map(self.chat, bodies))

        answers = self.submit(ask_all()).result()
        return [answers[start : start + count] for start in range(0, len(answers), count)]

    async def chat(self, body: dict) -> tuple[str, str]:
        """One answer. A thought that the server has taken out of the text is put back in front of it."""
        answer = await self._patiently(body)
        with self.reading("something other than a chat completion"):
            (choice,) = answer["choices"]
            message = choice["message"]
            text, thought = (message["content"] or ""), message.get("reasoning") or message.get("reasoning_content")
            return (f"<think>{thought}</think>" if thought else "") + text, str(choice["finish_reason"])

    async def first_token(self, messages: list[dict]) -> list[tuple[str, float]]:
        """The most probable first tokens of an answer, 20 at most, and their probabilities."""
        body = {"model": self._model, "messages": messages, "max_tokens": 1, "temperature": 1.0}
        answer = await self._patiently(body | {"logprobs": True, "top_logprobs": 20})
        with self.reading("a chat completion without log-probs (logprobs, top_logprobs)"):
            (choice,) = answer["choices"]
            tokens = choice["logprobs"]["content"][0]["top_logprobs"]
            return [(str(token["token"]), math.exp(token["logprob"])) for token in tokens]

    async def _patiently(self, body: dict) -> dict:
        """The server's answer; a server that is busy is asked again, after longer and longer pauses."""
        for pause in PAUSES:
            try:
                return await self._ask("POST", "/v1/chat/completions", body, seconds=self._seconds)
            except RefusedError as refused:
                if refused.status not in BUSY:
                    raise
                await asyncio.sleep(pause)
        return await self._ask("POST", "/v1/chat/completions", body, seconds=self._seconds)
