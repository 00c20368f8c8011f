"""SGLang's server as an inference engine, through its own HTTP interface.

Not tried with a real server: written after the sources of SGLang 0.5.23 (below, paths within its `sglang/srt`), and
tested against a server that answers in their forms.

    python -m sglang.launch_server --model-path FOLDER --dtype bfloat16 --enable-deterministic-inference

What these sources say, and what follows here:

- Log-probs are those of softmax(logits / T) over all tokens, also under top_p: the recorded ones of `sampling.sample`.
  With SGLANG_RETURN_ORIGINAL_LOGPROB in the server's environment T is not in them, which no answer tells; the
  comparison with the trainer's does, where T is not 1 (layers/sampler.py).
- A seed has an effect with --enable-deterministic-inference only. A token is drawn by a hash of seed, position and
  token id; min_p and a seed fail together (sampling/sampling_batch_info.py, layers/sampler.py).
- The n completions of a request share its seed, so every completion is a prompt of its own in a batch, with its own
  seed, a signed 64-bit number (managers/tokenizer_manager.py, sampling/sampling_params.py).
- ignore_eos switches stop_token_ids off as well. So it is not set, and ids of the model's configuration and tokenizer
  end turns, too; one that ends none for the policy is an error (managers/schedule_batch.py).
- The token that ended a turn stays in output_ids, whatever no_stop_trim says of the text.
- A budget over the server's length is cut silently: prompt and completion must fit into max_req_input_len, which is 6
  less than --context-length, or less if the memory for the cache is (managers/tp_worker.py, managers/scheduler.py).
- A load waits for the requests that run, writes each weight into its place, and empties the cache. A model started
  with a tied head skips the head of its own that the export has, as it has the same values (models/llama.py).
- A load from a folder that cannot be read leaves the old weights. One that fails on the way is "rolled back" from the
  new folder, not from the old one: weights are then mixed, or the server has ended. The next good load repairs what
  has not ended (model_executor/model_runner_components/weight_updater.py).
"""

from pathlib import Path
from typing import ClassVar

import torch

from common.engines.engine import Completion, Engine, Request
from common.engines.http import EngineError, RefusedError

SOURCES = "0.5.23"
LOADING = 900.0  # seconds for new weights: a server that loads does not answer /health, so it is not asked meanwhile
RESERVED = 6  # tokens of --context-length that no request can have


class SGLang(Engine):
    """A server of SGLang with deterministic inference, which is what gives seeds a meaning."""

    length_flag = "--context-length"
    # Without the second, Triton rounds the factors of float32 products to TF32; the third is for the reserved tokens
    environment: ClassVar = {
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        "TRITON_F32_DEFAULT": "ieee",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }

    @staticmethod
    def server_flags(folder: Path, port: int, length: int, dtype: torch.dtype, device: str) -> list[str]:
        if not device.startswith("cuda"):
            raise EngineError(
                f"a run on {device} cannot start SGLang, whose seeds have an effect on GPUs only: give --engine-url "
                "of one that runs, or --engine vllm"
            )
        given = {"model-path": folder, "served-model-name": "policy", "host": "127.0.0.1", "port": port}
        given |= {"dtype": str(dtype).removeprefix("torch."), "context-length": length + RESERVED}
        given |= {"mem-fraction-static": 0.4}  # the trainer may be on the same GPU
        if dtype == torch.float32:
            given |= {"attention-backend": "triton"}  # the default has 16-bit kernels only
        flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
        return ["-m", "sglang.launch_server", *flags, "--enable-deterministic-inference"]

    def connect(self) -> None:
        try:
            info = self.client.get("/server_info", seconds=20.0)
        except RefusedError as error:
            raise EngineError(f"{self.client.about} is not SGLang's, or not near {SOURCES}: {error}") from error
        self.client.about += f" (SGLang {info.get('version')}; written after the sources of {SOURCES})"
        try:
            dtype, has_seeds = info["dtype"], info.get("enable_deterministic_inference")
            self.max_length = int(info["max_req_input_len"])
        except (LookupError, TypeError, ValueError):
            raise self.wrong("other settings to /server_info than are known here") from None
        if has_seeds is not True:
            raise EngineError(
                f"{self.client.about} would draw without the seeds that it is given: start it with "
                "--enable-deterministic-inference"
            )
        if dtype != str(self.dtype).removeprefix("torch."):
            raise EngineError(
                f"{self.client.about} was started with --dtype {dtype}, which is not {self.dtype}: start it with "
                f"--dtype {str(self.dtype).removeprefix('torch.')}, or give another --engine-dtype"
            )

    def load(self, folder: Path) -> None:
        body = {"model_path": str(folder.absolute()), "flush_cache": True}
        try:
            answer = self.client.post("/update_weights_from_disk", body, seconds=LOADING)
        except EngineError as error:
            raise EngineError(f"{error}: its weights may be mixed until it has loaded others") from error
        if answer.get("success") is not True:
            raise self.wrong("something other than success to /update_weights_from_disk")

    def complete(self, request: Request) -> list[Completion]:
        settings = {
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "stop_token_ids": request.end_of_turn_ids,
            "ignore_eos": False,  # True would ignore the ids above, too
            # What a server may have set otherwise for requests that do not say
            "top_k": -1,
            "min_p": 0.0,
            "min_new_tokens": 0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        body = {
            "input_ids": [request.prompt] * request.count,
            "sampling_params": [settings | {"sampling_seed": request.seed + j} for j in range(request.count)],
            "return_logprob": True,
        }
        try:
            return [self._read(answer, request) for answer in self.client.post("/generate", body)["list"]]
        except (TypeError, LookupError, ValueError):
            raise self.wrong("completions without ids, log-probs or a reason to finish") from None

    def _read(self, answer: dict, request: Request) -> Completion:
        about = answer["meta_info"]
        drawn = [(log_prob, token) for log_prob, token, *_ in about["output_token_logprobs"]]
        ids, reason = [token for _, token in drawn], about["finish_reason"]
        if ids != answer["output_ids"]:
            raise self.wrong("log-probs of other tokens than those of the completion")
        if about["prompt_tokens"] != len(request.prompt):
            raise self.wrong("a completion of another prompt")
        if reason["type"] not in ("stop", "length"):
            raise self.wrong(f"a completion that it has broken off ({str(reason.get('message'))[:200]!r})")
        has_stopped = reason["type"] == "stop"
        if has_stopped and reason["matched"] not in request.end_of_turn_ids:
            raise EngineError(
                f"{self.client.about} has ended a turn with {reason['matched']!r}, and the policy's turns end with "
                f"{request.end_of_turn_ids}: start it with the policy's own folder, whose ids are the same"
            )
        return Completion(ids, [log_prob for log_prob, _ in drawn], has_stopped)
