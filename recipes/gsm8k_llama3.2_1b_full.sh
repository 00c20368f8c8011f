#!/usr/bin/env bash
# GSM8K with Llama-3.2-1B-Instruct: GRPO on all weights.
#
#     bash recipes/gsm8k_llama3.2_1b_full.sh
#     bash recipes/gsm8k_llama3.2_1b_full.sh -- --steps 50        # further flags of the training
#     NUM_PROCESSES=4 bash recipes/gsm8k_llama3.2_1b_full.sh    # four GPUs
#
# Accept the model's licence on the hub and run `hf auth login` first.
#
# Hardware: 32.6 GB on one GPU, plus some headroom, by --estimate (see recipes/README.md); not measured.
# Follows: no published run that we know of.
# Published: none for a comparable run; Meta's model card gives 44.4 % for the model before training, with 8 worked
#     examples in the prompt.
# Differs: from the recipe of Qwen2.5-0.5B-Instruct only in the model.
# Not shown: this recipe has not been run on downloaded weights or on a GPU, so it has no results.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

train experiment_base/train.py \
    --task gsm8k --model meta-llama/Llama-3.2-1B-Instruct --gradient-checkpointing \
    --steps 348 --prompts-per-step 64 --group-size 8 --max-new-tokens 512 \
    --lr 1e-6 --kl-weight 0.001 \
    --generation-batch-size 128 --micro-batch-size 4 \
    "$@"
