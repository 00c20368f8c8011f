"""A teacher on a vLLM server, which returns the log-probs of the tokens of a prompt (tried with 0.32.0 on a CPU).

python -m vllm.entrypoints.openai.api_server --model TEACHER
"""

import asyncio
import math

import torch

from common.errors import EngineError, UserError
from common.experience import Experience
from common.policy import Policy

from harness.engines.client import Client
from harness.engines.engine import raise_together
from harness.models.pretrained import PROBE

MOST_REQUESTS = 64  # at the same time, one per row


class TeacherServer(Client):
    """Called with an experience, it returns the teacher's log-probs of the action tokens.

    A request holds the ids of one row. Every token of the answer is compared with the policy's, id and text.
    """

    def __init__(self, url: str, policy: Policy):
        if policy.temperature != 1:
            raise UserError(
                f"--temperature {policy.temperature:g}: a server computes the log-probs of a prompt at temperature 1, "
                "and not at the policy's: use 1, or a teacher on this machine (--teacher)"
            )
        self._tokenizer = policy.tokenizer
        super().__init__(url, torch.float32)
        with self.reading("something other than the tokens of a conversation"):
            body = {"model": self._model, "messages": PROBE, "add_generation_prompt": True}
            self.prompt = list(map(int, self._request("POST", "/tokenize", body)["tokens"]))  # as the teacher reads it

    def _check(self, dtype: torch.dtype) -> None:
        self.find_model("the teacher")

    def __call__(self, experience: Experience) -> torch.Tensor:
        lengths = experience.attention_mask.sum(dim=1).tolist()
        rows = [ids[:length] for ids, length in zip(experience.sequences.tolist(), lengths, strict=True)]
        log_probs, error = torch.zeros_like(experience.sampler_log_probs), None
        try:
            for row, values in zip(log_probs, self.submit(self._score_all(rows)).result(), strict=True):
                row[: len(values)] = torch.tensor(values)
        except EngineError as raised:
            error = raised
        raise_together(error)
        return log_probs * experience.action_mask

    async def _score_all(self, rows: list[list[int]]) -> list[list[float]]:
        gate = asyncio.Semaphore(MOST_REQUESTS)

        async def score(ids: list[int]) -> list[float]:
            async with gate:
                return await self.score(ids)

        return await asyncio.gather(*map(score, rows))

    async def score(self, ids: list[int]) -> list[float]:
        """The log-probs, in nats, of all tokens but the first, which follows nothing."""
        # one more token is sampled, because the server samples at least one; nobody reads it
        body = {"model": self._model, "prompt": ids, "prompt_logprobs": 0, "max_tokens": 1, "temperature": 0.0}
        answer = await self._ask("POST", "/v1/completions", body)
        with self.reading("something other than log-probs of a prompt"):
            (choice,) = answer["choices"]
            found = choice["prompt_logprobs"]
            if len(found) != len(ids):
                raise self.wrong(f"{len(found)} log-probs for a row of {len(ids)} tokens")
            return [self._read(i, entry) for i, entry in zip(ids[1:], found[1:], strict=True)]

    def _read(self, i: int, entry: dict[str, dict]) -> float:
        """The log-prob of token `i` in the answer for its position."""
        if str(i) not in entry:
            raise self.wrong(f"the log-prob of token {', '.join(entry)} where token {i} was asked for")
        own, others = self._tokenizer.decode([i]), entry[str(i)]["decoded_token"]
        is_fragment = "\ufffd" in own or not others or "\ufffd" in others  # of a character of several bytes
        if not is_fragment and own.strip() != others.strip():
            raise self.wrong(f"a token {i} that is {others!r}, and {own!r} to the policy: it has another tokenizer")
        log_prob = float(entry[str(i)]["logprob"])
        if not math.isfinite(log_prob):
            raise self.wrong(f"a log-prob of {log_prob} for token {i}")
        return log_prob
