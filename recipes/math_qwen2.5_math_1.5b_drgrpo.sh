#!/usr/bin/env bash
# MATH, levels 3 to 5, with Qwen2.5-Math-1.5B, a base model: Dr. GRPO on all weights.
#
#     bash recipes/math_qwen2.5_math_1.5b_drgrpo.sh
#     bash recipes/math_qwen2.5_math_1.5b_drgrpo.sh -- --steps 50        # further flags of the training
#
# Make the questions from the hub's once: python recipes/math_levels.py --output math_levels_3_to_5.jsonl
#
# Hardware: 44.0 GB on one GPU, plus some headroom, by --estimate (see recipes/README.md); not measured.
# Follows: Dr. GRPO (arXiv 2503.20783; https://github.com/sail-sg/understand-r1-zero, examples/): 128 questions per
#     step with 8 completions each, 3,000 tokens, learning rate 1e-6, no KL penalty, temperature 1, the Qwen-Math
#     template.
# Published: 42.1 %, the mean of AIME 2024, AMC, MATH-500, Minerva and OlympiadBench; before, 24.2 % with the
#     template.
# Differs: the questions, of MATH's training split only, where the authors' file for levels 3 to 5 has 8K (their
#     example for this model takes its math_12k); the judge of answers (math-verify's, see docs/tasks.md); a
#     completion that is cut off is judged like the others, where theirs earns nothing; 400 steps, where theirs takes
#     20 passes.
# Not shown: this recipe has not been run on downloaded weights or on a GPU, so it has no results.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

train experiment_drgrpo/train.py \
    --task math --data math_levels_3_to_5.jsonl --eval-data HuggingFaceH4/MATH-500::test \
    --model Qwen/Qwen2.5-Math-1.5B --gradient-checkpointing \
    --steps 400 --prompts-per-step 128 --group-size 8 --max-new-tokens 3000 \
    --lr 1e-6 --kl-weight 0 --temperature 1 \
    --generation-batch-size 128 --micro-batch-size 4 \
    "$@"
