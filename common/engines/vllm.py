"""vLLM's server as an inference engine, through its HTTP interface (tried with 0.32.0 on a CPU).

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model FOLDER --dtype float32 \\
        --logprobs-mode processed_logprobs --max-model-len 512      # on a CPU also: --no-enable-chunked-prefill

Development mode has the requests that load weights. Without processed log-probs, the temperature is not in them.
"""

import time
from pathlib import Path
from typing import ClassVar

import torch

from common.engines.engine import Completion, Engine, Request
from common.engines.http import EngineError, RefusedError

TRIED = "0.32.0"
INFO_SECONDS = 180.0  # for what a server says of itself: the first time it runs pip and other programs for that
CACHE_SECONDS = 30.0  # to empty the cache of prompts, which waits for requests of others


class VLLM(Engine):
    """A server of vLLM, in development mode and with processed log-probs."""

    length_flag = "--max-model-len"
    environment: ClassVar = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}

    @staticmethod
    def server_flags(folder: Path, port: int, length: int, dtype: torch.dtype, device: str) -> list[str]:
        given = {"model": folder, "served-model-name": "policy", "host": "127.0.0.1", "port": port}
        given |= {"dtype": str(dtype).removeprefix("torch."), "max-model-len": length}
        given |= {"logprobs-mode": "processed_logprobs", "generation-config": "vllm"}
        on_cpu = ("--enforce-eager", "--no-enable-chunked-prefill", "--kv-cache-memory-bytes", "1G")
        beside = ("--gpu-memory-utilization", "0.4")  # the trainer may be on the same GPU
        flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
        return ["-m", "vllm.entrypoints.openai.api_server", *flags, *(on_cpu if device == "cpu" else beside)]

    def connect(self) -> None:
        version = self.client.get("/version", seconds=20.0).get("version")
        self.client.about += f" (vLLM {version}; tried with {TRIED})"
        models = self.client.get("/v1/models", seconds=20.0).get("data")
        try:
            self._model, self.max_length = models[0]["id"], int(models[0]["max_model_len"])
        except (TypeError, LookupError, ValueError):
            raise self.wrong("no model to /v1/models") from None
        try:
            settings = self.client.get("/server_info?config_format=json", seconds=INFO_SECONDS)["vllm_config"]
            found = settings["model_config"]
            dtype, mode = found["dtype"], found["logprobs_mode"]
            is_chunked = settings["scheduler_config"]["enable_chunked_prefill"]
            is_cpu = settings["device_config"]["device"] == "cpu"
        except RefusedError as error:
            if error.status != 404:
                raise
            raise EngineError(f"{self.client.about} takes no weights: start it with VLLM_SERVER_DEV_MODE=1") from error
        except (KeyError, TypeError):
            raise self.wrong("other settings to /server_info than are known here") from None
        if mode != "processed_logprobs":
            raise EngineError(
                f"{self.client.about} answers with {mode}, which are not those of the distribution that is sampled "
                "from: start it with --logprobs-mode processed_logprobs"
            )
        if dtype != str(self.dtype):
            raise EngineError(
                f"{self.client.about} computes in {dtype}, not in {self.dtype}: give --engine-dtype "
                f"{dtype.removeprefix('torch.')}, or start it with --dtype {str(self.dtype).removeprefix('torch.')}"
            )
        if is_cpu and is_chunked:  # the first long prompt with a seed would end it
            raise EngineError(f"{self.client.about} runs on a CPU: start it with --no-enable-chunked-prefill")

    def load(self, folder: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.absolute())}}
        try:
            self.client.post("/collective_rpc", body)
        except EngineError as error:
            raise EngineError(f"{error}: its weights may be incomplete until it has loaded others") from error
        deadline = time.monotonic() + CACHE_SECONDS
        while not self.client.post("/reset_prefix_cache").get("success"):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self.client.about} is busy with requests of others, and for {CACHE_SECONDS:g} s could not "
                    "forget the prompts that it has run with older weights: an engine that trains is for one run"
                )
            time.sleep(0.1)

    def complete(self, request: Request) -> list[Completion]:
        is_greedy = request.temperature == 0  # then vLLM takes one completion per request, and all would be equal
        body = {
            "model": self._model,
            "prompt": request.prompt,
            "n": 1 if is_greedy else request.count,
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "stop_token_ids": request.end_of_turn_ids,
            "ignore_eos": True,  # of the model's own: the ids above are all that end a turn
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
            # What a server may have set otherwise for requests that do not say
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        choices = self.client.post("/v1/completions", body).get("choices")
        try:
            choices = sorted(choices, key=lambda choice: choice["index"])
            if [choice["index"] for choice in choices] != list(range(len(choices))):
                raise self.wrong("two completions of the same number")
            if any(choice["prompt_token_ids"] != request.prompt for choice in choices):
                raise self.wrong("a completion of another prompt")
            completions = [
                Completion(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"] == "stop")
                for choice in choices
            ]
            return completions * request.count if is_greedy else completions
        except (TypeError, LookupError, AttributeError):
            raise self.wrong("completions without ids, log-probs or a reason to finish") from None
