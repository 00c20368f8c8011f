"""vLLM's server, through its HTTP interface (tried with 0.32.0 on a CPU).

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model FOLDER --dtype float32 \\
        --logprobs-mode processed_logprobs --max-model-len 512      # on a CPU also: --no-enable-chunked-prefill

Only development mode offers the requests that load weights. Without processed log-probs, they ignore the temperature.
"""

import time
from pathlib import Path

import torch

from common.errors import EngineError

from harness.engines.client import ALIVE, Client, Completion, RefusedError

TRIED = "0.32.0"
INFO_SECONDS = 180.0  # for the server's description of itself: the first request makes it run pip and other programs
CACHE_SECONDS = 30.0  # to empty the prompt cache, which waits for other requests
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def server_flags(
    folder: Path, port: int, length: int, dtype: torch.dtype, device: str, sleeps: bool = False
) -> list[str]:
    """Arguments for vLLM's Python that start a server with the weights in `folder`."""
    given = {"model": folder, "served-model-name": "policy", "host": "127.0.0.1", "port": port}
    given |= {"dtype": str(dtype).removeprefix("torch."), "max-model-len": length}
    given |= {"logprobs-mode": "processed_logprobs", "generation-config": "vllm"}
    on_cpu = ("--enforce-eager", "--no-enable-chunked-prefill", "--kv-cache-memory-bytes", "1G")
    beside = ("--gpu-memory-utilization", "0.4")  # the trainer can be on the same GPU
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    flags += [*(on_cpu if device == "cpu" else beside), *(("--enable-sleep-mode",) if sleeps else ())]
    return ["-m", "vllm.entrypoints.openai.api_server", *flags]


class VLLM(Client):
    """A server in development mode and with processed log-probs."""

    length_flag = "--max-model-len"

    def _check(self, dtype: torch.dtype) -> None:
        """Refuse a server with unsuitable settings."""
        version = self._request("GET", "/version", seconds=ALIVE).get("version")
        self.about += f" (vLLM {version}; tried with {TRIED})"
        try:
            model = self._request("GET", "/v1/models", seconds=ALIVE)["data"][0]
            self._model, self.max_length = model["id"], int(model["max_model_len"])  # prompt plus completion
            path = "/server_info?config_format=json"
            settings = self._request("GET", path, seconds=INFO_SECONDS)["vllm_config"]
            found, mode = settings["model_config"]["dtype"], settings["model_config"]["logprobs_mode"]
            is_chunked = settings["scheduler_config"]["enable_chunked_prefill"]
            is_cpu = settings["device_config"]["device"] == "cpu"
            self.can_sleep = settings["model_config"]["enable_sleep_mode"]
            # a run that was interrupted leaves it asleep
            self._is_asleep = self._request("GET", "/is_sleeping", seconds=ALIVE)["is_sleeping"]
        except RefusedError as error:
            if error.status != 404:
                raise
            raise EngineError(f"{self.about} takes no weights: start it with VLLM_SERVER_DEV_MODE=1") from error
        except (TypeError, LookupError, ValueError):
            raise self.wrong("other settings than are known here") from None
        if mode != "processed_logprobs":
            raise EngineError(f"{self.about} answers with {mode}: start it with --logprobs-mode processed_logprobs")
        if found != str(dtype):
            own, wanted = (name.removeprefix("torch.") for name in (found, str(dtype)))
            remedy = f"give --engine-dtype {own}, or start it with --dtype {wanted}"
            raise EngineError(f"{self.about} computes in {found}, not in {dtype}: {remedy}")
        if is_cpu and is_chunked:  # the first long prompt with a seed would crash it
            raise EngineError(f"{self.about} runs on a CPU: start it with --no-enable-chunked-prefill")

    def load(self, folder: Path) -> None:
        """Make the server load the weights in `folder`, and drop everything that it computed with the old ones.

        A server that sleeps wakes up; its cache gets memory last, when what the load needs on the way is free again.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.absolute())}}
        try:
            if self._is_asleep:
                self._request("POST", "/wake_up?tags=weights")
            self._request("POST", "/collective_rpc", body)
            if self._is_asleep:
                self._request("POST", "/wake_up?tags=kv_cache")
                self._is_asleep = False
        except EngineError as error:
            raise EngineError(f"{error}: its weights can be incomplete until it has loaded others") from error
        deadline = time.monotonic() + CACHE_SECONDS
        while not self._request("POST", "/reset_prefix_cache").get("success"):
            if time.monotonic() > deadline:
                raise EngineError(f"{self.about} is busy with other programs' requests: a server is for one run only")
            time.sleep(0.1)

    def sleep(self) -> None:
        """Make the server free its weights and its cache. Until `load`, it samples nothing."""
        self._is_asleep = True
        self._request("POST", "/sleep?level=2")  # level 1 would keep the weights, in the CPU's memory

    async def complete(self, prompt: list[int], count: int, seed: int, settings: dict) -> list[Completion]:
        """Request completions of one prompt. Completion j has the seed + j; all prompts share `settings`."""
        is_greedy = settings["temperature"] == 0  # vLLM then takes one completion per request; all would be equal
        body = settings | {
            "model": self._model,
            "prompt": prompt,
            "n": 1 if is_greedy else count,
            "seed": seed,
            "ignore_eos": True,  # the model's own ids: only stop_token_ids and stop texts end a turn
            "logprobs": 0,  # only the sampled token's
            "return_token_ids": True,
            # Defaults that a server may have changed for requests without these settings
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        answer = await self._ask("POST", "/v1/completions", body)
        with self.reading("completions without ids, log-probs or a reason to finish"):
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
