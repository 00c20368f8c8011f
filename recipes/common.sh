# How a recipe starts its training, on one GPU or on several. The recipes source this file; README.md explains it.
#
#     train SCRIPT [FLAG ...]     with NUM_PROCESSES, CONFIG and PYTHON from the environment
#
# The current directory does not change: paths among the flags, and runs/, are relative to it.

set -euo pipefail

RECIPES=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname -- "$RECIPES")

if [[ ${1-} == -- ]]; then # a sourced file shares the recipe's own arguments
    shift
fi

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

train() {
    local script=$1 python=${PYTHON:-python} processes=${NUM_PROCESSES:-1} config=${CONFIG:-} file
    shift
    command -v "$python" >/dev/null || fail "PYTHON=$(printf %q "$python"): there is no such command"
    [[ $processes =~ ^[1-9][0-9]{0,3}$ ]] || fail "NUM_PROCESSES=$(printf %q "$processes") must be 1 to 9999"
    if [[ $processes$config != 1 && $script != experiment_accelerate/train.py ]]; then
        fail "$script runs in one process: leave out NUM_PROCESSES and CONFIG"
    fi
    file=$ROOT/accelerate_configs/$config.yaml
    if [[ -n $config ]]; then
        [[ -f $file ]] || fail "CONFIG=$(printf %q "$config") is not a file of accelerate_configs/"
        exec "$python" -m accelerate.commands.launch --config_file "$file" --num_processes "$processes" \
            --main_process_port 0 "$ROOT/$script" "$@"
    elif ((processes > 1)); then # each process holds the whole model
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
        exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$processes" "$ROOT/$script" "$@"
    fi
    exec "$python" "$ROOT/$script" "$@"
}
