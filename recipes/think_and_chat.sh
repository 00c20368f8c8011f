#!/usr/bin/env bash
# Chat, with or without a thought before the response, against a reward model that sees the response alone.
#
#     bash recipes/think_and_chat.sh llama_base zero think grpo
#     bash recipes/think_and_chat.sh qwen_instruct warm nothink grpo -- --steps 5      # further flags of the training
#     NUM_PROCESSES=8 CONFIG=fsdp2 bash recipes/think_and_chat.sh llama_base warm think ppo
#
# Words: the model (llama_base, llama_instruct: Llama-3.1-8B; qwen_base, qwen_instruct: Qwen2.5-7B); its start (zero: a
#     base model that is prompted; warm: fine-tuned before); think or nothink; grpo, or ppo for `llama_base warm`.
# Data: RLMT's wildchat-if_train.parquet and wildchat-if_val.parquet (README.md says where from).
# Model: `zero` takes the base model from the hub. `warm` takes a directory such as warm_llama_base_think, which you
#     make with imitation/sft (README.md), or another one with `-- --model`.
#
# Hardware: 98.9 to 125.5 GB on each of eight GPUs, by --estimate (see recipes/README.md); not measured.
# Follows: "Language models that think, chat better" (arXiv 2509.20357), the fourteen files of
#     https://github.com/princeton-pli/RLMT/tree/main/training/ppo_grpo/configs; recipes/README.md has them in a table.
# Published: no figure of a reward; the paper evaluates on chat benchmarks.
# Differs: recipes/README.md lists it.
# Not shown: this recipe has not been run on downloaded weights or on a GPU, so it has no results.

words="${*:1:4}"
shift $(($# < 4 ? $# : 4))
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

known='^((llama|qwen)_(base (warm|zero)|instruct warm) (think|nothink) grpo|llama_base warm (think|nothink) ppo)$'
[[ $words =~ $known ]] || fail "$(printf %q "$words"): give llama_base or qwen_base and warm or zero, or llama_instruct \
or qwen_instruct and warm; then think or nothink, and grpo; ppo only after llama_base warm"
read -r model start thoughts method <<<"$words"

script=experiment_base/train.py group_size=8 kl_weight=0.001 prompts=64 steps=234 lr=1e-6 temperature=0.7 top_p=1
longest=4096 flags=(--task prompts --system-prompt '')
if [[ $start == zero ]]; then
    longest=3584
    flags+=(--chat-template "$RECIPES/prompted_$thoughts.jinja" --stop '</response>')
    flags+=(--answer-begins "$RECIPES/longcot_config.json")
elif [[ $thoughts == think ]]; then
    flags+=(--answer-begins '</think>')
fi
case "$model $start" in
    "llama_base zero") steps=468 model=meta-llama/Llama-3.1-8B ;;
    "qwen_base zero") model=Qwen/Qwen2.5-7B ;;
    *) model=warm_${model}_$thoughts ;;
esac
if [[ $method == ppo ]]; then
    script=policy_gradients/ppo/train.py group_size=1 kl_weight=0 longest=3584
    flags+=(--value-clip 0.5)
elif [[ $words == *instruct* ]]; then
    lr=3e-7
fi
if [[ $words == *"instruct warm think grpo" || $words == "qwen_base warm nothink grpo" ]]; then
    prompts=128 steps=116 temperature=0.8 top_p=0.95
    flags+=(--minibatch-size 512)
fi
if [[ $words == *"instruct warm think grpo" ]]; then
    flags+=(--strict)
fi

train "$script" "${flags[@]}" \
    --data wildchat-if_train.parquet --eval-data wildchat-if_val.parquet --max-question-length "$longest" \
    --model "$model" --gradient-checkpointing --reward-model Skywork/Skywork-Reward-Llama-3.1-8B-v0.2 \
    --steps "$steps" --prompts-per-step "$prompts" --group-size "$group_size" --max-new-tokens 4096 \
    --temperature "$temperature" --top-p "$top_p" \
    --lr "$lr" --weight-decay 0.01 --kl-weight "$kl_weight" \
    --generation-batch-size 16 --micro-batch-size 1 --eval-every 45 --checkpoint-every 45 \
    "$@"
