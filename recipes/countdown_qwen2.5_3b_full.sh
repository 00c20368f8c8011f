#!/usr/bin/env bash
# Countdown with Qwen2.5-3B, a base model: GRPO on all weights.
#
#     bash recipes/countdown_qwen2.5_3b_full.sh
#     bash recipes/countdown_qwen2.5_3b_full.sh -- --steps 50        # further flags of the training
#     NUM_PROCESSES=4 CONFIG=fsdp2 bash recipes/countdown_qwen2.5_3b_full.sh    # four GPUs, sharded
#
# Hardware: 74.6 GB on one GPU, plus some headroom, by --estimate (see recipes/README.md); not measured.
# Follows: TinyZero (https://github.com/Jiayi-Pan/TinyZero, scripts/train_tiny_zero.sh): learning rate 1e-6, KL
#     coefficient 0.001, 256 completions per step in updates of 128, 1,024 tokens, the question in plain text, an
#     answer that begins with `<think>`, rewards of 1 and 0.1.
# Published: no figure in its README, which reports that the 3B base model learns to search and to verify itself.
# Differs: GRPO with 8 completions for each of 32 questions, whereas TinyZero has PPO with a critic and one completion
#     for each of 256; the KL is in the loss and not in the reward; an answer counts only if it is the only one, where
#     TinyZero takes the last; the wording of the question, and the rules in front of it; 320 steps, where TinyZero
#     allows 15 passes over its questions; evaluation on 256 held-out rows.
# Not shown: this recipe has not been run on downloaded weights or on a GPU, so it has no results.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

train experiment_base/train.py \
    --task countdown --data Jiayi-Pan/Countdown-Tasks-3to4 --model Qwen/Qwen2.5-3B --gradient-checkpointing \
    --chat-template "$RECIPES/base_model.jinja" --completion-prefix $'Let me solve this step by step.\n<think>' \
    --reward-weight correct=0.9 answered=0.1 \
    --steps 320 --prompts-per-step 32 --group-size 8 --minibatch-size 128 --max-new-tokens 1024 \
    --lr 1e-6 --kl-weight 0.001 \
    --generation-batch-size 64 --micro-batch-size 4 \
    "$@"
