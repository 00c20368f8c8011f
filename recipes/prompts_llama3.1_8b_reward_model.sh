#!/usr/bin/env bash
# Open questions with Llama-3.1-8B-Instruct: GRPO against a reward model that does not see the thought.
#
#     NUM_PROCESSES=8 CONFIG=fsdp2 bash recipes/prompts_llama3.1_8b_reward_model.sh
#     bash recipes/prompts_llama3.1_8b_reward_model.sh -- --reward-model-url http://judge:8000    # instead of the copies
#
# Hardware: 76.2 GB on each of eight GPUs, of which the reward model takes 16.1 GB, by --estimate (see
#     recipes/README.md); not measured. With the reward model on a server: 60.1 GB.
# Follows: "Language models that think, chat better" (arXiv 2509.20357): the policy thinks before it answers, and a
#     reward model, Skywork-Reward-V2-Llama-3.1-8B, scores the answer alone.
# Published: no figure of a reward; the paper evaluates on chat benchmarks.
# Differs: prompts of ultrafeedback_binarized in place of 7,500 chosen from WildChat; no KL penalty, because the
#     reference would take another 32 GB on each GPU; the learning rate is that of our other recipes.
# Not shown: this recipe has not been run on downloaded weights or on a GPU, so it has no results.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

train experiment_base/train.py \
    --task prompts --data HuggingFaceH4/ultrafeedback_binarized:default:train_prefs \
    --model meta-llama/Llama-3.1-8B-Instruct --gradient-checkpointing \
    --reward-model Skywork/Skywork-Reward-V2-Llama-3.1-8B --answer-begins '</think>' --strict \
    --steps 234 --prompts-per-step 64 --group-size 8 --max-new-tokens 2048 --max-question-length 4000 \
    --lr 1e-6 --kl-weight 0 \
    --generation-batch-size 32 --micro-batch-size 1 \
    "$@"
