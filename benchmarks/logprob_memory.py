"""Peak memory of log-probabilities against the size of the vocabulary: all logits at once, and in chunks.

    python benchmarks/logprob_memory.py           # about 4 minutes; writes the entry logprob_memory of
                                                  # benchmarks/results/measurements.json

One forward and one backward pass over the same four completions of 1,024 tokens on a CPU, each variant in a process of
its own. The result is the process's peak resident memory minus its peak before the pass. The model has one layer, 64
wide, so most of the memory depends on the vocabulary. The gradient of the embedding is included: 256 bytes per token of
the vocabulary.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from common.logprobs import MAX_LOGITS
from common.policy import Policy
from viewer.results import write_json

from common.plumbing.machine import describe_machine, peak_memory_bytes

RESULTS = Path(__file__).resolve().parent / "results" / "measurements.json"
VOCABULARIES, HIDDEN, ROWS, TOKENS = (2_048, 8_192, 32_768, 128_256), 64, 4, 1_024


@dataclass(frozen=True, kw_only=True)
class Config:
    variant: Literal["whole", "chunked"] | None = None  # used by the program itself: measure this one in this process
    vocabulary: int = VOCABULARIES[-1]  # of the model that --variant measures


def measure(variant: str, vocabulary: int) -> dict:
    """Run one variant in this process: the memory that it added, its CPU seconds, and its loss for comparison."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
        )
    )  # fmt: skip
    policy = Policy(model, tokenizer=None, end_of_turn_ids=[2], pad_id=2)
    sequences = torch.randint(0, vocabulary, (ROWS, TOKENS + 1))  # a prompt of one token
    action_mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
    before, start = peak_memory_bytes("cpu"), time.process_time()
    if variant == "chunked":
        log_probs = policy(sequences, action_mask).log_probs
    else:
        logits = model(sequences, use_cache=False).logits[:, :-1].float()  # (B, T-1, V)
        log_probs = logits.log_softmax(dim=-1).gather(-1, sequences[:, 1:, None])[..., 0]
    loss = -log_probs.mean()
    loss.backward()
    return {
        "added_bytes": peak_memory_bytes("cpu") - before,
        "cpu_seconds": round(time.process_time() - start, 2),
        "loss": loss.item(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    if config.variant:
        print(json.dumps(measure(config.variant, config.vocabulary)))
        return
    torch.set_num_threads(1)
    results: dict = {"rows": ROWS, "completion_tokens": TOKENS, "max_logits": MAX_LOGITS, "vocabularies": {}}
    for vocabulary in VOCABULARIES:
        entry: dict = {"all_logits_float32_bytes": ROWS * TOKENS * vocabulary * 4}
        for variant in ("whole", "chunked"):
            command = [sys.executable, __file__, "--variant", variant, "--vocabulary", str(vocabulary)]
            entry[variant] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
            added, seconds = entry[variant]["added_bytes"] / 1e9, entry[variant]["cpu_seconds"]
            print(f"{vocabulary:8,} words  {variant:8} {added:6.2f} GB added  {seconds:6.1f} s", flush=True)
        results["vocabularies"][str(vocabulary)] = entry
    write_json(RESULTS, results | describe_machine(), entry="logprob_memory")


if __name__ == "__main__":
    main()
