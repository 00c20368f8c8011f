"""vLLM's server, through its HTTP interface (tried with 0.32.0 on a CPU).

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model FOLDER --dtype float32 \\
        --logprobs-mode processed_logprobs --max-model-len 512      # on a CPU also: --no-enable-chunked-prefill

Development mode has the requests that load weights. Without processed log-probs, the temperature is not in them.
"""

import time
from pathlib import Path
from typing import NamedTuple

import torch

from common.errors import EngineError

from harness.engines.http import Client, RefusedError

TRIED = "0.32.0"
INFO_SECONDS = 180.0  # for what a server says of itself: the first time it runs pip and other programs for that
CACHE_SECONDS = 30.0  # to empty the cache of prompts, which waits for requests of others
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def server_flags(folder: Path, port: int, length: int, dtype: torch.dtype, device: str) -> list[str]:
    """Arguments of vLLM's Python that start a server of the weights in `folder`."""
    given = {"model": folder, "served-model-name": "policy", "host": "127.0.0.1", "port": port}
    given |= {"dtype": str(dtype).removeprefix("torch."), "max-model-len": length}
    given |= {"logprobs-mode": "processed_logprobs", "generation-config": "vllm"}
    on_cpu = ("--enforce-eager", "--no-enable-chunked-prefill", "--kv-cache-memory-bytes", "1G")
    beside = ("--gpu-memory-utilization", "0.4")  # the trainer may be on the same GPU
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    return ["-m", "vllm.entrypoints.openai.api_server", *flags, *(on_cpu if device == "cpu" else beside)]


class Completion(NamedTuple):
    """One completion of a prompt, as it was answered."""

    ids: list[int]
    log_probs: list[float]  # nats, one for each id, under what they were drawn from
    has_stopped: bool  # with an end-of-turn token; else the budget was used up


class VLLM:
    """A server in development mode and with processed log-probs."""

    def __init__(self, url: str, dtype: torch.dtype):
        self.client = Client(url)
        version = self.client.get("/version", seconds=20.0).get("version")
        self.client.about += f" (vLLM {version}; tried with {TRIED})"
        try:
            model = self.client.get("/v1/models", seconds=20.0)["data"][0]
            self._model, self.max_length = model["id"], int(model["max_model_len"])  # of a prompt and its completion
            settings = self.client.get("/server_info?config_format=json", seconds=INFO_SECONDS)["vllm_config"]
            found, mode = settings["model_config"]["dtype"], settings["model_config"]["logprobs_mode"]
            is_chunked = settings["scheduler_config"]["enable_chunked_prefill"]
            is_cpu = settings["device_config"]["device"] == "cpu"
        except RefusedError as error:
            if error.status != 404:
                raise
            raise EngineError(f"{self.client.about} takes no weights: start it with VLLM_SERVER_DEV_MODE=1") from error
        except (TypeError, LookupError, ValueError):
            raise self.wrong("other settings than are known here") from None
        if mode != "processed_logprobs":
            raise EngineError(
                f"{self.client.about} answers with {mode}: start it with --logprobs-mode processed_logprobs"
            )
        if found != str(dtype):
            own, wanted = (name.removeprefix("torch.") for name in (found, str(dtype)))
            remedy = f"give --engine-dtype {own}, or start it with --dtype {wanted}"
            raise EngineError(f"{self.client.about} computes in {found}, not in {dtype}: {remedy}")
        if is_cpu and is_chunked:  # the first long prompt with a seed would end it
            raise EngineError(f"{self.client.about} runs on a CPU: start it with --no-enable-chunked-prefill")

    def load(self, folder: Path) -> None:
        """Let the server take the weights in `folder`, and forget what it has computed with the ones before."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.absolute())}}
        try:
            self.client.post("/collective_rpc", body)
        except EngineError as error:
            raise EngineError(f"{error}: its weights may be incomplete until it has loaded others") from error
        deadline = time.monotonic() + CACHE_SECONDS
        while not self.client.post("/reset_prefix_cache").get("success"):
            if time.monotonic() > deadline:
                raise EngineError(f"{self.client.about} is busy with requests of others: it has to be for one run")
            time.sleep(0.1)

    async def complete(self, prompt: list[int], count: int, seed: int, settings: dict) -> list[Completion]:
        """Ask for completions of one prompt. Completion j has the seed + j; `settings` are the same for all prompts."""
        is_greedy = settings["temperature"] == 0  # then vLLM takes one completion per request, and all would be equal
        body = settings | {
            "model": self._model,
            "prompt": prompt,
            "n": 1 if is_greedy else count,
            "seed": seed,
            "ignore_eos": True,  # of the model's own: stop_token_ids are all that end a turn
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
            # What a server may have set otherwise for requests that do not say
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        answer = await self.client.ask("POST", "/v1/completions", body)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            if any(choice["prompt_token_ids"] != prompt for choice in choices):
                raise self.wrong("a completion of another prompt")
            completions = [
                Completion(
                    list(map(int, choice["token_ids"])),
                    list(map(float, choice["logprobs"]["token_logprobs"])),
                    choice["finish_reason"] == "stop",
                )
                for choice in choices
            ]
            return completions * count if is_greedy else completions
        except (TypeError, LookupError, ValueError):
            raise self.wrong("completions without ids, log-probs or a reason to finish") from None

    def wrong(self, what: str) -> EngineError:
        return EngineError(f"{self.client.about} has answered with {what}")
