# How a recipe starts its training, on one GPU or on several. The recipes source this file; README.md explains it.
#
#     train SCRIPT [FLAG ...]     with NUM_PROCESSES, CONFIG and PYTHON from the environment
#
# Words before a -- start it instead: bash recipes/X.sh torchrun --nproc-per-node 2 -- --steps 5
#
# The current directory does not change: paths among the flags, and runs/, are relative to it.

set -euo pipefail

RECIPES=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname -- "$RECIPES")

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

RUNNER=()
if [[ -n ${1-} && $1 != -* ]]; then
    while (($#)) && [[ $1 != -- ]]; do # a sourced file shares the recipe's own arguments
        RUNNER+=("$1")
        shift
    done
    (($#)) || fail "$(printf %q "${RUNNER[0]}"): end the words of a launcher with --, and begin flags of the training with -"
fi
if [[ ${1-} == -- ]]; then
    shift
fi

start() { # the command in place of this program, after showing it
    printf '%s' 'command:' >&2
    printf ' %q' "$@" >&2
    printf '\n' >&2
    exec "$@"
}

train() {
    local script=$1 python=${PYTHON:-python} processes=${NUM_PROCESSES:-1} config=${CONFIG:-} file
    shift
    if ((${#RUNNER[@]})); then
        command -v "${RUNNER[0]}" >/dev/null || fail "$(printf %q "${RUNNER[0]}"): there is no such command"
        [[ -z ${NUM_PROCESSES-}${CONFIG-} ]] || fail "NUM_PROCESSES and CONFIG make a launcher's words, and some are given: use one"
        start "${RUNNER[@]}" "$ROOT/$script" "$@"
    fi
    command -v "$python" >/dev/null || fail "PYTHON=$(printf %q "$python"): there is no such command"
    [[ $processes =~ ^[1-9][0-9]{0,3}$ ]] || fail "NUM_PROCESSES=$(printf %q "$processes") must be 1 to 9999"
    if [[ $config == deepspeed* && $script == experiment_base/train.py ]]; then
        script=experiment_accelerate/train.py # the same training; DeepSpeed needs its backward
    fi
    file=$ROOT/recipes/accelerate_configs/$config.yaml
    if [[ -n $config ]]; then
        [[ -f $file ]] || fail "CONFIG=$(printf %q "$config") is not a file of recipes/accelerate_configs/"
        start "$python" -m accelerate.commands.launch --config_file "$file" --num_processes "$processes" \
            --main_process_port 0 "$ROOT/$script" "$@"
    elif ((processes > 1)); then # each process holds the whole model
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
        start "$python" -m torch.distributed.run --standalone --nproc-per-node "$processes" "$ROOT/$script" "$@"
    fi
    start "$python" "$ROOT/$script" "$@"
}
