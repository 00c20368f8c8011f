"""SGLang's server, through its HTTP interface. Never run with a real server: written after the sources of 0.5.23.

    python -m sglang.launch_server --model-path FOLDER --dtype bfloat16 --enable-deterministic-inference

Float32 also needs `--attention-backend triton`. What the sources say (paths within `sglang/srt`), and what follows:

- Log-probs are those of softmax(logits / T) over all tokens, also under top-p. With SGLANG_RETURN_ORIGINAL_LOGPROB in
  the server's environment, T is not in them: only the comparison with the trainer's shows it (layers/sampler.py).
- Only deterministic inference uses seeds (sampling/sampling_batch_info.py). The n completions of a request would share
  its seed, so each completion is a request of its own (managers/tokenizer_manager.py).
- `ignore_eos` switches `stop_token_ids` off, too. So ids of the served model's own files end turns as well; one that
  is not the policy's is an error (managers/schedule_batch.py).
- The token that ends a turn, or completes a stop text, stays in `output_ids` (managers/schedule_batch.py).
- A budget beyond the context is cut silently. Prompt and budget fit into `max_req_input_len`, 6 tokens less than
  `--context-length`, or less with little memory (managers/tp_worker.py, managers/scheduler.py).
- A server that loads weights answers no /health. A failed load can leave some of the new weights
  (model_executor/model_runner_components/weight_updater.py). A load empties the cache of prompts.
"""

import asyncio
from pathlib import Path

import torch

from common.errors import EngineError

from harness.engines.client import ALIVE, Client, Completion, RefusedError

READ = "0.5.23"
LOAD_SECONDS = 900.0


class SGLang(Client):
    """A server with deterministic inference."""

    length_flag = "--context-length"

    def _check(self, dtype: torch.dtype) -> None:
        try:
            info = self._request("GET", "/server_info", seconds=ALIVE)
        except RefusedError as error:
            raise EngineError(f"{error}: it is no server of vLLM or SGLang") from error
        self.about += f" (SGLang {info.get('version')}; never tried, written after {READ})"
        with self.reading("other settings than are known here"):
            found, has_seeds = info["dtype"], info["enable_deterministic_inference"]
            self.max_length = int(info["max_req_input_len"])  # prompt plus completion
        if has_seeds is not True:
            raise EngineError(f"{self.about} would ignore seeds: start it with --enable-deterministic-inference")
        if found != (wanted := str(dtype).removeprefix("torch.")):
            remedy = f"start it with --dtype {wanted}, or give another --engine-dtype"
            raise EngineError(f"{self.about} computes in {found}, not in {wanted}: {remedy}")

    def load(self, folder: Path) -> None:
        """Make the server load the weights in `folder`, and drop everything that it computed with the old ones."""
        try:
            body = {"model_path": str(folder.absolute()), "flush_cache": True}
            self._request("POST", "/update_weights_from_disk", body, seconds=LOAD_SECONDS)
        except EngineError as error:
            raise EngineError(f"{error}: its weights can be incomplete until it has loaded others") from error

    async def complete(self, prompt: list[int], count: int, seed: int, settings: dict) -> list[Completion]:
        """Request completions of one prompt. Completion j has the seed + j; all prompts share `settings`."""
        own = {name: settings[name] for name in ("temperature", "top_p", "stop_token_ids", "stop") if name in settings}
        own |= {
            "max_new_tokens": settings["max_tokens"],
            # Defaults that a server may have changed for requests without these settings
            "top_k": -1,
            "min_p": 0.0,
            "min_new_tokens": 0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }

        async def one(own_seed: int) -> Completion:
            body = {"input_ids": prompt, "sampling_params": own | {"sampling_seed": own_seed}, "return_logprob": True}
            return self._read(await self._ask("POST", "/generate", body), prompt, settings)

        return await asyncio.gather(*(one(seed + j) for j in range(count)))

    def _read(self, answer: dict, prompt: list[int], settings: dict) -> Completion:
        with self.reading("completions without ids, log-probs or a reason to finish"):
            about, ids = answer["meta_info"], list(map(int, answer["output_ids"]))
            log_probs = [float(log_prob) for log_prob, *_ in about["output_token_logprobs"]]
            drawn = [token for _, token, *_ in about["output_token_logprobs"]]
            kind, matched = about["finish_reason"]["type"], about["finish_reason"].get("matched")
            is_of_prompt = about["prompt_tokens"] == len(prompt)
        if not is_of_prompt:
            raise self.wrong("a completion of another prompt")
        if drawn != ids:
            raise self.wrong("log-probs of other tokens than those of the completion")
        if kind not in ("stop", "length"):
            raise self.wrong("a completion that it has broken off")
        if isinstance(matched, int) and matched not in settings["stop_token_ids"]:
            raise EngineError(
                f"{self.about} has ended a turn with the token {matched}, and the policy's turns end with "
                f"{settings['stop_token_ids']}: start it with the policy's own folder"
            )
        return Completion(ids, log_probs, kind == "stop")
