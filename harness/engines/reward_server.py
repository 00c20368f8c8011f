"""A reward model on a vLLM server, through its pooling interface (tried with 0.32.0 on a CPU).

python -m vllm.entrypoints.openai.api_server --model REWARD_MODEL --runner pooling --dtype float32
"""

import torch

from harness.engines.client import Client


class RewardServer(Client):
    """A server whose model gives a conversation one number, without an activation, which would flatten differences."""

    def __init__(self, url: str):
        super().__init__(url, torch.float32)

    def _check(self, dtype: torch.dtype) -> None:
        self.find_model("the reward model")

    async def score(self, messages: list[dict]) -> float:
        """The score of a conversation, which the server renders with the reward model's own template."""
        body = {"model": self._model, "messages": messages, "task": "classify", "use_activation": False}
        answer = await self._ask("POST", "/pooling", body | {"add_generation_prompt": False})
        with self.reading("something other than one number: does it serve a reward model (--runner pooling)?"):
            (score,) = answer["data"][0]["data"]
            return float(score)
