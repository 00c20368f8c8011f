"""Peak memory of log-probabilities under Llama 3's vocabulary: all logits at once against chunks.

    python benchmarks/logprob_memory.py      # a minute or two; writes benchmarks/results/logprob_memory.json

A forward and a backward pass over the same tokens, each variant in a process of its own, on a CPU. The figure is the
process's peak resident memory less its peak before the pass.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from common.logprobs import MAX_LOGITS, Policy
from common.runs import describe_machine, peak_memory_bytes

RESULTS = Path(__file__).parent / "results" / "logprob_memory.json"
VOCABULARY, HIDDEN, ROWS, TOKENS = 128_256, 64, 8, 512


def measure(variant: str) -> dict:
    """Run one variant in this process: the memory that it added, its seconds, and its loss for comparison."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
        )
    )  # fmt: skip
    policy = Policy(model, tokenizer=None, end_of_turn_ids=[2], pad_id=2)
    sequences = torch.randint(0, VOCABULARY, (ROWS, TOKENS))
    action_mask = torch.ones(ROWS, TOKENS - 1, dtype=torch.long)
    before, start = peak_memory_bytes("cpu"), time.perf_counter()
    if variant == "chunked":
        log_probs = policy(sequences, action_mask).log_probs
    else:
        logits = model(sequences, use_cache=False).logits[:, :-1].float()  # (B, T-1, V), the whole of it
        log_probs = logits.log_softmax(dim=-1).gather(-1, sequences[:, 1:, None])[..., 0]
    loss = -log_probs.mean()
    loss.backward()
    return describe_machine() | {
        "added_bytes": peak_memory_bytes("cpu") - before,
        "seconds": round(time.perf_counter() - start, 2),
        "loss": loss.item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=("whole", "chunked"), help="measure this one here and print it as JSON")
    variant = parser.parse_args().variant
    if variant:
        print(json.dumps(measure(variant)))
        return
    results: dict = {
        "rows": ROWS, "tokens": TOKENS, "vocabulary": VOCABULARY, "max_logits": MAX_LOGITS,
        "all_logits_float32_bytes": ROWS * (TOKENS - 1) * VOCABULARY * 4,
    }  # fmt: skip
    for name in ("whole", "chunked"):
        command = [sys.executable, __file__, "--variant", name]
        results[name] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        print(f"{name:8} {results[name]['added_bytes'] / 2**20:8,.0f} MiB  {results[name]['seconds']:6.1f} s")
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
