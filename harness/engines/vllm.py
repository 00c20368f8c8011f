"""vLLM's server, through its HTTP interface (tried with 0.32.0 on a CPU).

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model FOLDER --dtype float32 \\
        --logprobs-mode processed_logprobs --max-model-len 512      # on a CPU also: --no-enable-chunked-prefill

Only development mode offers the requests that load weights. Without processed log-probs, they ignore the temperature.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx2
import torch

from common.errors import EngineError

T = TypeVar("T")

TRIED = "0.32.0"
HEALTH = 60.0  # seconds without an answer before asking, again and again, whether the server is alive
ALIVE = 20.0  # seconds to answer that, and to connect
UNUSED = 2.0  # seconds that an unused connection is kept; vLLM closes it after 5
INFO_SECONDS = 180.0  # for the server's description of itself: the first request makes it run pip and other programs
CACHE_SECONDS = 30.0  # to empty the prompt cache, which waits for other requests
KEY = "VLLM_API_KEY"  # vLLM reads its key from this variable
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def server_flags(folder: Path, port: int, length: int, dtype: torch.dtype, device: str) -> list[str]:
    """Arguments for vLLM's Python that start a server with the weights in `folder`."""
    given = {"model": folder, "served-model-name": "policy", "host": "127.0.0.1", "port": port}
    given |= {"dtype": str(dtype).removeprefix("torch."), "max-model-len": length}
    given |= {"logprobs-mode": "processed_logprobs", "generation-config": "vllm"}
    on_cpu = ("--enforce-eager", "--no-enable-chunked-prefill", "--kv-cache-memory-bytes", "1G")
    beside = ("--gpu-memory-utilization", "0.4")  # the trainer can be on the same GPU
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    return ["-m", "vllm.entrypoints.openai.api_server", *flags, *(on_cpu if device == "cpu" else beside)]


class RefusedError(EngineError):
    """The engine answered with an HTTP error status."""

    status: int


class Completion(NamedTuple):
    """One completion of a prompt, as the server returned it."""

    ids: list[int]
    log_probs: list[float]  # nats, one for each id, under the sampling distribution
    has_stopped: bool  # ended by an end-of-turn token or a stop text; else the budget was used up


class VLLM:
    """A server in development mode and with processed log-probs.

    Requests run in a separate thread, any number of them at the same time.
    """

    def __init__(self, url: str, dtype: torch.dtype):
        try:
            parts = httpx2.URL(url)
            is_address = parts.scheme in ("http", "https") and parts.host and (parts.port or 0) < 2**16
            is_address = is_address and parts.path in ("", "/")
        except httpx2.InvalidURL:
            is_address = False
        if not is_address:
            raise EngineError(f"{url} is not the address of an engine, such as http://127.0.0.1:8000")
        self.about = f"the engine at {url}"  # its name in messages
        self.ending: Callable[[], str | None] = lambda: None  # how this run's server ended; None: it is running
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY, "").strip()) else {},
            timeout=httpx2.Timeout(ALIVE, read=None),
            limits=httpx2.Limits(max_connections=None, keepalive_expiry=UNUSED),
            verify=httpx2.create_ssl_context(),  # with the certificates of the environment
            trust_env=False,  # but not through its proxy
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()
        self._check(dtype)

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

    def find_model(self, name: str) -> None:
        """Ask only for the server's model, and call it `name`; for servers that need no other settings."""
        self.about = self.about.replace("the engine", name)
        with self.reading("no model"):
            self._model = self._request("GET", "/v1/models", seconds=ALIVE)["data"][0]["id"]

    def load(self, folder: Path) -> None:
        """Make the server load the weights in `folder`, and drop everything that it computed with the old ones."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.absolute())}}
        try:
            self._request("POST", "/collective_rpc", body)
        except EngineError as error:
            raise EngineError(f"{error}: its weights can be incomplete until it has loaded others") from error
        deadline = time.monotonic() + CACHE_SECONDS
        while not self._request("POST", "/reset_prefix_cache").get("success"):
            if time.monotonic() > deadline:
                raise EngineError(f"{self.about} is busy with other programs' requests: a server is for one run only")
            time.sleep(0.1)

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

    def wrong(self, what: str) -> EngineError:
        return EngineError(f"{self.about} has answered with {what}")

    @contextmanager
    def reading(self, otherwise: str) -> Iterator[None]:
        """Read an answer of the server; if it has another form, the error says that it is `otherwise`."""
        try:
            yield
        except (TypeError, LookupError, ValueError, AttributeError):
            raise self.wrong(otherwise) from None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine, which can await `complete`, in the background."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """End all requests that are waiting for an answer."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._http.aclose()

        if self._thread.is_alive():  # it does not run in a forked process
            self.submit(end()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _request(self, method: str, path: str, body: dict | None = None, seconds: float | None = None) -> dict:
        return self.submit(self._ask(method, path, body, seconds)).result()

    async def _ask(self, method: str, path: str, body: dict | None = None, seconds: float | None = None) -> dict:
        """The JSON object that the server returns; EngineError if there is no answer, or a different one.

        Without `seconds` the request may take as long as the server reports that it is alive.
        """
        request = asyncio.create_task(self._http.request(method, path, json=body))
        try:
            async with asyncio.timeout(seconds):
                while not (await asyncio.wait([request], timeout=HEALTH if seconds is None else None))[0]:
                    await self._ask("GET", "/health", seconds=ALIVE)
                response = request.result()
        except TimeoutError:
            raise EngineError(f"{self.about} has not answered {path} for {seconds:g} seconds") from None
        except httpx2.HTTPError as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            reason = f"nothing listens there ({reason})" if isinstance(error, httpx2.ConnectError) else reason
            ending = await asyncio.to_thread(self.ending)
            ended = f"; its process {ending}" if ending else ""
            raise EngineError(f"{self.about} has not answered {method} {path}: {reason}{ended}") from error
        finally:
            request.cancel()
        try:
            content = response.json() if response.content.strip() else {}
        except ValueError:
            content = None
        if not response.is_success:
            error = content.get("error", content) if isinstance(content, dict) else None
            message = error.get("message", error) if isinstance(error, dict) else error
            reason = " ".join(str(message or response.text[:200]).split())[:300]
            remedy = f": give its key in the variable {KEY}" if response.status_code == 401 else ""
            refused = RefusedError(
                f"{self.about} has refused {method} {path} (status {response.status_code}: {reason}){remedy}"
            )
            refused.status = response.status_code
            raise refused
        if not isinstance(content, dict):
            raise EngineError(f"{self.about} has answered {method} {path} with something other than a JSON object")
        return content
